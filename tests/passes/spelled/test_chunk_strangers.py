"""Chunk forms by strangers become one op, and those with a mistake in them stay, with a reason."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import lattn_compile as lc
from lattn_compile.recurrence import classify
from tests.passes.spelled.chunk_foreigners import FOREIGNERS, RetentionTables, SlopesInABuffer
from tests.passes.spelled.chunk_near_misses import NEAR_MISSES
from tests.passes.spelled.chunk_strangers import STRANGERS
from tests.passes.spelled.test_chunkform import _Function, random_inputs

SPELLINGS = {**STRANGERS, **FOREIGNERS}
FULL = os.environ.get("LATTN_CORPUS") == "full"
CASES = [  # one of a spelling's lengths, the first of one and the last of the next; all of them where everything is run
    (name, tokens)
    for i, (name, spelling) in enumerate(SPELLINGS.items())
    for tokens in (spelling[3] if FULL else (spelling[3][-(i % 2)],))
]
MIXING = ("matmul", "bmm", "einsum", "baddbmm", "cumsum", "cumprod", "linalg", "tril", "triu")


def exported(fn: Any, args: list[Tensor]) -> ExportedProgram:
    return torch.export.export(fn if isinstance(fn, nn.Module) else _Function(fn), tuple(args), strict=False)


def mixing(program: ExportedProgram) -> list[str]:
    """What is left that mixes tokens."""
    return [str(n.target) for n in program.graph.nodes if any(name in str(n.target) for name in MIXING)]


def worst(want: Any, got: Any) -> float:
    """Of the outputs, relative to their largest element if that is above 1."""
    pairs = zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1)) for a, b in pairs)


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_a_chunk_form_by_strangers_becomes_one_op(name: str, tokens: int) -> None:
    fn, rule, decay, _ = SPELLINGS[name]
    args = random_inputs(2, tokens, 3, 8, 6, decay=decay)
    result = lc.rewrite(exported(fn, args), "exact")
    [site] = result.report.sites
    assert (site.verdict, site.form, site.kind) == ("rewritten", "chunk", classify(rule, decay).name)
    assert not result.report.unmatched
    assert not mixing(result.module)
    with torch.no_grad():
        assert worst(fn(*args), result.module.module()(*args)) < 1e-5


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_chunk_form_with_a_mistake_is_left_with_a_reason(name: str) -> None:
    """Its first block may be a recurrence of its own; what is rewritten computes what it did."""
    fn, args = NEAR_MISSES[name], random_inputs(1, 32, 2, 8, 8)
    result = lc.rewrite(exported(fn, args), "exact")
    assert {u.reason.code for u in result.report.unmatched} == {"CHUNK_NOT_EQUAL"}
    assert mixing(result.module)
    with torch.no_grad():
        assert worst(fn(*args), result.module.module()(*args)) < 1e-5


@pytest.mark.parametrize("wrong", ["mask", "inner", "cross"])
def test_tables_that_are_no_powers_are_named_and_left(wrong: str) -> None:
    layer, args = RetentionTables(), random_inputs(1, 48, 3, 8, 6)
    getattr(layer, wrong).mul_(1.01)
    report = lc.rewrite(exported(layer, args), "exact").report
    assert not report.sites
    assert [u.reason.code for u in report.unmatched] == ["CHUNK_DECAY_INPUTS"]


def test_tables_that_are_others_later_are_an_error() -> None:
    layer, args = RetentionTables(), random_inputs(1, 48, 3, 8, 6)
    module = lc.rewrite(exported(layer, args), "exact").module.module()
    other = RetentionTables()
    for buffer in (other.mask, other.inner, other.cross):
        buffer.pow_(2.0)  # powers of the decay squared are as good
    for name, buffer in other.named_buffers():
        module.get_buffer(name).copy_(buffer)
    assert worst(other(*args), module(*args)) < 1e-5
    module.get_buffer("inner").mul_(1.01)
    with pytest.raises(RuntimeError, match="inner does not hold the powers"):
        module(*args)


def test_a_mask_of_the_shape_of_a_state_is_no_state() -> None:
    layer, args = RetentionTables(), random_inputs(1, 32, 3, 16, 16)
    [site] = lc.rewrite(exported(layer, args), "exact").report.sites
    assert site.verdict == "rewritten"


@pytest.mark.parametrize(("name", "tokens", "any_length"), [("deltanet_parallel", 24, True), ("gla_split", 40, False)])
def test_a_chunk_form_of_any_batch_and_one_block_of_any_length(name: str, tokens: int, any_length: bool) -> None:
    fn, _, decay, _ = SPELLINGS[name]
    batch = {0: Dim("batch", min=1, max=64)}
    sizes = {**batch, 1: Dim("tokens", min=2, max=512)} if any_length else batch
    args = tuple(random_inputs(3, tokens, 2, 8, 6, decay=decay))
    program = torch.export.export(_Function(fn), args, dynamic_shapes=((*[sizes] * 5, batch),), strict=False)
    result = lc.rewrite(program, "exact")
    assert [s.form for s in result.report.rewritten] == ["chunk"]
    args = tuple(random_inputs(5, tokens + 7 * any_length, 2, 8, 6, decay=decay))
    assert worst(fn(*args), result.module.module()(*args)) < 1e-5


def test_slopes_in_a_buffer_may_change() -> None:
    """The decay is read where it stands: nothing of its value is in the program."""
    layer, args = SlopesInABuffer(), random_inputs(1, 40, 3, 8, 6)
    module = lc.rewrite(exported(layer, args), "exact").module.module()
    for each in (layer, module):
        each.get_buffer("slopes").mul_(1.7)
    assert worst(layer(*args), module(*args)) < 1e-5


def test_a_compiled_layer_with_tables_trains() -> None:
    """Dynamo hands its buffers in; layers of other decays share the graph."""
    from lattn_compile.testing.backend import recorded

    args = [x.requires_grad_() for x in random_inputs(1, 32, 3, 8, 6)]
    used = [args[i] for i in (0, 1, 2, 5)]
    layer, other = RetentionTables(), RetentionTables()
    for buffer in (other.mask, other.inner, other.cross):
        buffer.pow_(3.0)
    torch._dynamo.reset()
    compiled = torch.compile(lambda m, *a: m(*a), backend="lattn_compile", options={"policy": "exact"}, fullgraph=True)
    with recorded() as record:
        for each in (layer, other):
            want, got = each(*args), compiled(each, *args)
            assert worst(want, got) < 1e-5
            gradients = [torch.autograd.grad(sum(x.square().sum() for x in out), used) for out in (want, got)]
            assert worst(*gradients) < 1e-4
        assert [s.verdict for s in record.report.sites] == ["rewritten"]


ONES = [("gla_split", 1, 6), ("gdn_rows_in_a_list", 8, 1), ("gla_split", 1, 1)]
ONES_TOO = [("gdn_rows_in_a_list", 1, 6), ("gla_split", 8, 1), ("gdn_rows_in_a_list", 1, 1)]


@pytest.mark.parametrize(("name", "K", "V"), [*ONES, *(ONES_TOO if FULL else [])])
def test_keys_or_values_of_one_channel(name: str, K: int, V: int) -> None:
    fn, _rule, decay, tokens = SPELLINGS[name]
    args = random_inputs(2, tokens[0], 3, K, V, decay=decay)
    result = lc.rewrite(exported(fn, args), "exact")
    assert [s.form for s in result.report.rewritten] == ["chunk"]
    with torch.no_grad():
        assert worst(fn(*args), result.module.module()(*args)) < 1e-5

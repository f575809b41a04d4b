"""Layers by strangers: what is recognised, what is left and with which reason, and that no number changes.

LEFT lists recurrences that are not recognised, with the reasons that they end in: a test fails when that changes.
CI takes one layer of three as it is exported; `LATTN_CORPUS=full` takes all of them, through torch.compile and
decomposed graphs as well.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import lattn_compile as lc
from lattn_compile.recurrence import classify
from lattn_compile.report import Report
from lattn_compile.testing.backend import recorded
from tests.passes.spelled import (  # noqa: F401  they register their layers
    stranger_additive_loops,
    stranger_chunks,
    stranger_delta_loops,
    stranger_near_misses,
    stranger_parallel,
    stranger_references,
    stranger_scans,
)
from tests.passes.spelled.stranger_layers import LAYERS, Built, Layer

NAMED = {layer.name: layer for layer in LAYERS}

FULL = os.environ.get("LATTN_CORPUS") == "full"
VIAS = ("export", "compile", "decomposed") if FULL else ("export",)
# Tracers say what they do not like about in-place code; none of it is about the rewrite.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Recurrences that are left, and the reasons in the report.
LEFT: dict[str, set[str]] = {
    "loop_rwkv6_bonus": {"READ_BEFORE_WRITE", "STATE_OP"},
    "loop_grouped_queries": {"GROUPED_QUERIES"},
    "step_retention_with_a_running_scale": {"DECAY_RANGE"},
    "associative_scan_of_outer_products": {"ASSOCIATIVE_SCAN"},
}

#: Near misses, and the reasons in the report; an empty set is silence: softmax attention is no candidate.
MISSES: dict[str, set[str]] = {
    "writes_along_the_query": {"KEYS_DIFFER"},
    "decays_after_the_erase": set(),
    "erases_the_undecayed_state": {"CHUNK_NOT_EQUAL", "DECAY_ORDER"},
    "tanh_of_the_state": {"STATE_OP"},
    "state_of_unit_norm": {"STATE_OP"},
    "beta_on_the_write_only": {"BETA_ONE_SIDE"},
    "beta_squared_on_the_erase": set(),
    "reads_the_old_state": {"READ_BEFORE_WRITE"},
    "reads_the_decayed_state_before_the_write": {"READ_BEFORE_WRITE"},
    "writes_two_keys": set(),
    "erases_a_neighbouring_head": {"STATE_OP"},
    "rwkv7_two_keys": {"DECAY_ORDER"},
    "momentum_on_the_write": {"DECAY_ORDER"},
    "normalised_linear_attention": {"DECAY_ORDER", "STATE_OP"},
    "ttt_linear_with_layer_norm": {"STATE_OP"},
    "exponential_moving_average": set(),
    "softmax_attention": set(),
    "linear_attention_of_both_sides": {"CHUNK_NOT_EQUAL"},
    "anti_causal_chunks": {"CHUNK_NOT_EQUAL"},
    "strictly_causal_parallel": {"CHUNK_NOT_EQUAL"},
    "chunks_decay_cumsum_off_by_one": {"CHUNK_NOT_EQUAL"},
    "chunks_erase_without_decay": {"CHUNK_NOT_EQUAL"},
    "chunks_that_forget_to_erase_the_carried_state": {"CHUNK_NOT_EQUAL"},
    "chunks_that_write_without_the_tail_decay": {"CHUNK_NOT_EQUAL"},
    "diagonal_ssm_convolution": set(),
    "mamba1_selective_scan": {"DECAY_AXIS"},
    "decays_that_change_within_a_read": set(),
    "query_gates_the_state": {"CHUNK_NOT_EQUAL", "STATE_NONLINEAR"},
    "state_detached_between_tokens": set(),
    "erase_detached": {"STATE_OP"},
    "erase_key_detached": {"KEYS_DIFFER"},
    "chunk_state_detached": set(),
    "state_clamped_far_away": {"STATE_OP"},
    "chunk_decay_differences_floored": {"CHUNK_CLAMPED"},
    "beta_of_every_value_channel": {"STATE_MIXED"},
    "signed_decay": {"DECAY_RANGE"},
    "preconditioned_write": {"KEYS_DIFFER"},
    "channel_decay_erases_the_undecayed_state": {"CHUNK_DECAY_INPUTS", "DECAY_ORDER"},
    "sliding_window": {"CHUNK_NOT_EQUAL"},
    "symmetric_distance_decay": {"CHUNK_NOT_EQUAL"},
    "polynomial_decay": {"CHUNK_NOT_EQUAL"},
    "bonus_on_the_diagonal": {"CHUNK_NOT_EQUAL"},
    "documents_in_the_mask": {"CHUNK_INPUTS"},
    "state_rounded_by_itself": {"STATE_OP"},
}

#: Near misses that are a recurrence in another notation, or in a part: how many sites are rewritten.
PARTLY: dict[str, int] = {
    "decays_after_the_erase": 4,
    "beta_squared_on_the_erase": 1,
    "writes_two_keys": 1,
    "chunks_that_forget_to_erase_the_carried_state": 1,
    "decays_that_change_within_a_read": 1,
    "state_detached_between_tokens": 4,
    "chunk_state_detached": 3,
}

#: Recognised, with other candidates beside it that are rightly left.
BESIDE: dict[str, set[str]] = {
    "step_gsa": {"DECAY_AXIS"},
}

#: More than one recurrence in a layer.
SITES: dict[str, int] = {
    "parallel_hedgehog": 2,  # and the sums of its scores
    "parallel_mlstm_bounded_sums": 2,
    "loop_two_layers_stack": 2,
    "loop_both_directions": 2,
}

#: A loop that is recognised in pieces.
PIECES: dict[str, list[tuple[str, str]]] = {
    "loop_writes_every_other_token": [("linear", "step"), ("retention", "step")],
    "loop_two_reads": [("delta", "step"), ("gdn", "step"), ("gdn", "step"), ("gdn", "step")],
}


#: Layers that update their inputs in place, and how many outputs they have. An exported program of them that is
#: rewritten cannot be differentiated eagerly: the state that is read is saved for the backward.
UPDATES: dict[str, int] = {"step_taylor_features": 3}

#: What a tracer itself refuses, or traces to what cannot be differentiated.
UNTRACED: dict[str, tuple[str, ...]] = {"decomposed": ("scan_gla_gates_outside",)}

#: Taken apart, not recognised or not all of it: too many views of axes of one size, scores divided behind a view, and a
#: graph that a loop's body keeps from being traced again.
TAKEN_APART = ("chunk_gdn_tokens_first_module", "parallel_hedgehog", "scan_gated_delta")


class _Function(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> Any:
        return self.fn(*args)


def build(layer: Layer) -> Built:
    """Its callable and inputs, always the same."""
    torch.manual_seed(0)
    return layer.build()


def values_and_gradients(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> list[Tensor]:
    """Every output, and the gradient to every float input of a random sum of them.

    Layers that write into a state they have read cannot be differentiated eagerly: of those only values.
    """
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
    outs = [x for x in pytree.tree_leaves(fn(*(x.clone() for x in leaves))) if isinstance(x, Tensor)]
    generator = torch.Generator().manual_seed(1)
    total = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outs)
    wanted = [x for x in leaves if x.requires_grad]
    values = [x.detach().clone() for x in outs]
    if not isinstance(total, Tensor) or not total.requires_grad:
        return values
    try:
        return values + list(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return values


def worst(want: list[Tensor], got: list[Tensor]) -> float:
    """Relative to each tensor's largest element, if that is above 1; NaN only where NaN is wanted."""
    assert len(got) >= len(want)
    errors = []
    for a, b in zip(want, got, strict=False):
        assert torch.equal(a.isnan(), b.isnan())
        a, b = a.nan_to_num(), b.nan_to_num()
        errors.append(float((a - b).abs().max() / a.abs().max().clamp(min=1)))
    return max(errors)


def rewritten(layer: Layer, via: str) -> Report:
    """Rewritten, its values and gradients compared.

    via: "export", "compile" (run node by node, without Inductor), or "decomposed": traced below autograd.
    """
    fn, args = build(layer)
    original: Callable[..., Any] = build(layer)[0]
    if via == "compile":
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})

        def run(*args: Tensor) -> Any:
            with recorded():
                return compiled(*args)
    else:
        if via == "export":
            program = torch.export.export(fn if isinstance(fn, nn.Module) else _Function(fn), args, strict=False)
            result = lc.rewrite(program, "exact")
            traced, run = program.module(), result.module.module()
        else:
            buffers = {n: x.clone() for n, x in fn.named_buffers()} if isinstance(fn, nn.Module) else {}
            traced = make_fx(fn)(*(x.clone() for x in args))
            for name, x in buffers.items():  # which the trace may have updated
                fn.get_buffer(name).copy_(x)  # type: ignore[attr-defined]
            result = lc.rewrite(traced, "exact")
            run = result.module
        # scan and while_loop are differentiated as traced only.
        original = traced if layer.form == "scan" else original
    got, want = values_and_gradients(run, args), values_and_gradients(original, args)
    if via != "compile" and layer.name in UPDATES:
        want = want[: UPDATES[layer.name]]
    assert worst(want, got) < 1e-5
    report = lc.last_report() if via == "compile" else result.report
    assert report is not None
    return report


def reasons(report: Report) -> set[str]:
    return {x.reason.code for x in (*report.left, *report.unmatched) if x.reason is not None}


RECOGNISED = [layer.name for layer in LAYERS if layer.rule is not None and layer.name not in LEFT]


def sampled(names: Iterable[str], *always: str) -> list[str]:
    """All, or every third of them and those named."""
    names = list(names)
    return names if FULL else [name for i, name in enumerate(names) if i % 3 == 0 or name in always]


#: Forms that no other test has.
ALWAYS = ("parallel_hedgehog", "chunk_mlstm_no_normaliser", "parallel_retnet", "chunk_grouped_queries")
#: Of which little is left to go by once they are taken apart.
DECOMPOSED = ("chunk_cumsum_of_states", "chunk_grouped_queries", "parallel_deltanet_quadratic")
CASES = [(name, via) for via in VIAS for name in sampled(RECOGNISED, *ALWAYS)]
CASES += [] if FULL else [(name, "decomposed") for name in DECOMPOSED]


@pytest.mark.parametrize(("name", "via"), CASES)
def test_a_layer_by_strangers_is_recognised(name: str, via: str) -> None:
    layer = NAMED[name]
    if name in UNTRACED.get(via, ()):
        pytest.skip("the tracer does not take it")
    report = rewritten(layer, via)
    if via == "decomposed" and name in TAKEN_APART:
        return
    assert layer.rule is not None
    assert layer.decay is not None
    kind = classify(layer.rule, layer.decay).name
    wanted = PIECES.get(name, [(kind, layer.form)] * SITES.get(name, 1))
    assert [(s.kind, s.form) for s in report.rewritten] == wanted
    assert reasons(report) == BESIDE.get(name, set())


@pytest.mark.parametrize("name", LEFT)
def test_a_layer_by_strangers_that_is_left_says_why(name: str) -> None:
    report = rewritten(NAMED[name], "export")
    assert not report.rewritten
    assert reasons(report) == LEFT[name]


@pytest.mark.parametrize("name", sampled(MISSES))
def test_a_near_miss_by_strangers_is_left_or_computes_what_it_did(name: str) -> None:
    report = rewritten(NAMED[name], "export")
    assert len(report.rewritten) == PARTLY.get(name, 0)
    assert reasons(report) == MISSES[name]


@pytest.mark.parametrize(("name", "via"), itertools.product([*MISSES, *LEFT], VIAS[1:]))
def test_no_tracer_makes_a_number_of_a_near_miss_another(name: str, via: str) -> None:
    if name in UNTRACED.get(via, ()):
        pytest.skip("the tracer does not take it")
    rewritten(NAMED[name], via)


def test_no_layer_is_in_no_list() -> None:
    assert {*RECOGNISED, *LEFT, *MISSES} == NAMED.keys()

"""Layers by strangers: what is recognised, what is left and with which reason, and that no number changes.

LEFT lists recurrences that are not recognised, with the reasons that they end in: a test fails when that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import lattn_compile as lc
from lattn_compile.recurrence import classify
from lattn_compile.report import Report
from tests.passes.spelled import (  # noqa: F401  they register their layers
    stranger_additive_loops,
    stranger_chunks,
    stranger_delta_loops,
    stranger_near_misses,
    stranger_parallel,
    stranger_scans,
)
from tests.passes.spelled.stranger_layers import LAYERS, Built, Layer

NAMED = {layer.name: layer for layer in LAYERS}

#: Recurrences that are left, and the reasons in the report.
LEFT: dict[str, set[str]] = {
    "loop_retnet_recurrent": {"DECAY_RANGE"},
    "loop_rwkv6_bonus": {"READ_BEFORE_WRITE", "STATE_OP"},
    "loop_grouped_queries": {"NOT_READ"},
    "chunk_mlstm_no_normaliser": {"CHUNK_INPUTS"},
    "chunk_gdn_tokens_first_module": {"CHUNK_INPUTS", "NOT_RANK_ONE"},
    "chunk_clamped_differences": {"CHUNK_NOT_EQUAL"},
    "chunk_gla_subblocks": {"CHUNK_OPERATOR"},
    "chunk_grouped_queries": {"CHUNK_NOT_EQUAL"},
    "parallel_retnet": {"SELF_CHECK"},
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
    "chunk_decay_differences_floored": {"CHUNK_NOT_EQUAL"},
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
    "loop_two_layers_stack": 2,
    "loop_both_directions": 2,
}

#: A loop that is recognised in pieces.
PIECES: dict[str, list[tuple[str, str]]] = {
    "loop_writes_every_other_token": [("linear", "step"), ("retention", "step")],
    "loop_two_reads": [("delta", "step"), ("gdn", "step"), ("gdn", "step"), ("gdn", "step")],
}


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


def rewritten(layer: Layer) -> Report:
    """Rewritten as exported, its values and gradients compared."""
    fn, args = build(layer)
    program = torch.export.export(fn if isinstance(fn, nn.Module) else _Function(fn), args, strict=False)
    result = lc.rewrite(program, "exact")
    # scan and while_loop are differentiated as exported only.
    want = values_and_gradients(program.module(), args) if layer.form == "scan" else values_and_gradients(*build(layer))
    assert worst(want, values_and_gradients(result.module.module(), args)) < 1e-5
    return result.report


def reasons(report: Report) -> set[str]:
    return {x.reason.code for x in (*report.left, *report.unmatched) if x.reason is not None}


RECOGNISED = [layer.name for layer in LAYERS if layer.rule is not None and layer.name not in LEFT]


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_layer_by_strangers_is_recognised(name: str) -> None:
    layer = NAMED[name]
    report = rewritten(layer)
    assert layer.rule is not None
    assert layer.decay is not None
    kind = classify(layer.rule, layer.decay).name
    wanted = PIECES.get(name, [(kind, layer.form)] * SITES.get(name, 1))
    assert [(s.kind, s.form) for s in report.rewritten] == wanted
    assert reasons(report) == BESIDE.get(name, set())


@pytest.mark.parametrize("name", LEFT)
def test_a_layer_by_strangers_that_is_left_says_why(name: str) -> None:
    report = rewritten(NAMED[name])
    assert not report.rewritten
    assert reasons(report) == LEFT[name]


@pytest.mark.parametrize("name", MISSES)
def test_a_near_miss_by_strangers_is_left_or_computes_what_it_did(name: str) -> None:
    report = rewritten(NAMED[name])
    assert len(report.rewritten) == PARTLY.get(name, 0)
    assert reasons(report) == MISSES[name]


def test_no_layer_is_in_no_list() -> None:
    assert {*RECOGNISED, *LEFT, *MISSES} == NAMED.keys()

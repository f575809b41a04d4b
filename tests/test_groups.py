"""Layers that are compiled one by one share what was compiled for their policy, however many rules a recipe has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile.attach import GROUP, first_alike, uncompiled, unwrapped_path
from lattn_compile.testing.backend import recorded

LAYERS = 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).unbind(-3)
        return x + lc.linear_attention(q, k, v, use_qk_l2norm_in_kernel=True)[0].flatten(-2)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def recipe() -> lc.Recipe:
    """As `lc.calibrate` writes them: a rule for almost every layer, and two policies."""
    rules = [(str(i), "int8" if i % 3 else "fp8") for i in range(LAYERS)]
    return lc.Recipe(rules=[*rules, ("*", "exact")])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def test_a_rule_for_every_layer_compiles_once_a_policy() -> None:
    """Dynamo gives up on code that was compiled 8 times: the layers beyond it would run uncompiled, and exactly."""
    model = lc.attach(stack(), recipe())
    for layer in model:
        layer.compile(backend="lattn_compile", fullgraph=True)
    with recorded() as record, torch.no_grad():
        model(torch.randn(1, 5, 8))
    got = [call.arguments["state_format"] for call in record.calls]
    assert got == ["int8/*x64" if i % 3 else "fp8_e4m3/*x64" for i in range(LAYERS)]
    assert len(record.graphs) == 2


def test_groups_are_told_apart_by_what_is_asked_and_by_nothing_less() -> None:
    model = lc.attach(stack(), recipe())
    groups = [layer.__dict__[GROUP] for layer in model]
    assert len(set(groups)) == 2 and groups[0] == groups[3] != groups[1]
    left = lc.Recipe(rules=[("1", None), ("2", "int8"), ("3", None), ("4", "int8")])  # 0 has no rule at all
    lc.attach(model, left)
    again = [layer.__dict__[GROUP] for layer in model]
    assert again[1] == again[3] and again[2] == again[4] and len({*again[:3]}) == 3
    assert not {*again} & {*groups}, "another recipe is another group, even with the same policy"
    assert [first_alike(left, i) for i in (None, 0, 1, 2, 3)] == [None, 0, 1, 0, 1]


def test_names_of_wrappers_are_no_part_of_a_path() -> None:
    assert unwrapped_path("_orig_mod.layers.3._checkpoint_wrapped_module.attn") == "layers.3.attn"
    model = stack()
    assert uncompiled(torch.compile(model)) is model and uncompiled(model) is model

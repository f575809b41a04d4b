"""What a decode step's kernels may read where it lies, and what they may not take for a gate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lattn_compile.lowering import gpu_fold

BASE = torch.arange(2 * 48, dtype=torch.float32)

LYING: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x.view(2, 48),
    "a part": lambda x: x.view(2, 48)[:, 6:18],
    "groups": lambda x: x.view(2, 1, 8, 6).split([2, 4], -1)[1].clone().reshape(2, 32),
    "groups of groups, whole": lambda x: x.view(2, 4, 2, 6)[..., 2:5].reshape(2, 24),
    "every other": lambda x: x.view(2, 24, 2)[..., 1],
    "every other of groups": lambda x: x.view(2, 4, 6, 2)[:, :, 1:4, 0].reshape(2, 12),
    "rows behind one another": lambda x: x.view(2, 2, 24).select(0, 1),
    "one number a row": lambda x: x.view(2, 48)[:, 7:8],
}


def _last(function: Callable[..., Tensor], *args: Tensor) -> fx.Node:
    graph = make_fx(function)(*args).graph
    node = graph.output_node().args[0]
    assert isinstance(node, fx.Node)
    return node


@pytest.mark.parametrize("name", LYING)
def test_numbers_are_found_where_they_lie(name: str) -> None:
    want = LYING[name](BASE)
    at = gpu_fold.placed(_last(LYING[name], BASE), 2, want.numel() // 2)
    assert at is not None
    first = int(want.flatten()[0])  # numbers are their own addresses
    i, j = torch.arange(2)[:, None], torch.arange(want.numel() // 2)
    assert torch.equal(BASE[first + i * at.row + j // at.run * at.group + j % at.run * at.step], want.view(2, -1))


@pytest.mark.parametrize(
    "lying",
    [lambda x: x.view(2, 4, 2, 6)[:, 1:, :1, 2:5].reshape(2, 9)[:, 2:], lambda x: x.view(3, 2, 16)[1:, :, 3:7].sum(0)],
    ids=["cut across groups", "computed, which is its own memory"],
)
def test_what_no_two_strides_tell_is_no_place_in_the_base(lying: Callable[[Tensor], Tensor]) -> None:
    node = _last(lying, BASE)
    at = gpu_fold.placed(node, 2, node.meta["val"].numel() // 2)
    assert at is None or at.node is node


def test_three_strides_are_too_many() -> None:
    node = _last(lambda x: x.view(2, 3, 2, 8)[:, :, :, :3].transpose(2, 3)[..., :1, :].reshape(2, 6), BASE)
    assert gpu_fold.placed(node, 2, 6) is not None
    node = _last(lambda x: x.view(2, 2, 4, 6)[:, :, 1:, 2:5].reshape(2, 18), BASE)
    assert gpu_fold.placed(node, 2, 18) is None


def _gates(function: Callable[..., Tensor], *, rate: torch.dtype = torch.float32) -> fx.Node:
    """Behind Inductor's decompositions, as the pass meets them."""
    from torch._inductor.decomposition import select_decomp_table

    x = torch.randn(2, 1, 6, dtype=torch.bfloat16), torch.randn(6, dtype=rate), torch.randn(6)
    node = make_fx(function, decomposition_table=select_decomp_table())(*x).graph.output_node().args[0]
    assert isinstance(node, fx.Node)
    return node


softplus = torch.nn.functional.softplus


def test_a_decay_is_taken_as_models_spell_it() -> None:
    for spelled in (
        lambda a, rate, bias: -rate.float().exp() * softplus(a.float() + bias),
        lambda a, rate, bias: softplus(bias + a.float()) * -rate.exp(),
    ):
        found = gpu_fold._mamba(_gates(spelled), 2, 6)
        assert found is not None
        rate, at, bias = found
        assert [x.name for x in (rate, bias)] == ["rate_1", "bias_1"] and at.node.name == "a_1"


@pytest.mark.parametrize(
    "spelled",
    [
        lambda a, rate, bias: rate.exp() * softplus(a.float() + bias),
        lambda a, rate, bias: -rate.exp() * softplus(a.float() + bias, beta=2.0),
        lambda a, rate, bias: -rate.exp() * softplus(a.float() + bias, threshold=10.0),
        lambda a, rate, bias: -(rate + 1).exp() * softplus(a.float() + bias),
        lambda a, rate, bias: -rate.exp() * softplus((a + bias.to(a.dtype)).float()),
        lambda a, rate, bias: -rate.exp() * softplus(a.float() * bias),
    ],
    ids=["sign", "beta", "threshold", "a rate computed", "a sum in bf16", "a product"],
)
def test_another_decay_is_left(spelled: Callable[..., Tensor]) -> None:
    assert gpu_fold._mamba(_gates(spelled), 2, 6) is None


def test_an_exponential_in_bf16_is_left() -> None:
    spelled = _gates(lambda a, rate, bias: -rate.exp() * softplus(a.float() + bias), rate=torch.bfloat16)
    assert gpu_fold._mamba(spelled, 2, 6) is None


def test_a_sigmoid_is_rounded_where_the_model_rounds_it() -> None:
    found = gpu_fold._sigmoid_of(_gates(lambda b, x, y: b.sigmoid()), 2, 6)
    assert found is not None and found.node.name == "b_1"
    # In fp32, of a bf16 number: what the kernel reads is then the fp32 one.
    wide = gpu_fold._sigmoid_of(_gates(lambda b, x, y: b.float().sigmoid()), 2, 6)
    assert wide is not None and wide.node.meta["val"].dtype is torch.float32
    assert gpu_fold._sigmoid_of(_gates(lambda b, x, y: 2 * b.sigmoid()), 2, 6) is None


def test_a_sigmoid_of_integers_is_left() -> None:
    node = _last(lambda b: b.sigmoid(), torch.arange(12).view(2, 6))
    assert gpu_fold._sigmoid_of(node, 2, 6) is None  # the kernel rounds to the dtype of what it reads

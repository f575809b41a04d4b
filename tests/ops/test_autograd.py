from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lattn_compile.errors import UnsupportedError
from tests.ops.cases import NAMES, OPS, inputs, options

MODES = [("chunk", "exact"), ("chunk", "chunk"), ("decode", "exact"), ("decode", "token")]
modes = pytest.mark.parametrize(("op", "write"), MODES)
NONE = (None,) * 4


@pytest.mark.parametrize("op", ["chunk", "decode"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_gradcheck(op: str, decay: str) -> None:
    tensors = inputs(1, 5, 1, 2, 3, 2, decay=decay, grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: OPS[op](*x, *NONE, **options(op, qk_l2norm=True))[:2], tensors, fast_mode=True
    )


@modes
def test_a_call_is_one_autograd_node_however_long(op: str, write: str) -> None:
    for tokens in (1, 200):
        tensors = inputs(1, tokens, dtype=torch.float32, grad=True)
        o = OPS[op](*tensors, *NONE, **options(op, write))[0]
        assert {type(node).__name__ for node, _ in o.grad_fn.next_functions if node} == {"AccumulateGrad"}


@modes
@pytest.mark.parametrize("name", NAMES)
def test_each_input_may_be_the_only_one_that_needs_a_gradient(op: str, write: str, name: str) -> None:
    tensors = inputs(tokens=6, grad=True)
    want = torch.autograd.grad(OPS[op](*tensors, *NONE, **options(op, write))[0].sum(), tensors)[NAMES.index(name)]
    alone = [x.detach().requires_grad_(n == name) for n, x in zip(NAMES, tensors, strict=True)]
    OPS[op](*alone, *NONE, **options(op, write))[0].sum().backward()
    for n, x in zip(NAMES, alone, strict=True):
        assert (x.grad is not None and torch.equal(x.grad, want)) if n == name else x.grad is None


@modes
def test_the_final_state_alone_may_be_differentiated(op: str, write: str) -> None:
    tensors = inputs(tokens=6, grad=True)
    state = OPS[op](*tensors, *NONE, **options(op, write))[1]
    grads = torch.autograd.grad(state.sum(), tensors)
    assert not grads[0].any() and all(grad.any() for grad in grads[1:])


@modes
def test_a_second_derivative_is_refused(op: str, write: str) -> None:
    tensors = inputs(tokens=4, grad=True)
    o = OPS[op](*tensors, *NONE, **options(op, write))[0]
    (grad,) = torch.autograd.grad(o.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        grad.sum().backward()


@modes
def test_activation_checkpointing_recomputes_the_same_bits(op: str, write: str) -> None:
    def gradients(checkpointed: bool) -> list[torch.Tensor]:
        tensors = inputs(tokens=11, dtype=torch.float32, grad=True)

        def layer(*x: torch.Tensor) -> torch.Tensor:
            return OPS[op](*x, None, torch.tensor(4), None, None, **options(op, write))[0].sin()

        o = checkpoint(layer, *tensors, use_reentrant=False) if checkpointed else layer(*tensors)
        return list(torch.autograd.grad(o.sum(), tensors))

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


@modes
def test_what_is_kept_for_the_backward_is_no_more_than_the_inputs(op: str, write: str) -> None:
    tensors = inputs(1, 512, 2, 4, 16, 16, dtype=torch.float32, grad=True)
    kept = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.numel())
        return x

    every = {"checkpoint_every": 64} if op == "decode" else {}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        OPS[op](*tensors, *NONE, **options(op, write, **every))
    assert sum(kept) - sum(x.numel() for x in tensors) <= sum(x.numel() for x in tensors) / 4

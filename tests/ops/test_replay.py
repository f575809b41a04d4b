"""`lattn::replay`: schema, fakes, gradients of everything that it carries, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lattn_compile.errors import FormatError, PolicyError, ShapeError, StateError, UnsupportedError
from lattn_compile.testing.oracle import oracle
from tests.ops.cases import assert_close, inputs, ints

REPLAY = torch.ops.lattn.replay.default
W = 4
MODES: dict[str, dict[str, Any]] = {
    "replay": {"write": "replay", "state_format": "int8/*x8", "factors": "int8", "readout": "after_write"},
    "two_precision": {"write": "two_precision", "state_format": "fp8_e4m3/128x1", "anchor": "bf16"},
}
any_mode = pytest.mark.parametrize("mode", MODES)


def options(mode: str, **more: Any) -> dict[str, Any]:
    return {"scale": 0.35, "window": W, **MODES[mode], **more}


def carried(mode: str, *, decay: str | None = "head", dtype: torch.dtype = torch.float64, grad: bool = False) -> Any:
    """The state after 6 tokens: `(state, read_state, *ring)` and its cursors."""
    first = inputs(3, 6, decay=decay, dtype=dtype, seed=3)
    out = REPLAY(*first, *(None,) * 6, None, torch.tensor([0, 3, 6]), None, None, **options(mode))
    anchor, *ring = out[1:]
    read = None
    if mode == "two_precision":
        read = torch.ops.lattn.qdq_state(anchor, state_format=MODES[mode]["state_format"])
    ring = [x if x.numel() else None for x in ring]
    parts = [x if x is None else x.detach().requires_grad_(grad) for x in (anchor, read, *ring)]
    return parts, ints(2, 3, -1)


@any_mode
@pytest.mark.parametrize("decay", [None, "head", "channel"])
def test_every_gradient_is_the_loops_with_a_carried_state(mode: str, decay: str | None) -> None:
    tensors = inputs(3, 9, decay=decay, grad=True, state=False)
    parts, cursor = carried(mode, decay=decay, grad=True)
    lengths = (None, ints(0, 2, 4), ints(9, 8, 9), cursor)
    got = REPLAY(*tensors[:5], *parts, *lengths, **options(mode))
    names = ("read_state", "ring_k", "ring_u", "ring_g", "ring_v", "ring_beta")
    ring = dict(zip(names, parts[1:], strict=True))
    want = oracle(*tensors[:5], parts[0], *lengths, **ring, **options(mode))
    assert want.ring is not None
    outputs = [want.o, want.final_state, *(x for x in want.ring if x is not None)]
    ours = [x for x in got if x.numel()]
    for a, b in zip(ours, outputs, strict=True):
        assert_close(a, b.to(a), "an output")
    rng = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=rng, dtype=torch.float64) for x in ours]
    leaves = [x for x in (*tensors[:5], *parts) if x is not None]
    mine = torch.autograd.grad(ours, leaves, cotangents)
    theirs = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert_close(a, torch.zeros_like(a) if b is None else b, "a gradient")


@any_mode
def test_opcheck(mode: str) -> None:
    tensors = inputs(3, 9, dtype=torch.float32, grad=True, state=False)
    parts, cursor = carried(mode, dtype=torch.float32, grad=True)
    lengths = (None, ints(0, 2, 4), ints(9, 8, 9), cursor)
    torch.library.opcheck(REPLAY, (*tensors[:5], *parts, *lengths), options(mode))
    more = options(mode, rounding="stochastic", seed=3, rotation="hadamard_k", gate="bf16", keep_ring=False)
    start = inputs(3, 9, dtype=torch.float32, grad=True)
    torch.library.opcheck(REPLAY, (*start, *(None,) * 10, torch.tensor(5), ints(1, 2, 3)), more)


@any_mode
def test_opcheck_of_the_backward(mode: str) -> None:
    tensors = inputs(3, 9, dtype=torch.float32, state=False)
    parts, cursor = carried(mode, dtype=torch.float32)
    lengths = (None, ints(0, 2, 4), ints(9, 8, 9), cursor)
    out = REPLAY(*tensors[:5], *parts, *lengths, **options(mode))
    backward = torch.ops.lattn.replay_backward.default
    torch.library.opcheck(backward, (*out, *tensors[:5], *parts, *lengths, None, None), options(mode))


@any_mode
def test_a_call_is_one_autograd_node(mode: str) -> None:
    q, k, v, g, beta, state = inputs(grad=True)
    o = REPLAY(q, k, v, g, beta, state, *(None,) * 10, **options(mode))[0]
    reached, todo = set(), [o.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in reached:
            reached.add(node)
            todo += [after for after, _ in node.next_functions]
    assert sum("AccumulateGrad" not in type(node).__name__ for node in reached) == 1


@any_mode
def test_the_op_survives_export_save_and_load(mode: str, tmp_path: Any) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *x: Tensor) -> tuple[Tensor, ...]:
            return REPLAY(*x, *(None,) * 6, None, torch.tensor(3), None, None, **options(mode, gate="bf16"))[:2]

    tensors = tuple(inputs(dtype=torch.float32))
    program = torch.export.export(Layer(), tensors)
    torch.export.save(program, tmp_path / "layer.pt2")
    again = torch.export.load(tmp_path / "layer.pt2")
    for a, b in zip(again.module()(*tensors), Layer()(*tensors), strict=True):
        assert torch.equal(a, b)


def test_outputs_share_no_memory_with_inputs() -> None:
    tensors = inputs(3, 0, dtype=torch.float32, state=False)
    parts, cursor = carried("two_precision", dtype=torch.float32)
    out = REPLAY(*tensors[:5], *parts, None, None, None, cursor, **options("two_precision"))
    ours = {x.untyped_storage().data_ptr() for x in out if x.numel()}
    assert not ours & {x.untyped_storage().data_ptr() for x in parts if x is not None}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"window": 0}, PolicyError, "window: got 0; want an int from 1 to 64"),
        ({"window": 65}, PolicyError, "window: got 65; want an int from 1 to 64"),
        ({"write": "token"}, PolicyError, "The write mode 'token' belongs to lattn::decode"),
        ({"factors": "int4"}, PolicyError, "factors: got 'int4'; want None or 'bf16' or 'fp8_e4m3' or 'int8'"),
        ({"anchor": "int8"}, PolicyError, "anchor: got 'int8'; want 'fp32' or 'bf16'"),
        ({"rounding": "up"}, PolicyError, "rounding: got 'up'"),
        ({"feedback": "int3"}, PolicyError, "feedback: got 'int3'"),
        ({"rotation": "hadamard"}, PolicyError, "rotation: got 'hadamard'"),
        ({"rotation": "hadamard_v"}, PolicyError, "want a power of two for V"),
        ({"gate": "fp8"}, PolicyError, "gate: got 'fp8'"),
        ({"write": "two_precision"}, PolicyError, "'two_precision' with readout='after_write', factors='int8'"),
        ({"state_format": "int9"}, FormatError, "int9"),
        ({"implementation": "triton"}, UnsupportedError, "implementation"),
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_name(change: dict[str, Any], error: Any, message: str) -> None:
    tensors = inputs(dtype=torch.float32)
    with pytest.raises(error) as caught:
        REPLAY(*tensors, *(None,) * 10, **options("replay") | change)
    assert message in str(caught.value)


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    tensors = inputs(3, 9, dtype=torch.float32, state=False)
    parts, cursor = carried("replay", dtype=torch.float32)
    lengths = (None, None, None, cursor)
    with pytest.raises(ShapeError, match=r"ring_u: got None; want \[3, 3, 4, 12\]"):
        REPLAY(*tensors[:5], *parts[:3], None, *parts[4:], *lengths, **options("replay"))
    with pytest.raises(ShapeError, match=r"ring_k: got \[3, 3, 2, 8\]; want \[3, 4, 2, 8\]"):
        REPLAY(*tensors[:5], *parts, *lengths, **options("replay", window=5))
    with pytest.raises(ShapeError, match=r"read_state: got .*; want None: this mode"):
        REPLAY(*tensors[:5], parts[0], parts[0], *parts[2:], *lengths, **options("replay"))
    with pytest.raises(StateError, match=r"cursor: got \[2, 3, 4\]; want -1 \(not handed over\) to 3"):
        REPLAY(*tensors[:5], *parts, None, None, None, ints(2, 3, 4), **options("replay"))
    parts, cursor = carried("two_precision", dtype=torch.float32)
    with pytest.raises(StateError, match="read_state: got None beside a cursor"):
        REPLAY(*tensors[:5], parts[0], None, *parts[2:], *lengths, **options("two_precision"))

"""Many tokens in ATen alone are what the op computes, whatever T is, and what they cannot be stays the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lattn_compile.lowering.export import to_aten
from lattn_compile.lowering.sequence import chunk_sequence, decode_sequence
from tests.ops.cases import OPS, assert_close, inputs, ints, options

NONE = (None,) * 4
SPELLED: dict[str, Callable[..., Any]] = {"chunk": chunk_sequence, "decode": decode_sequence}
KINDS: dict[str, dict[str, Any]] = {
    "gdn": {},
    "kda": {"decay": "channel", "value_heads": 2},
    "delta": {"decay": None, "value_heads": 6, "value_dim": 1},
    "no state": {"beta": False, "state": False, "key_dim": 1},
}


def _traced(op: str, tensors: list[Any], kwargs: dict[str, Any]) -> fx.GraphModule:
    graph = make_fx(lambda *x: SPELLED[op](*x, *NONE, **kwargs), tracing_mode="fake")(*tensors)
    assert not any("lattn" in str(n.target) for n in graph.graph.nodes)
    return graph


def _check(op: str, graph: torch.nn.Module, tensors: list[Any], kwargs: dict[str, Any], bound: float = 1e-12) -> None:
    got, want = graph(*tensors), OPS[op](*tensors, *NONE, **kwargs)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert_close(a, b, op, bound)


@pytest.mark.parametrize(
    ("kind", "rule", "tokens"),
    [
        ("gdn", "delta", 130),
        ("gdn", "additive", 1),
        ("kda", "delta", 5),
        ("delta", "delta", 64),
        ("no state", "delta", 7),
    ],
)
def test_a_prefill_in_blocks_is_the_op(kind: str, rule: str, tokens: int) -> None:
    tensors = inputs(tokens=tokens, **KINDS[kind])
    if tensors[3] is not None:
        tensors[3][0, tokens // 2] = -torch.inf
    kwargs = options("chunk", rule=rule, qk_l2norm=kind != "gdn")
    _check("chunk", _traced("chunk", tensors, kwargs), tensors, kwargs)


@pytest.mark.parametrize("state_format", ["int8/*x5", "nvfp4", "bf16", "fp32"])
@pytest.mark.parametrize(("kind", "readout"), [("gdn", "before_write"), ("kda", "after_write")])
def test_tokens_in_a_loop_are_the_op(kind: str, readout: str, state_format: str) -> None:
    tensors = inputs(tokens=6, **KINDS[kind])
    kwargs = options("decode", "token", state_format=state_format, readout=readout, checkpoint_every=0)
    _check("decode", _traced("decode", tensors, kwargs), tensors, kwargs)


class _Call(torch.nn.Module):
    def __init__(self, op: str, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.kwargs = op, kwargs

    def forward(self, *tensors: Tensor) -> Any:
        return OPS[self.op](*tensors, *NONE, **self.kwargs)


@pytest.mark.parametrize(("op", "write"), [("chunk", "exact"), ("decode", "token")])
def test_one_program_serves_every_length_and_batch(op: str, write: str) -> None:
    kwargs = options(op, write, **({"checkpoint_every": 0} if op == "decode" else {}))
    batch, tokens = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("tokens", min=2, max=4096)
    shapes = (*({0: batch, 1: tokens},) * 5, {0: batch})
    program = torch.export.export(_Call(op, kwargs), tuple(inputs(batch=3, tokens=70)), dynamic_shapes=(shapes,))
    spelled = to_aten(program).module()
    for sizes in ((2, 2), (3, 64), (1, 65), (5, 200)):
        tensors = inputs(*sizes, seed=sizes[1])
        _check(op, spelled, tensors, kwargs)


def test_float32_repeated_keys_hold_the_bound_of_the_exact_mode() -> None:
    """The inverse is float64's, as the kernels' is: in float32 its errors alone are ten times the bound."""
    for beta, g in ((1.9, 0.0), (1.9, -0.01), (0.5, 0.0)):
        tensors = inputs(batch=1, tokens=192, heads=1, value_heads=1, key_dim=16, value_dim=16, dtype=torch.float32)
        tensors[1][:] = tensors[1][:, :1].clone()
        tensors[3][:], tensors[4][:] = g, beta
        kwargs = options("chunk")
        got = _traced("chunk", tensors, kwargs)(*tensors)
        want = OPS["chunk"](*(x.double() for x in tensors), *NONE, **kwargs)
        for a, b in zip(got, want, strict=True):
            assert (a.double() - b).norm() <= (5e-6 + 2**-24 * 192) * b.norm()


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("chunk", {"write": "chunk"}),
        ("chunk", {"implementation": "reference"}),
        ("chunk", {"gate": "bf16"}),
        ("chunk", {"prefill_operands": "bf16"}),
        ("chunk", {"lengths": (None, None, ints(3, 2), None)}),
        ("decode", {"write": "token", "rounding": "stochastic"}),
        ("decode", {"write": "token", "lengths": (None, ints(0, 1), None, None)}),
        ("decode", {"write": "token", "checkpoint_every": 16}),
    ],
)
def test_any_other_call_is_left(op: str, change: dict[str, Any]) -> None:
    change = dict(change)
    lengths = change.pop("lengths", NONE)
    if op == "decode":
        change.setdefault("checkpoint_every", 0)
    assert SPELLED[op](*inputs(tokens=4), *lengths, **options(op, **change)) is NotImplemented


@pytest.mark.parametrize(("op", "write"), [("chunk", "exact"), ("decode", "token")])
def test_a_positive_decay_is_seen_in_what_comes_out(op: str, write: str) -> None:
    """Generated code cannot raise: NaN in the head that has it, from its token on, and nowhere else."""
    tensors = inputs(tokens=4)
    kwargs = options(op, write, **({"checkpoint_every": 0} if op == "decode" else {}))
    graph = _traced(op, tensors, kwargs)
    want = graph(*tensors)
    tensors[3][1, 2, 3] = 1e-3
    o, final = graph(*tensors)[:2]
    assert o[1, 2:, 3].isnan().all()
    assert final[1, 3].isnan().all()
    o[1, :, 3], final[1, 3] = want[0][1, :, 3], want[1][1, 3]
    assert_close(o, want[0], "o", 1e-12)
    assert_close(final, want[1], "final_state", 1e-12)

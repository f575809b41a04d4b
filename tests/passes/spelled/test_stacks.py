"""Outputs put together token by token become one expression of the tensor they were cut from."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lattn_compile.passes.spelled.stacks import simplify_stacks

B, T, H, V = 2, 5, 3, 4
o = torch.randn(B, T, H, V)
gate = torch.randn(B, T, H, V)
weight = torch.randn(H * V, 6)


def _fresh(x: Tensor) -> Tensor:
    """Stands for the fused op: not a view of an input."""
    return x.sin()


def _buffer(x: Tensor, *_: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for t in range(T):
        out[:, t] = x[:, t] * 2
    return out


def _twice(x: Tensor, *_: Tensor) -> Tensor:
    out = torch.zeros(B, T, H, V)
    out[:, 1].copy_(x[:, 1])
    out[:, 0] = x[:, 3] * 7
    for t in (3, 0, 2, 4):
        out[:, t].copy_(x[:, t])
    return out


def _low(x: Tensor, *_: Tensor) -> Tensor:
    out = torch.empty(B, T, H, V, dtype=torch.bfloat16)
    for t in range(T):
        out[:, t : t + 1] = x[:, t].unsqueeze(1)
    return out


def _last_axis(x: Tensor, *_: Tensor) -> Tensor:
    out = torch.empty(B, H, V, T)
    for t in range(T):
        out[..., t] = x[:, t]
    return out


def _blocks(x: Tensor, *_: Tensor) -> Tensor:
    out = torch.empty(B, 4, H, V)
    for t in range(2):
        out[:, 2 * t : 2 * t + 2] = x[:, 2 * t : 2 * t + 2] * 0.5
    return out


TOGETHER: dict[str, tuple[Callable[..., Tensor], int]] = {
    # name: how the outputs are put together, how many calls are left (that of _fresh is one)
    "stack": (lambda x, *_: torch.stack([x[:, t] for t in range(T)], 1), 1),
    "stack elsewhere": (lambda x, *_: torch.stack([x[:, t] for t in range(T)], 2), 3),
    "stack last": (lambda x, *_: torch.stack([x[:, t] for t in range(T)], -1), 3),
    "cat": (lambda x, *_: torch.cat([x[:, t].unsqueeze(1) for t in range(T)], 1), 1),
    "cat of slices": (lambda x, *_: torch.cat([x[:, t : t + 1] for t in range(T)], 1), 5),
    "cat along heads": (lambda x, *_: torch.cat([x[:, t] for t in range(T)], 1), 2),
    "scaled": (lambda x, *_: torch.stack([x[:, t] * 0.5 for t in range(T)], 1), 4),
    "cast": (lambda x, *_: torch.stack([x[:, t].to(torch.bfloat16) for t in range(T)], 1), 4),
    "folded": (lambda x, *_: torch.stack([x[:, t].reshape(B, H * V) for t in range(T)], 1), 4),
    "gated": (lambda x, g, *_: torch.stack([x[:, t] * torch.sigmoid(g[:, t]) for t in range(T)], 1), 6),
    "projected": (lambda x, g, w: torch.stack([x[:, t].reshape(B, H * V) @ w for t in range(T)], 1), 6),
    "buffer": (_buffer, 4),
    "written twice": (_twice, 2),
    "in lower precision": (_low, 6),
    "on the last axis": (_last_axis, 4),
    "blocks": (_blocks, 7),
}


def _functional(f: Callable[..., Tensor], *args: Tensor) -> fx.GraphModule:
    return make_fx(torch.func.functionalize(lambda x, *rest: f(_fresh(x), *rest)), tracing_mode="fake")(*args)


@pytest.mark.parametrize("name", TOGETHER)
def test_put_together_at_once(name: str) -> None:
    f, most = TOGETHER[name]
    gm = _functional(f, o, gate, weight)
    (source,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.sin.default)
    want = gm(o, gate, weight)
    done = simplify_stacks(gm, {source})
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    got = gm(o, gate, weight)
    assert got.dtype == want.dtype and got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert len(calls) <= most, Counter(str(n.target) for n in calls)
    assert done


@pytest.mark.parametrize(
    "f",
    [
        lambda x, *_: torch.stack([x[:, t] for t in (0, 1, 3)], 1),
        lambda x, *_: torch.cat([x[:, :2], x[:, 3:4]], 1),
        lambda x, *_: torch.stack([x[:, 0] * 2, x[:, 1] * 3], 1),
        lambda x, g, *_: torch.stack([g[:, t] for t in range(T)], 1),
    ],
    ids=["irregular", "unequal", "unlike", "not an output of the loop"],
)
def test_left_alone(f: Callable[..., Tensor]) -> None:
    gm = _functional(f, o, gate, weight)
    (source,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.sin.default)
    before = str(gm.graph)
    assert not simplify_stacks(gm, {source})
    assert str(gm.graph) == before


def test_a_partly_written_buffer_is_left_alone() -> None:
    def f(x: Tensor, *_: Tensor) -> Tensor:
        out = torch.zeros(B, T, H, V)
        for t in range(T - 1):
            out[:, t] = x[:, t]
        return out

    gm = _functional(f, o)
    assert not simplify_stacks(gm)


def test_what_was_an_own_tensor_is_no_view_of_an_input() -> None:
    gm = make_fx(lambda x: torch.stack([x[:, t] for t in range(T)], 1), tracing_mode="fake")(o)
    assert simplify_stacks(gm)
    gm.recompile()
    got = gm(o)
    assert got.data_ptr() != o.data_ptr() and torch.equal(got, o)


def test_readers_of_an_unfinished_buffer_keep_it() -> None:
    def f(x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(B, T, H, V)
        for t in range(T):
            out[:, t] = x[:, t]
            if t == 2:
                early = out.sum()
        return out, early

    gm = _functional(f, o)  # type: ignore[arg-type]
    want = gm(o)
    assert simplify_stacks(gm)
    gm.graph.lint()
    gm.recompile()
    for a, b in zip(gm(o), want, strict=True):
        torch.testing.assert_close(a, b)


def test_cost_is_linear_in_tokens() -> None:
    def seconds(tokens: int) -> float:
        x = torch.randn(1, tokens, 2)

        def f(a: Tensor) -> Tensor:
            out = torch.empty_like(a)
            for t in range(tokens):
                out[:, t] = torch.sigmoid(a[:, t] * 0.5 + 1.0)
            return out

        gm = make_fx(torch.func.functionalize(f), tracing_mode="fake")(x)
        start = time.perf_counter()
        assert simplify_stacks(gm)
        return time.perf_counter() - start

    seconds(16)
    small, large = min(seconds(64) for _ in range(3)), min(seconds(512) for _ in range(2))
    assert large < 24 * small, (small, large)

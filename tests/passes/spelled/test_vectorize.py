"""Columns of an unrolled loop: one value for all tokens, equal to their stack, without the T-fold nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lattn_compile.passes.spelled.vectorize import vectorize
from lattn_compile.passes.spelled.writer import Writer

aten = torch.ops.aten


def _graph(tokens: Callable[..., Sequence[Tensor]], *inputs: Tensor, symbolic: bool = False) -> fx.GraphModule:
    """A functional graph that returns every token's value."""
    mode = "symbolic" if symbolic else "fake"
    return make_fx(torch.func.functionalize(tokens), tracing_mode=mode, pre_dispatch=False)(*inputs)


def _vectorized(gm: fx.GraphModule) -> Counter[str]:
    """Return the column instead of its values; the counts of the calls that are left."""
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    nodes = list(output.args[0])
    writer = Writer(before=output, like=nodes[0])
    node = vectorize(writer, nodes)
    assert node.meta["val"].shape[1:] == nodes[0].meta["val"].shape
    output.args = (node,)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    calls = (n.target for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return Counter(str(target.overloadpacket).split(".")[-1] for target in calls)


def check(tokens: Callable[..., Sequence[Tensor]], *inputs: Tensor, symbolic: bool = False) -> Counter[str]:
    want = torch.stack(list(tokens(*inputs)), 0)
    gm = _graph(tokens, *inputs, symbolic=symbolic)
    left = _vectorized(gm)
    got = gm(*inputs)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    return left


T, H, K = 5, 3, 4
x = torch.randn(2, T, H, K)
y = torch.randn(2, T, H)
w = torch.randn(K, 6)

# One token's expression: how it starts (indices, and what of each input), and calls on it.
LEAVES: list[Callable[[Tensor, Tensor, int], Tensor]] = [
    lambda a, b, t: a[:, t],
    lambda a, b, t: a[:, t : t + 1].squeeze(1),
    lambda a, b, t: a.unbind(1)[t],
    lambda a, b, t: a.split(1, 1)[t][:, 0],
    lambda a, b, t: a.transpose(0, 1)[t],
    lambda a, b, t: a[:, t, :, :2].repeat(1, 1, 2),
    lambda a, b, t: b[:, t, :, None].expand(2, H, K),
    lambda a, b, t: torch.stack([b[:, t]] * K, -1),
    lambda a, b, t: a[:, 1],
    lambda a, b, t: torch.full((2, H, K), 0.5),
    lambda a, b, t: a.reshape(2, T, -1)[:, t].view(2, H, K),
    lambda a, b, t: torch.zeros_like(a[:, t]).copy_(b[:, t, :, None]),
]
CALLS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda p, q: p * q,
    lambda p, q: p + q.sum(-1, keepdim=True),
    lambda p, q: p - q.mean(0),
    lambda p, q: q.neg().exp().clamp(max=2.0),
    lambda p, q: F.softplus(p) * 0.5,
    lambda p, q: p / (1 + q.norm(dim=-1, keepdim=True)),
    lambda p, q: (p.unsqueeze(-1) * q.unsqueeze(-2)).sum(-2),
    lambda p, q: (p.unsqueeze(-2) @ q.unsqueeze(-1)).squeeze(-1) + p,
    lambda p, q: torch.einsum("bhk,bhj->bhk", p, q),
    lambda p, q: torch.einsum("bhk,hk->bhk", p, q[0]),
    lambda p, q: p.transpose(1, 2).reshape(2, K, H).permute(0, 2, 1) + q,
    lambda p, q: torch.where(p > q, p, q),
    lambda p, q: torch.cat([q[..., 1:], p[..., :1]], -1),
    lambda p, q: p.to(torch.float64).float(),
    lambda p, q: p.flatten(1).softmax(-1).unflatten(1, (H, K)),
    lambda p, q: p * q[0, 0, 0],
    lambda p, q: p.flip(-1) + q.cumsum(1),
    lambda p, q: torch.addcmul(p, q, q, value=0.5),
    lambda p, q: torch.matmul(p, p.mT) @ q * 0.1,
]
COMPARES = 11
"""Of CALLS: the one with a comparison."""


@settings(max_examples=100, deadline=None)
@example(order=range(T), leaves=[0, 0], calls=[(COMPARES, 0, 0)], odd=None)
@given(
    st.permutations(range(T)).flatmap(
        lambda order: st.sampled_from([tuple(range(T)), tuple(range(T))[::-1], (0, 2, 4), (1, 2), (3,), tuple(order)])
    ),
    st.lists(st.integers(0, len(LEAVES) - 1), min_size=2, max_size=3),
    st.lists(st.tuples(st.integers(0, len(CALLS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=5),
    st.sampled_from([None, None, 0, 1]),
)
def test_random_expressions(
    order: Sequence[int], leaves: list[int], calls: list[tuple[int, int, int]], odd: int | None
) -> None:
    """`odd`: a token that is treated unlike the others."""

    def tokens(a: Tensor, b: Tensor) -> list[Tensor]:
        out = []
        for i, t in enumerate(order):
            values = [LEAVES[leaf](a, b, t) for leaf in leaves]
            for c, p, q in calls:
                values.append(CALLS[c](values[-1 - p % len(values)], values[q % len(values)]))
            out.append(values[-1] * 2 if i == odd else values[-1])
        return out

    left = check(tokens, x.abs(), y)
    if odd is None and list(order) == list(range(T)):
        # Comparisons stay as they stand, for the self-check to draw their values: a stack of each is what is left.
        compared = sum(c == COMPARES for c, _, _ in calls)
        assert left["stack"] <= compared or any(leaf == 7 for leaf in leaves)


SPELLINGS: dict[str, tuple[Callable[..., Sequence[Tensor]], tuple[Tensor, ...], int]] = {
    # name: tokens, inputs, how many calls may be left
    "select": (lambda a: [a[:, t] for t in range(T)], (x,), 1),
    "select on axis 0": (lambda a: [a[t] for t in range(2)], (x,), 0),
    "some": (lambda a: [a[:, t] for t in range(1, 4)], (x,), 2),
    "strided": (lambda a: [a[:, t] for t in range(0, T, 2)], (x,), 2),
    "reversed": (lambda a: [a[:, T - 1 - t] for t in range(T)], (x,), 2),
    "negative": (lambda a: [a[:, -1 - t] for t in range(T)], (x,), 2),
    "slices": (lambda a: [a[:, t : t + 1] for t in range(T)], (x,), 2),
    "squeezed slices": (lambda a: [a[:, t : t + 1].squeeze(1) for t in range(T)], (x,), 1),
    "unbind": (lambda a: a.unbind(1), (x,), 1),
    "split": (lambda a: [p[:, 0] for p in a.split(1, 1)], (x,), 1),
    "chunk": (lambda a: a.chunk(2, -1), (x,), 2),
    "blocks": (lambda a: [a[..., 2 * i : 2 * i + 2] for i in range(2)], (x,), 2),
    "blocks reversed": (lambda a: [a[..., 2 - 2 * i : 4 - 2 * i] for i in range(2)], (x,), 3),
    "transposed every time": (lambda a: [a.transpose(0, 1)[t] for t in range(T)], (x,), 2),
    "the same": (lambda a: [a[:, 0] * 2 for _ in range(T)], (x,), 4),
    "decay": (lambda g: [g[:, t].exp()[..., None, None] for t in range(T)], (y,), 4),
    "whole decay every time": (lambda g: [g.exp()[:, t] for t in range(T)], (y,), 2),
    "gate": (lambda a, g: [a[:, t] * torch.sigmoid(g[:, t])[..., None] * 0.5 for t in range(T)], (x, y), 7),
    "normed": (lambda a: [F.normalize(a[:, t], dim=-1) for t in range(T)], (x,), 9),
    "l2": (lambda a: [a[:, t] * torch.rsqrt(a[:, t].pow(2).sum(-1, keepdim=True) + 1e-6) for t in range(T)], (x,), 7),
    "folded heads": (lambda a: [a[:, t].reshape(2 * H, K, 1) for t in range(T)], (x,), 4),
    "casts": (lambda a: [a[:, t].bfloat16().float() for t in range(T)], (x,), 3),
    "linear": (lambda a, b: [a[:, t] @ b for t in range(T)], (x, w), 6),
    "bmm": (lambda a: [a[:, t] @ a[:, t].mT for t in range(T)], (x,), 12),
    "halves": (lambda a: [torch.cat([-a[:, t, :, 2:], a[:, t, :, :2]], -1) for t in range(T)], (x,), 7),
    "repeated heads": (lambda a: [a[:, t].repeat_interleave(2, 1) for t in range(T)], (x,), 6),
    "chunk loop": (lambda a: [a.view(2, 5, 1, 3, 2, 2)[:, c, 0, :, i] for c in range(5) for i in range(2)], (x,), 7),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_nothing_stands_once_a_token(name: str) -> None:
    tokens, inputs, most = SPELLINGS[name]
    left = check(tokens, *inputs)
    assert "stack" not in left
    assert left.total() <= most, left


def test_what_has_nothing_in_common_is_stacked() -> None:
    left = check(lambda a: [a[:, 0], a[:, 2], a[:, 1], a[:, 1] * 2], x)
    assert left == Counter(select=3, mul=1, stack=1) or left == Counter(select=4, mul=1, stack=1)
    assert check(lambda a: [a[:, t] for t in (0, 1, 3)], x)["stack"] == 1
    assert check(lambda a: [a[:, t] * (t + 1.0) for t in range(T)], x)["stack"] == 1


def test_a_recurrence_is_stacked_and_not_computed_twice() -> None:
    def tokens(a: Tensor) -> list[Tensor]:
        s, out = torch.zeros(2, H, K), []
        for t in range(T):
            s = s * 0.5 + a[:, t]
            out.append(s * 2)
        return out

    left = check(tokens, x)
    assert left["stack"] == 1 and left["mul"] == 2 * T


def test_an_operand_without_a_form_is_stacked_under_the_call() -> None:
    left = check(lambda a, b: [a[:, t] * [b[:, 0], b[:, 3], b[:, 1]][t].exp()[..., None] for t in range(3)], x, y)
    assert left["mul"] == 1 and left["stack"] == 1


def test_a_number_in_a_tensor_keeps_its_place_in_type_promotion() -> None:
    numbers = torch.randn(T, dtype=torch.float64)
    left = check(lambda a, n: [a[:, t] * n[t] for t in range(T)], x, numbers)
    assert left["mul"] == T
    assert check(lambda a, n: [a[:, t] * n[t] for t in range(T)], x, numbers.float())["mul"] == 1
    assert check(lambda a, n: [(a[:, t] * n[t]).double() for t in range(T)], x.bfloat16(), numbers)["mul"] == T


def test_randomness_is_not_shared() -> None:
    gm = _graph(lambda a: [torch.rand_like(a[:, t]) for t in range(T)], x)
    assert _vectorized(gm)["rand_like"] == T


@pytest.mark.parametrize("name", ["gate", "folded heads", "l2", "repeated heads", "bmm"])
def test_symbolic_sizes_stay_symbolic(name: str) -> None:
    tokens, inputs, _ = SPELLINGS[name]

    def dynamic(*args: Tensor) -> Sequence[Tensor]:
        return tokens(*args)

    def folded(a: Tensor) -> Sequence[Tensor]:
        return [a[:, t].reshape(a.shape[0] * H, K, 1) for t in range(T)]

    function = folded if name == "folded heads" else dynamic
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes = [
        mode.from_tensor(
            i,
            symbolic_context=StatelessSymbolicContext(
                dynamic_sizes=[DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (i.dim() - 1)
            ),
        )
        for i in inputs
    ]
    with mode:
        gm = make_fx(torch.func.functionalize(function), tracing_mode="real")(*fakes)
    guards = len(env.guards)
    left = _vectorized(gm)
    assert len(env.guards) == guards
    assert "stack" not in left
    big = [torch.cat([i, i, i]) for i in inputs]
    torch.testing.assert_close(gm(*big), torch.stack(list(function(*big))), rtol=1e-5, atol=1e-6)

"""A call like one that was traced is written down again, and that makes no difference but in time.

`test_normalize` holds every graph it copies against a copy whose calls were all traced; here is what could tell the two
apart, and how many calls are traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from lattn_compile.passes.normalize import FunctionalCopy, functional_copy
from tests.passes.traces import counted, same


class Both:
    """A backend that copies a graph with and without knowledge, and holds them against each other."""

    def __init__(self) -> None:
        self.made: list[FunctionalCopy] = []
        self.traced: list[int] = []
        self.all: list[int] = []

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Any:
        with counted(trace_all=True) as every:
            plain = functional_copy(gm)
        with counted() as traced:
            made = functional_copy(gm)
        assert str(made.refused) == str(plain.refused)
        if not made.refused:
            same(made.module, plain.module)
        self.made.append(made)
        self.traced.append(sum(traced))
        self.all.append(sum(every))
        return made.module


def compiled(fn: Callable[..., Any], *args: Any, **options: Any) -> Both:
    """Runs `fn` through a `Both`, whose results are those of eager."""
    backend = Both()
    torch._dynamo.reset()
    got = torch.compile(fn, backend=backend, fullgraph=True, **options)(*clones(args))
    want = fn(*clones(args))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return backend


def clones(args: Any) -> Any:
    def clone(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    return torch.utils._pytree.tree_map(clone, args)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Layer(nn.Module):
    """A spelled-out recurrence with its projections, as `benchmarks/recognition.py` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gates, self.out = nn.Linear(8, 24), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (2, -1)).split([4, 4, 4], -1)
        k = F.normalize(k, dim=-1)
        g, beta = self.gates(x).chunk(2, -1)
        outs = []
        for t in range(x.shape[1]):
            S = S * (-F.softplus(g[:, t])).exp()[..., None, None]
            u = (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])) * beta[:, t, :, None].sigmoid()
            S = S + k[:, t, :, :, None] * u[:, :, None]
            outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return x + self.out(torch.stack(outs, 1).flatten(2)), S


class Model(nn.Module):
    """`keep`: how a layer's state comes back: returned, or written into the input that it was read from."""

    def __init__(self, layers: int, keep: str = "returned", recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.keep, self.recompute = keep, recompute

    def forward(self, x: Tensor, states: list[Tensor]) -> Any:
        new = []
        for layer, S in zip(self.layers, states, strict=True):
            if self.recompute:
                x, end = checkpoint(layer, x, S, use_reentrant=False)
            else:
                x, end = layer(x, S)
            if self.keep == "written":
                S.copy_(end)
            else:
                new.append(end)
        return x, new


def model_calls(layers: int, tokens: int = 1, train: bool = False, **options: Any) -> tuple[int, int]:
    """(calls traced, calls there are) of a model."""
    dynamic = options.pop("dynamic", False)
    model = Model(layers, **options)
    args = torch.randn(3, tokens, 8), [torch.randn(3, 2, 4, 4) for _ in range(layers)]
    with torch.set_grad_enabled(train):
        backend = compiled(model, *args, dynamic=dynamic)
    assert all(not made.refused for made in backend.made)
    return backend.traced[0], backend.all[0]


@pytest.mark.parametrize(("tokens", "train"), [(1, False), (1, True), (2, True)])
def test_a_deeper_model_has_no_more_calls_traced(train: bool, tokens: int) -> None:
    two, four = model_calls(2, tokens, train), model_calls(4, tokens, train)
    assert four[0] == two[0] < 60
    assert four[1] == 2 * two[1]


def test_nor_has_one_with_symbolic_sizes() -> None:
    assert model_calls(4, dynamic=True)[0] == model_calls(2, dynamic=True)[0]


def test_of_a_state_that_is_written_only_what_touches_it_is_traced() -> None:
    """A read, a product, a copy: the same few in every layer."""
    counts = [model_calls(n, keep="written")[0] for n in (1, 2, 3)]
    assert counts[2] - counts[1] == counts[1] - counts[0] == 2


def test_checkpointed_layers_know_each_others_calls() -> None:
    """Each region is a graph of its own; of the calls of a second one none is traced but the region itself."""
    counts = [model_calls(n, train=True, recompute=True)[0] for n in (2, 4)]
    assert counts[1] - counts[0] == 2


def repeated(fn: Callable[..., Any], *args: Any) -> tuple[int, int]:
    """(calls traced, calls there are) of a function, which are the same graph."""
    with torch.no_grad():
        backend = compiled(fn, *args)
    return backend.traced[0], backend.all[0]


def test_literals_that_are_equal_are_not_the_same() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x * 1, x * 1.0, x * True, x + 0.0, x + -0.0, x * float("nan")

    traced, calls = repeated(fn, torch.tensor([-0.0, 1.0], dtype=torch.float64))
    assert traced == calls


def test_the_same_tensor_twice_is_not_two_tensors() -> None:
    assert repeated(lambda x, y: (x * x, x * y, y * y, y * x), torch.randn(3), torch.randn(3)) == (2, 4)


def test_layouts_are_told_apart() -> None:
    def fn(x: Tensor) -> Any:
        return [y.contiguous().view(-1) for y in (x, x.t(), x[:, :3], x[:, 1:4], x.t().t(), x[1:, :3], x.double())]

    repeated(fn, torch.randn(4, 4))


def test_a_gradient_is_told_apart() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            a = (x * 2).detach()
            b = (y * 2).detach()
        return x * 2, a * 2, (x.detach() * 2), y * 2, b, (y * 2) * 2

    backend = compiled(fn, torch.randn(3).requires_grad_(), torch.randn(3))
    assert not backend.made[0].refused


def test_a_hidden_write_is_refused_wherever_it_repeats() -> None:
    """What autograd does not see is followed through calls that were not traced."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = (x * 2).transpose(0, 1)
            y = (y * 2).transpose(0, 1)
        h = x.transpose(0, 1)
        h.detach().mul_(3)
        return h + y

    backend = compiled(fn, torch.randn(3, 3).requires_grad_(), torch.randn(3, 3).requires_grad_())
    assert [r.code for _, r in backend.made[0].refused] == ["NOT_NORMALIZED"]


def test_memory_is_followed_to_what_is_returned() -> None:
    """A body whose output is its input's memory says so, though the view was not traced."""

    def body(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.transpose(0, 1) * 2, y.transpose(0, 1)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        a, b = checkpoint(body, x, y, use_reentrant=False)
        y.add_(1)  # which b would show
        return a + b

    args = torch.randn(3, 3).requires_grad_(), torch.randn(3, 3)
    backend = Both()
    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*clones(args))
    assert [r.code for made in backend.made for n, r in made.refused if not n] == ["NOT_NORMALIZED"]


def test_random_numbers_are_drawn_as_often() -> None:
    def fn(x: Tensor) -> Tensor:
        return sum((F.dropout(x, 0.5, True) + torch.rand(3) for _ in range(3)), x)

    backend = Both()
    torch._dynamo.reset()
    run = torch.compile(fn, backend=backend)
    x = torch.randn(3)
    torch.manual_seed(1)
    got = run(x)
    torch.manual_seed(1)
    assert torch.equal(got, fn(x))


def with_values_apart(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph of a program that was saved: its example values do not tell what shares memory."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor):
            with value.fake_mode:  # type: ignore[attr-defined]
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return gm


def test_a_write_that_nothing_foretold_is_met_by_tracing_every_call() -> None:
    def fn(x: Tensor) -> Tensor:
        out = []
        for i in range(3):
            h = x * 2
            row = h.view(-1)[2:]
            row.mul_(3)
            out.append(h.sum(i % 2))
        return torch.cat(out)

    gm = with_values_apart(make_fx(fn, tracing_mode="fake", pre_dispatch=True)(torch.randn(3, 3)))
    with counted() as traced:
        made = functional_copy(gm)
    with counted(trace_all=True) as every:
        plain = functional_copy(gm)
    assert not made.refused and made.module.code == plain.module.code and traced == every
    x = torch.randn(3, 3)
    assert torch.equal(made.module(x), fn(x))


OPS: dict[str, Callable[..., Any]] = {
    "mul": lambda x, y, n: x * y,
    "scale": lambda x, y, n: x * (0.5 + n),
    "transpose": lambda x, y, n: x.transpose(0, 1),
    "rows": lambda x, y, n: torch.cat([x[n:], x[:n]]),
    "split": lambda x, y, n: torch.cat(x.split([n, 3 - n], 1)[::-1], 1),
    "view": lambda x, y, n: x.reshape(-1).view(3, 3),
    "expand": lambda x, y, n: x[n % 3].expand(3, 3) + y,
    "linear": lambda x, y, n: F.linear(x, y),
    "einsum": lambda x, y, n: torch.einsum("ij,jk->ik", x, y),
    "detach": lambda x, y, n: x.detach(),
    "contiguous": lambda x, y, n: x.contiguous(),
    "clone": lambda x, y, n: x.clone(),
    "stack": lambda x, y, n: torch.stack([x, y, x], n % 2).sum(n % 2),
    "in place": lambda x, y, n: x.clone().mul_(y),
    "row in place": lambda x, y, n: written_row(x.clone(), y, n),
    "no grad": lambda x, y, n: without_grad(x, y),
    "norm": lambda x, y, n: F.normalize(x, dim=n % 2),
    "rand": lambda x, y, n: x + torch.zeros(3, 3).bernoulli_(1.0),
    "cast": lambda x, y, n: x.double().float(),
}


def written_row(x: Tensor, y: Tensor, n: int) -> Tensor:
    x[n % 3] = y[0]
    return x


def without_grad(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        scale = y.abs().amax() + 1
    return x / scale


STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)),
    min_size=1,
    max_size=6,
)


@given(steps=STEPS, rounds=st.integers(2, 3), write=st.booleans(), train=st.booleans())
@settings(max_examples=25, deadline=None)
def test_random_programs_are_the_same_graph(steps: list[Any], rounds: int, write: bool, train: bool) -> None:
    def fn(a: Tensor, b: Tensor, cache: Tensor) -> Any:
        pool = [a, b, a + b, cache]
        for _ in range(rounds):
            for name, i, j, n in steps:
                pool = [OPS[name](pool[i], pool[j], n), *pool[:3]]
            if write:
                cache.copy_(pool[0].detach().clone())  # which may be the cache, transposed
            pool = [*pool[:3], cache]
        return pool[:3]

    args = torch.randn(3, 3).requires_grad_(train), torch.randn(3, 3), torch.randn(3, 3)
    with torch.set_grad_enabled(train):
        backend = compiled(fn, *args)
    assert backend.traced[0] <= backend.all[0]

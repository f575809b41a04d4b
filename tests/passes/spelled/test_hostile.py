"""What a rewrite must not do to code that was not written for it: shared and aliased tensors, detours of the gradient,
masks, caches, odd sizes and dtypes, other readers of a state, policies on some layers."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import lattn_compile as lc
from lattn_compile.report import Report
from lattn_compile.testing.backend import Record, recorded
from tests.passes.spelled.harness import copies, gradients, worst_error

Args = tuple[Tensor, ...]
Function = Callable[..., Any]
einsum = torch.einsum


def tensors(
    batch: int = 2, heads: int = 3, tokens: int = 4, key: int = 4, column: int = 6, *, grad: bool = True, seed: int = 0
) -> Args:
    """q, k, v, g, beta, S in float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = normal(batch, tokens, heads, key), nn.functional.normalize(normal(batch, tokens, heads, key), dim=-1)
    v, g = normal(batch, tokens, heads, column), -normal(batch, tokens, heads).exp() / tokens
    beta, state = normal(batch, tokens, heads).sigmoid(), normal(batch, heads, key, column)
    return tuple(x.requires_grad_(grad) for x in (q, k, v, g, beta, state))


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule."""
    S = S * g.exp()[..., None, None]
    u = (v - einsum("bhk,bhkv->bhv", k, S)) * beta[..., None]
    S = S + einsum("bhk,bhv->bhkv", k, u)
    return read(q, S), S


def read(q: Tensor, S: Tensor) -> Tensor:
    return einsum("bhk,bhkv->bhv", q, S)


def walk(
    args: Sequence[Tensor],
    order: Sequence[int] | None = None,
    each: Callable[[int, Tensor, Tensor], Tensor] = lambda t, o, S: S,
    keys: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Token after token in `order`; `each(t, o, S)` is what becomes of the state behind a token."""
    q, k, v, g, beta, S = args
    order = range(q.shape[1]) if order is None else order
    outputs = []
    for i, t in enumerate(order):
        o, S = step(q[:, t], k[:, t if keys is None else keys[i]], v[:, t], g[:, t], beta[:, t], S)
        outputs.append(o)
        S = each(t, o, S)
    return torch.stack(outputs, 1), S


def loop(*args: Tensor) -> tuple[Tensor, Tensor]:
    return walk(args)


def by_make_fx(fn: Function, args: Args, policy: Any = "exact") -> tuple[Function, Report]:
    trace = make_fx(lambda *a: fn(*a), tracing_mode="fake", pre_dispatch=True)
    result = lc.rewrite(trace(*(x.detach().clone() for x in args)), policy)
    return result.module, result.report


def by_compile(fn: Function, args: Args, policy: Any = "exact", **options: Any) -> tuple[Function, Report, Record]:
    torch._dynamo.reset()
    dynamic = options.pop("dynamic", None)
    compiled = torch.compile(
        fn, backend="lattn_compile", fullgraph=True, dynamic=dynamic, options={"policy": policy, **options}
    )
    record = Record()

    def run(*args: Tensor) -> Any:
        with recorded() as now, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = compiled(*args)
        record.graphs += now.graphs
        record.calls += now.calls
        return out

    run(*copies(args))
    report = lc.last_report()
    assert report is not None
    return run, report, record


def leaves(out: Any) -> list[Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, Tensor)]


def agree(new: Function, old: Function, args: Args) -> None:
    """Outputs, what is written to the inputs, who requires gradients, and gradients."""
    mine, theirs = copies(args), copies(args)
    got, want = leaves(new(*mine)), leaves(old(*theirs))
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert worst_error([x.detach() for x in got], [x.detach() for x in want]) < 1e-5
    written = [(a, b) for a, b, x in zip(mine, theirs, args, strict=True) if not torch.equal(b, x)]
    assert worst_error([a.detach() for a, _ in written], [b.detach() for _, b in written]) < 1e-5
    assert all(torch.equal(a, x) for a, b, x in zip(mine, theirs, args, strict=True) if torch.equal(b, x))
    needing = [x for x in theirs if x.requires_grad]
    if needing and any(x.requires_grad for x in want):
        used = [(a, b) for a, b in zip(got, want, strict=True) if b.requires_grad]
        assert worst_error(gradients([a for a, _ in used], mine), gradients([b for _, b in used], theirs)) < 1e-5


def rewritten(report: Report) -> int:
    return sum(site.verdict == "rewritten" for site in report.sites)


# Spellings and how many sites they have (None: as many as there may be, the numbers count).


@dataclass(frozen=True)
class Attack:
    fn: Function
    sites: int | None
    args: Args
    via: str = "compile"


ATTACKS: dict[str, Attack] = {}


def attack(sites: int | None, *, args: Args | None = None, via: str = "compile") -> Callable[[Function], Function]:
    def register(fn: Function) -> Function:
        ATTACKS[fn.__name__] = Attack(fn, sites, tensors() if args is None else args, via)
        return fn

    return register


@attack(1)
def keys_are_the_queries(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return loop(k, k, v, g, beta, S)


@attack(1, args=tensors(key=5, column=5))
def values_are_the_keys(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return loop(q, k, k, g, beta, S)


@attack(2)
def two_layers_begin_with_one_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return loop(q, k, v, g, beta, S), loop(k, q, v, g, beta, S)


@attack(3)
def layers_begin_with_the_same_zeros(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    zeros, states = torch.zeros_like(S), []
    for _ in range(3):
        v, state = loop(q, k, v, g, beta, zeros)
        states.append(state)
    return v, states


@attack(2)
def layers_swap_their_states(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    mine, yours, outputs = S, S * 0.5, []
    for t in range(4):
        a, mine = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], mine)
        b, yours = step(k[:, t], q[:, t], v[:, t], g[:, t], beta[:, t], yours)
        mine, yours = yours, mine
        outputs += [a, b]
    return torch.stack(outputs, 1), mine, yours


@attack(1, via="both")
def the_state_leaves_twice(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    o, S = loop(q, k, v, g, beta, S)
    return o.transpose(1, 2), S, S.mT, S.mT.contiguous()


@attack(1)
def tokens_run_backwards(*args: Tensor) -> Any:
    return walk(args, order=(3, 2, 1, 0))


@attack(1)
def every_other_token(*args: Tensor) -> Any:
    return walk(args, order=(0, 2))


@attack(1, via="both")
def a_token_comes_twice(*args: Tensor) -> Any:
    return walk(args, order=(0, 1, 2, 3, 0, 2))


@attack(1)
def keys_lag_and_wrap_around(*args: Tensor) -> Any:
    return walk(args, keys=(-1, 0, 1, 2))


@attack(None)
def norms_of_states_are_returned(*args: Tensor) -> Any:
    norms: list[Tensor] = []

    def each(t: int, o: Tensor, S: Tensor) -> Tensor:
        norms.append(S.norm())
        return S

    return walk(args, each=each), torch.stack(norms)


@attack(None)
def a_token_reads_twice(*args: Tensor) -> Any:
    reads: list[Tensor] = []

    def each(t: int, o: Tensor, S: Tensor) -> Tensor:
        reads.append(read(args[1][:, t], S))
        return S

    return walk(args, each=each), torch.stack(reads)


@attack(0)
def outputs_read_older_states(*args: Tensor) -> Any:
    states = [args[5]]

    def each(t: int, o: Tensor, S: Tensor) -> Tensor:
        states.append(S)
        return S

    _, S = walk(args, each=each)
    return torch.stack([read(args[0][:, t], states[max(0, t - 1)]) for t in range(4)]), S


@attack(None, via="both")
def truncated_backpropagation(*args: Tensor) -> Any:
    return walk(args, each=lambda t, o, S: S.detach() if t % 2 else S)


@attack(None, via="both")
def a_prefix_without_gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    with torch.no_grad():
        for t in range(2):
            _, S = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], S)
    return loop(q[:, 2:], k[:, 2:], v[:, 2:], g[:, 2:], beta[:, 2:], S)


@attack(0)
def the_prediction_has_no_gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    S = S * g[:, 0].exp()[..., None, None]
    with torch.no_grad():
        predicted = einsum("bhk,bhkv->bhv", k[:, 0], S)
    S = S + einsum("bhk,bhv->bhkv", k[:, 0], (v[:, 0] - predicted) * beta[:, 0, :, None])
    return read(q[:, 0], S), S


@attack(1)
def everything_without_gradients(*args: Tensor) -> Any:
    with torch.no_grad():
        return loop(*args)


@attack(1, via="both")
def a_read_without_gradients(*args: Tensor) -> Any:
    o, S = loop(*args)
    with torch.no_grad():
        return o, S, read(args[0][:, 0], S)


@attack(1)
def masked_gates(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    kept = v[..., 0] > 0
    return loop(q, k, v, torch.where(kept, g, 0.0), beta.masked_fill(~kept, 0.0), S)


@attack(1)
def resets_by_minus_infinity(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return loop(q, k, v, g.masked_fill(v[..., 0] > 0, float("-inf")), beta, S)


@attack(None)
def where_keeps_the_old_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    outputs = []
    for t in range(4):
        o, new = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], S)
        S = torch.where(v[:, t, 0, 0, None, None, None] > 0, new, S)
        outputs.append(o)
    return torch.stack(outputs, 1), S


@attack(1, args=tensors(grad=False), via="both")
def a_cache_is_written_back(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cache: Tensor) -> Any:
    old = cache[:, 0].clone()
    o, S = loop(q, k, v, g, beta, cache)
    cache.copy_(S)
    return o, old, cache.sum(), cache.mT


@attack(1, args=tensors(grad=False), via="both")
def a_cache_is_updated_in_place(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cache: Tensor) -> Any:
    for t in range(3):
        cache.mul_(g[:, t].exp()[..., None, None])
        u = (v[:, t] - einsum("bhk,bhkv->bhv", k[:, t], cache)) * beta[:, t, :, None]
        cache.add_(einsum("bhk,bhv->bhkv", k[:, t], u))
        o = read(q[:, t], cache)
    return o


@attack(3, args=(*tensors(grad=False)[:5], torch.randn(3, 2, 3, 4, 6)), via="both")
def states_live_in_one_buffer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor) -> Any:
    outputs = []
    for layer in range(3):
        o, pool[layer] = loop(q, k, v, g, beta, pool[layer])
        outputs.append(o)
    return outputs


@attack(1, args=(*tensors(grad=False)[:5], torch.randn(7, 3, 4, 6), torch.tensor([5, 1])), via="both")
def states_live_in_an_indexed_pool(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor
) -> Any:
    o, pool[slots] = loop(q, k, v, g, beta, pool[slots])
    return o


@attack(1, args=tensors(grad=False), via="both")
def used_keys_are_erased(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    def each(t: int, o: Tensor, S: Tensor) -> Tensor:
        k[:, t].zero_()
        v[:, t] = o
        return S

    return walk((q, k, v, g, beta, S), each=each)


@attack(1, args=(tensors()[0][:, :, :1], tensors()[1][:, :, :1], *tensors()[2:]))
def query_heads_are_tiled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return loop(q.repeat(1, 1, 3, 1), k.expand(-1, -1, 3, -1), v, g, beta, S)


@attack(1)
def one_state_for_the_whole_batch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    return loop(q, k, v, g[:, :, :1].expand(-1, -1, 3), beta[:1].expand(2, -1, -1), S[:1].expand(2, -1, -1, -1))


@attack(1, args=tensors(3, 3, 3, 3, 3))
def all_sizes_are_equal(*args: Tensor) -> Any:
    return loop(*args)


@attack(1, args=tensors(2, 2, 2, 2, 2), via="both")
def all_sizes_are_two_and_batch_and_heads_are_one_axis(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> Any:
    S, outputs = S.reshape(4, 2, 2), []
    for t in range(2):
        S = S * g[:, t].reshape(4, 1, 1).exp()
        u = (v[:, t].reshape(4, 1, 2) - torch.bmm(k[:, t].reshape(4, 1, 2), S)) * beta[:, t].reshape(4, 1, 1)
        S = torch.baddbmm(S, k[:, t].reshape(4, 2, 1), u)
        outputs.append(torch.bmm(q[:, t].reshape(4, 1, 2), S).reshape(2, 2, 2))
    return torch.stack(outputs, 1), S.reshape(2, 2, 2, 2)


@attack(1, args=tensors(1, 1, 4, 4, 6))
def one_sequence_and_one_head(*args: Tensor) -> Any:
    return loop(*args)


@attack(3)
def heads_run_in_a_python_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    states, outputs = [], []
    for h in range(3):
        state = S[:, h]
        for t in range(2):
            state = state * g[:, t, h].exp()[:, None, None]
            u = (v[:, t, h] - einsum("bk,bkv->bv", k[:, t, h], state)) * beta[:, t, h, None]
            state = state + einsum("bk,bv->bkv", k[:, t, h], u)
            outputs.append(einsum("bk,bkv->bv", q[:, t, h], state))
        states.append(state)
    return outputs, torch.stack(states, 1)


@attack(0, args=tensors(grad=False))
def keys_are_rounded_for_the_erase(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    S = S * g[:, 0].exp()[..., None, None]
    u = (v[:, 0] - einsum("bhk,bhkv->bhv", k[:, 0].bfloat16().float(), S)) * beta[:, 0, :, None]
    S = S + einsum("bhk,bhv->bhkv", k[:, 0], u)
    return read(q[:, 0], S), S


@attack(0, args=tuple((10 * x).long() for x in tensors(grad=False)))
def integers(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    S = S + k[:, 0, :, :, None] * v[:, 0, :, None]
    return (q[:, 0, :, :, None] * S).sum(-2), S


@attack(1)
def a_checkpoint_around_it(*args: Tensor) -> Any:
    return checkpoint(loop, *args, use_reentrant=False)


@attack(None)
def a_checkpoint_around_each_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    outputs = []
    for t in range(3):
        token = (q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], S)
        o, S = checkpoint(step, *token, use_reentrant=False)
        outputs.append(o)
    return torch.stack(outputs, 1), S


@attack(1)
def a_branch_of_cond(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
    operands = (q, k, v, g, beta, S)
    return torch.cond(v.sum() > 0, loop, lambda q, k, v, g, beta, S: (v * 1.0, S * 1.0), operands)


def _cases(via: str) -> list[Any]:
    return [pytest.param(case, id=name) for name, case in ATTACKS.items() if case.via in ("both", via)]


@pytest.mark.parametrize("case", _cases("compile"))
def test_a_compiled_graph_computes_what_the_code_says(case: Attack) -> None:
    new, report, _ = by_compile(case.fn, case.args)
    if case.sites is not None:
        assert rewritten(report) == case.sites, report
    agree(new, case.fn, case.args)


@pytest.mark.parametrize("case", _cases("make_fx"))
def test_a_rewritten_graph_computes_what_the_code_says(case: Attack) -> None:
    new, report = by_make_fx(case.fn, case.args)
    if case.sites is not None:
        assert rewritten(report) == case.sites, report
    agree(new, case.fn, case.args)


@pytest.mark.parametrize("which", range(6))
def test_one_input_may_be_all_that_has_a_gradient(which: int) -> None:
    args = tuple(x.detach().requires_grad_(i == which) for i, x in enumerate(tensors()))
    agree(by_compile(loop, args)[0], loop, args)


# Values that no trace saw.

EXTREME = {
    "g_is_zero": (3, 0.0),
    "g_is_minus_infinity": (3, float("-inf")),
    "g_is_minus_a_thousand": (3, -1000.0),
    "beta_is_two": (4, 2.0),
    "beta_is_negative": (4, -1.0),
    "keys_are_zero": (1, 0.0),
}


@pytest.fixture(scope="module")
def compiled_loop() -> Function:
    return by_compile(loop, tensors())[0]


@pytest.mark.parametrize(("which", "number"), EXTREME.values(), ids=EXTREME)
def test_values_at_the_edge(compiled_loop: Function, which: int, number: float) -> None:
    args = list(tensors())
    args[which] = torch.full_like(args[which], number).requires_grad_()
    agree(compiled_loop, loop, tuple(args))


def test_nan_stays_nan(compiled_loop: Function) -> None:
    args = list(tensors())
    args[2] = args[2].detach().index_fill(1, torch.tensor(2), float("nan")).requires_grad_()
    for got, want in zip(compiled_loop(*args), loop(*args), strict=True):
        assert torch.equal(got.isnan(), want.isnan())


def test_float64_is_computed_in_float64() -> None:
    args = tuple(x.detach().double().requires_grad_() for x in tensors())
    new = by_compile(loop, args)[0]
    mine, theirs = copies(args), copies(args)
    got, want = new(*mine), loop(*theirs)
    assert worst_error(got, want) < 1e-9
    assert worst_error(gradients(got, mine), gradients(want, theirs)) < 1e-9


def test_one_compile_with_dynamic_sizes_serves_other_sizes() -> None:
    def first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        return step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], S)

    sizes = [(2, 3, 5, 4, 6), (7, 3, 5, 4, 6), (5, 2, 5, 9, 8)]
    new, report, record = by_compile(first, tensors(*sizes[0], grad=False), dynamic=True)
    assert rewritten(report) == 1
    for size in sizes:
        agree(new, first, tensors(*size, grad=False))
    assert len(record.graphs) == 1


def test_ambient_autocast_is_seen() -> None:
    args = tensors(grad=False)
    new = by_compile(loop, args)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = new(*args), loop(*args)
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_random_numbers_come_in_the_same_order() -> None:
    def noisy(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        dropped: list[Tensor] = []

        def each(t: int, o: Tensor, S: Tensor) -> Tensor:
            dropped.append(nn.functional.dropout(o, 0.5, True))
            return S

        keys = nn.functional.dropout(k, 0.5, True)
        return walk((q, keys, v, g, beta, S), each=each)[1], torch.stack(dropped)

    new, report, _ = by_compile(noisy, tensors())
    assert rewritten(report) == 1

    def seeded(fn: Function) -> Function:
        def run(*args: Tensor) -> Any:
            torch.manual_seed(5)
            return fn(*args)

        return run

    agree(seeded(new), seeded(noisy), tensors())


# Policies.


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(q, k, v, g, beta, S), self.b(q, k, 2 * v, g, beta, S)


class Layer(nn.Module):
    def forward(self, *args: Tensor) -> Tensor:
        return loop(*args)[0]


INT8 = lc.Policy(lc.Int8(), write=lc.Token())


def test_a_layer_without_a_policy_stays_as_it_is_to_the_bit() -> None:
    args = tensors(column=64, grad=False)
    new, report, record = by_compile(Layers(), args, lc.Recipe(rules=[("a", None), ("*", INT8)]))
    assert [(s.path, s.verdict) for s in report.sites] == [("a", "left"), ("b", "rewritten")]
    got, want = new(*args), Layers()(*args)
    assert torch.equal(got[0], want[0]) and not torch.equal(got[1], want[1])
    new, report, record = by_compile(Layers(), args, lc.Recipe(rules=[("*", None)]))
    assert all(torch.equal(a, b) for a, b in zip(new(*args), want, strict=True))
    assert not record.calls and all(s.reason is not None for s in report.sites)


def test_int8_rounds_once_a_token_whatever_the_spelling() -> None:
    args = tensors(column=64, grad=False)
    q, k, v, g, beta, S = args
    o, state = lc.linear_attention(q, k, v, g, beta, initial_state=S, output_final_state=True, policy="int8", scale=1.0)

    def first(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        return step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], S)

    got, final = by_compile(loop, args, "int8")[0](*args)
    assert torch.equal(got, o) and torch.equal(final, state.dense())
    one = by_compile(first, args, "int8")[0]
    for t in range(q.shape[1]):
        got, S = one(*(x[:, t : t + 1] for x in (q, k, v, g, beta)), S)
        assert torch.equal(got, o[:, t])
    assert torch.equal(S, state.dense())


# Programs.


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("S", torch.zeros(2, 3, 4, 6))
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        o, S = loop(q, k * self.weight, v, g, beta, self.S)
        self.S.copy_(S.detach())
        return o


def test_a_program_with_its_state_in_a_buffer_survives_rewriting_saving_and_decomposing() -> None:
    args = tensors(grad=False)[:5]
    model, plain = Buffered(), Buffered()
    plain.load_state_dict(model.state_dict())
    program = torch.export.export(model, args, strict=False)
    before = str(program.graph)
    result = lc.rewrite(program, "exact")
    assert rewritten(result.report) == 1
    assert str(program.graph) == before and not model.S.any()
    again = lc.rewrite(program, "exact")
    assert str(again.module.graph) == str(result.module.graph)
    assert rewritten(lc.rewrite(result.module, "exact").report) == 1
    file = io.BytesIO()
    torch.export.save(result.module, file)
    file.seek(0)
    for new in (torch.export.load(file).module(), result.module.run_decompositions().module()):
        plain.S.zero_()
        for _ in range(2):
            assert worst_error([new(*args)], [plain(*args)]) < 1e-5
        model.S.zero_()


# What is no recurrence.


def _nothing() -> dict[str, tuple[Function, Args]]:
    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

    def adam(p: Tensor, d: Tensor, m: Tensor, v: Tensor) -> Any:
        m, v = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d * d
        return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v

    def alibi(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
        distance = torch.arange(5)[None, :] - torch.arange(5)[:, None]
        return torch.softmax(q @ k.mT + slope[:, None, None] * distance, -1) @ v

    def average(x: Tensor, S: Tensor) -> Tensor:
        out = []
        for t in range(4):
            S = 0.9 * S + 0.1 * x[:, t]
            out.append(S)
        return torch.stack(out)

    def rotary(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
        angle = torch.outer(positions, frequencies)
        return x * angle.cos() - x.flip(-1) * angle.sin()

    gru = nn.GRU(8, 8)
    return {
        "adam": (adam, (r(8, 8),) * 4),
        "alibi": (alibi, (r(4, 5, 8), r(4, 5, 8), r(4, 5, 8), r(4))),
        "moving_average": (average, (r(2, 4, 8), r(2, 8))),
        "rotary": (rotary, (r(5, 4), torch.arange(5.0), r(4))),
        "gru": (lambda x: gru(x), (r(3, 2, 8),)),
    }


class Plain(nn.Module):
    def __init__(self, fn: Function) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Tensor) -> Any:
        return self.fn(*args)


@pytest.mark.parametrize("name", _nothing())
def test_ordinary_code_is_not_talked_about(name: str) -> None:
    fn, args = _nothing()[name]
    report = lc.inspect(torch.export.export(Plain(fn), args, strict=False))
    assert not report.sites and not report.unmatched, report


def test_a_strict_compile_says_what_was_not_done() -> None:
    def growing(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        S = 2 * S + k[:, 0, :, :, None] * v[:, 0, :, None]
        return torch.einsum("bhkv,bhk->bhv", S, q[:, 0]), S

    with pytest.raises(lc.LattnError, match="decay is 2"):
        by_compile(growing, tensors(grad=False), strict=True)

"""`lc.training_phase` around recurrences that the model spells out: the lengths become inputs of their graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lattn_compile as lc
from lattn_compile import backend
from lattn_compile.errors import SequenceError
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.oracle import oracle
from tests.passes.spelled.chunk_spellings import CHUNKED
from tests.passes.spelled.harness import worst_error

B, T, H, K, V = 2, 6, 2, 4, 6

# Of each kind several values: what is compiled for one serves the others.
KINDS: dict[str, list[tuple[Any, ...]]] = {
    "int": [(2,), (0,), (T,), (99,), (torch.tensor(5),)],
    "list": [([3, 5],), ([0, T],), (torch.tensor([1, 2], dtype=torch.uint8),)],
    "int and lengths": [(2, [T, 4]), (4, [2, 5])],
    "lists": [([1, 2], [2, T]), ([0, 4], [0, 4])],
    "lengths of all": [(2, 4), (5, 3)],
}
SOME = [*KINDS["int"][:2], *KINDS["list"][:2], *KINDS["lists"][:2]]

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "_SAID", set())
    yield


def inputs(batch: int = B, tokens: int = T, *, grad: bool = True) -> tuple[Tensor, ...]:
    """q, k, v, g, beta and a state."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    k = F.normalize(normal(batch, tokens, H, K), dim=-1)
    g, beta = -normal(batch, tokens, H).abs(), normal(batch, tokens, H).sigmoid()
    made = (normal(batch, tokens, H, K), k, normal(batch, tokens, H, V), g, beta, normal(batch, H, K, V))
    return tuple(x.requires_grad_(grad) for x in made)


def token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    S = S * g.exp()[..., None, None]
    u = beta[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, S))
    S = S + k[..., None] * u[..., None, :]
    return torch.einsum("bhk,bhkv->bhv", q, S), S


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    o = []
    for t in range(q.shape[1]):
        y, S = token(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], S)
        o.append(y)
    return torch.stack(o, 1), S


def op(*x: Tensor, policy: Any = "int8", **lengths: Any) -> tuple[Tensor, Tensor]:
    """What `loop` stands for."""
    o, state = lc.linear_attention(
        *x[:5], initial_state=x[5], output_final_state=True, scale=1.0, policy=policy, **lengths
    )
    return o, state if isinstance(state, Tensor) else state.dense()  # type: ignore[union-attr]


def in_a_checkpoint(use_reentrant: bool) -> Callable[..., Any]:
    return lambda *x: checkpoint(loop, *x, use_reentrant=use_reentrant)


def in_two_checkpoints(*x: Tensor) -> Any:
    return checkpoint(in_a_checkpoint(False), *x, use_reentrant=False)


def in_both_branches(q: Tensor, *x: Tensor) -> Any:
    def scaled(by: float) -> Callable[..., Any]:
        return lambda q, *x: tuple(y * by for y in loop(q, *x))

    return torch.cond(q.sum() > 1e9, scaled(2.0), scaled(1.0), (q, *x))


@torch.compiler.nested_compile_region
def _region(*x: Tensor) -> tuple[Tensor, Tensor]:
    return loop(*x)


def in_a_shared_region(q: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
    return *_region(q, *x), *_region(q + 1, *x)


def in_a_scan(*x: Tensor) -> tuple[Tensor, Tensor]:
    from torch._higher_order_ops.scan import scan

    def step(S: Tensor, now: Any) -> tuple[Tensor, Tensor]:
        o, S = token(*now, S)
        return S.clone(), o

    S, o = scan(step, x[5], tuple(y.transpose(0, 1) for y in x[:5]))
    return o.transpose(0, 1), S


def looked_at(*x: Tensor) -> tuple[Tensor, ...]:
    """Someone reads the state in the middle, so the graph holds two recurrences of 3 and T - 3 tokens."""
    o, S = loop(*(y[:, :3] for y in x[:5]), x[5])
    p, R = loop(*(y[:, 3:] for y in x[:5]), S)
    return torch.cat([o, p], 1), R, S.flatten(1).tanh()


def in_a_checkpoint_each(*x: Tensor) -> tuple[Tensor, ...]:
    """The same in two regions, with something else behind them."""
    o, S = checkpoint(loop, *(y[:, :3] for y in x[:5]), x[5], use_reentrant=False)
    p, R = checkpoint(loop, *(y[:, 3:] for y in x[:5]), S, use_reentrant=False)
    return torch.cat([o, p], 1), R, S.flatten(1).tanh()


def fed_back(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """A token's value depends on the output before: one recurrence a token."""
    return _fed_back(token, q, k, v, g, beta, S)


def _fed_back(one: Callable[..., Any], q: Tensor, *x: Tensor) -> tuple[Tensor, Tensor]:
    (k, v, g, beta, S), o = x, []
    y = torch.zeros_like(v[:, 0])
    for t in range(q.shape[1]):
        y, S = one(q[:, t], k[:, t], v[:, t] + y.tanh(), g[:, t], beta[:, t], S)
        o.append(y)
    return torch.stack(o, 1), S


def compile_(f: Any, policy: Any = "int8", **more: Any) -> Any:
    return torch.compile(f, backend="lattn_compile", fullgraph=True, options={"policy": policy}, **more)


def step(f: Callable[..., Any], x: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and gradients, zeros where there are none."""
    out = f(*x)
    wanted = [y for y in x if y.requires_grad]
    loss = sum((o.square().sum() for o in out), torch.zeros(()))
    found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
    return [
        *(o.detach() for o in out),
        *(torch.zeros_like(y) if d is None else d for y, d in zip(wanted, found, strict=True)),
    ]


def _phase(given: tuple[Any, ...] | None) -> Any:
    return contextlib.nullcontext() if given is None else lc.training_phase(*given)


# --- the lengths arrive, as data --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "kinds"),
    [
        (loop, [*KINDS]),
        (in_a_checkpoint(False), ["int", "lists"]),
        (in_a_checkpoint(True), ["int", "lists"]),
        (in_two_checkpoints, ["lists"]),
        (in_both_branches, ["lists"]),
    ],
    ids=["loop", "checkpoint", "reentrant", "checkpoints", "cond"],
)
def test_a_spelled_out_loop_trains_in_a_phase_as_the_op_does(f: Any, kinds: list[str]) -> None:
    with recorded() as record:
        compiled = compile_(f)
        assert worst_error(step(compiled, inputs()), step(op, inputs())) < 1e-5
        for number, kind in enumerate(kinds, 2):
            for given in KINDS[kind]:
                with lc.training_phase(*given):
                    assert worst_error(step(compiled, inputs()), step(op, inputs())) < 1e-5, given
            assert len(record.graphs) == number, "other values of a kind are data"
        assert record.lattn_ops == (2 if f is in_both_branches else 1)
        step(compiled, inputs())
        with lc.training_phase(*KINDS[kinds[0]][0]):
            step(compiled, inputs())
        assert len(record.graphs) == 1 + len(kinds), "a kind that was seen is not compiled again"


@pytest.mark.parametrize("f", [in_a_scan, in_a_shared_region])
def test_a_scan_and_a_region_that_serves_two_get_the_lengths(f: Any) -> None:
    def want(q: Tensor, *x: Tensor) -> list[Tensor]:
        return [*op(q, *x), *(op(q + 1, *x) if f is in_a_shared_region else ())]

    x = inputs(grad=False)
    with recorded() as record, torch.no_grad():
        compiled = compile_(f)
        for given in (None, (3,), (5,), ([1, 5], [4, T])):
            with _phase(given):
                assert worst_error(compiled(*x), want(*x)) < 1e-5, given
        assert len(record.graphs) == 3
        assert record.lattn_ops == len(record.report.rewritten) == 1


def test_the_prefix_is_exact_and_the_suffix_is_what_the_oracle_says() -> None:
    x = inputs(grad=False)
    with recorded() as record, torch.no_grad(), lc.training_phase([2, 4]):
        o, _ = compile_(loop)(*x)
    plain, _ = loop(*x)
    for i, p in enumerate((2, 4)):
        assert (o[i, :p] - plain[i, :p]).abs().max() < 1e-6
        assert (o[i, p + 1 :] - plain[i, p + 1 :]).abs().max() > 1e-4
    (call,) = record.calls
    assert worst_error(call.outputs[:1], [oracle(**call.arguments).o]) < 1e-5


def test_tokens_behind_a_sequence_vanish_under_exact_too() -> None:
    x = tuple(y.detach().clone() for y in inputs())
    for y in x[:3]:
        y[0, 4:] = torch.nan
    x = tuple(y.requires_grad_() for y in x)
    with recorded(), lc.training_phase(0, [4, T]):
        o, S, *grads = step(compile_(loop, "exact"), x)
    assert (o[0, 4:] == 0).all()
    assert all(d.isfinite().all() for d in (S, *grads))
    assert all((d[0, 4:] == 0).all() for d in grads[:5])
    want, state = loop(*(y[:1, :4] for y in x[:5]), x[5][:1])
    assert worst_error([o[:1, :4], S[:1]], [want, state]) < 1e-5


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_serves_any_batch(dynamic: bool | None) -> None:
    with recorded() as record:
        compiled = compile_(loop, dynamic=dynamic)
        for batch in (3, 5, 7):
            lengths = [[t % (T + 1) for t in range(batch)], [T] * batch]
            with lc.training_phase(*lengths):
                assert worst_error(step(compiled, inputs(batch)), step(op, inputs(batch))) < 1e-5
    assert len(record.graphs) == (1 if dynamic else 2)


# --- a recurrence in pieces -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [looked_at, in_a_checkpoint_each])
@pytest.mark.parametrize("given", [None, *SOME], ids=str)
def test_pieces_of_one_recurrence_share_one_count_of_tokens(pieces: Any, given: Any) -> None:
    def whole(*x: Tensor) -> tuple[Tensor, ...]:
        o, S = op(*x)
        return o, S, _first(op, x, given).flatten(1).tanh()

    with recorded() as record, _phase(given):
        assert worst_error(step(compile_(pieces), inputs()), step(whole, inputs())) < 1e-5
    assert record.lattn_ops == 2


def _first(f: Any, x: Sequence[Tensor], given: tuple[Any, ...] | None) -> Tensor:
    """The state after the first three tokens, in the same phase."""
    lengths = [None if n is None else torch.as_tensor(n).clamp(max=3).int() for n in (*(given or (0,)), None)][:2]
    _, S = f(*(y[:, :3] for y in x[:5]), x[5], prefix_lengths=lengths[0], sequence_lengths=lengths[1])
    return S


@pytest.mark.parametrize("given", [None, *SOME], ids=str)
def test_tokens_that_wait_for_one_another_count_on(given: Any) -> None:
    """One op a token; each knows how many came before it. The written-out loop below rounds by itself."""
    p, n = (torch.as_tensor(y).expand(B) for y in (*(given or (0,)), T, T)[:2])
    fmt = lc.Int8()
    seen = [0]

    def one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        t = seen[0]
        seen[0] += 1
        alive, quantized = (t < n).view(B, 1, 1), ((t >= p) & (t < n)).view(B, 1, 1, 1)
        start = S + (fmt.qdq(S.detach()) - S).detach() * (quantized & (t <= p.view(B, 1, 1, 1)))
        o, new = token(q, k, v, g, beta, start)
        stored = new + (fmt.qdq(new.detach()) - new).detach() * quantized
        return o * alive, torch.where(alive[..., None], stored, S)

    with recorded() as record, _phase(given):
        got = step(compile_(fed_back), inputs())
    assert record.lattn_ops == T
    assert worst_error(got, step(lambda *x: _fed_back(one, *x), inputs())) < 1e-5


def test_a_piece_does_not_let_lengths_pass_that_the_whole_would_refuse() -> None:
    with recorded():
        compiled = compile_(looked_at)
        with lc.training_phase([T, T]):
            step(compiled, inputs())
        with pytest.raises(SequenceError, match="prefix_lengths"), lc.training_phase([T + 1, T]):
            step(compiled, inputs())
        with pytest.raises(SequenceError, match="sequence_lengths"), lc.training_phase(0, [T + 1, T]):
            step(compiled, inputs())


# --- chunk forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gla_slices", "gdn_folded_neumann"])
def test_a_chunk_form_is_all_prefix_without_a_phase_and_quantized_behind_the_prefix_in_one(name: str) -> None:
    f = CHUNKED[name][0]
    tokens = 32
    x = list(inputs(tokens=tokens))
    if CHUNKED[name][2] == "channel":
        x[3] = (x[3].detach()[..., None] * torch.linspace(0.1, 1, K)).requires_grad_()
    with recorded() as record:
        compiled = compile_(f)
        plain = step(f, x)
        assert worst_error(step(compiled, x), plain) < 1e-4
        assert {c.op for c in record.calls} == {"lattn::chunk"}
        for given in ((20,), (tokens,)):
            record.calls.clear()
            with lc.training_phase(*given):
                o, *_ = step(compiled, x)
            (call,) = record.calls
            assert (call.op, call.arguments["state_format"]) == ("lattn::decode", "int8/*x64")
            assert worst_error([o[:, : given[0]]], [plain[0][:, : given[0]]]) < 1e-4
        assert worst_error([o], plain[:1]) < 1e-4, "all prefix"
        with lc.training_phase([20, 31], [tokens, 31]):
            o, *_ = step(compiled, x)
        assert (o[1, 31:] == 0).all()
        assert len(record.graphs) == 3


# --- the phase and time -----------------------------------------------------------------------------------------------


def test_a_backward_uses_the_lengths_of_its_forward() -> None:
    """Gradient accumulation the other way round: the first backward runs after the second forward, and after both."""
    with recorded():
        compiled = compile_(loop)
        runs = {}
        for name, f in (("compiled", compiled), ("op", op)):
            first, second = inputs(), inputs()
            with lc.training_phase([2, 5]):
                a = f(*first)[0].square().sum()
            with lc.training_phase([5, 1]):
                b = f(*second)[0].square().sum()
                grads = [torch.autograd.grad(a, first), torch.autograd.grad(b, second)]
            runs[name] = [d for g in grads for d in g if d is not None]
    assert worst_error(runs["compiled"], runs["op"]) < 1e-5
    assert not torch.equal(runs["op"][2], runs["op"][2 + 6])


def test_nested_phases_hand_in_the_inner_one_and_then_the_outer_one() -> None:
    x = inputs(grad=False)
    with recorded() as record, torch.no_grad():
        compiled = compile_(loop)
        with lc.training_phase(2):
            outer = compiled(*x)[0]
            with lc.training_phase(4):
                inner = compiled(*x)[0]
            assert torch.equal(compiled(*x)[0], outer)
        assert not torch.equal(inner, outer)
        assert len(record.graphs) == 1


def test_a_window_that_replays_updates_takes_a_prefix_too() -> None:
    """A spelled-out loop that starts from zeros and keeps no state may have any policy."""
    policy = lc.Policy(lc.Int8(), write=lc.Replay(2))

    def f(*x: Tensor) -> tuple[Tensor, ...]:
        return (loop(*x[:5], torch.zeros(B, H, K, V))[0],)

    def want(*x: Tensor) -> tuple[Tensor, ...]:
        return (lc.linear_attention(*x[:5], scale=1.0, policy=policy)[0],)

    with recorded() as record:
        compiled = compile_(f, policy)
        for given in (([2, 3],), ([0, 5], [4, T])):
            with lc.training_phase(*given):
                assert worst_error(step(compiled, inputs()), step(want, inputs())) < 1e-5
        assert {c.op for c in record.calls} == {"lattn::replay"}


def test_a_graph_may_hold_called_and_spelled_out_recurrences() -> None:
    def f(*x: Tensor) -> tuple[Tensor, ...]:
        o, _ = lc.linear_attention(*x[:5], scale=1.0)
        return o, *loop(x[0], x[1], o.sin(), *x[3:])

    def want(*x: Tensor) -> tuple[Tensor, ...]:
        o, _ = lc.linear_attention(*x[:5], scale=1.0, policy="int8")
        return o, *op(x[0], x[1], o.sin(), *x[3:])

    with recorded() as record:
        compiled = compile_(f)
        for given in (None, ([2, 3],), ([4, 1],)):
            with _phase(given):
                assert worst_error(step(compiled, inputs()), step(want, inputs())) < 1e-5
        assert record.lattn_ops == len(record.graphs) == 2


class Layer(nn.Module):
    def forward(self, *x: Tensor) -> Any:
        return loop(*x)


def test_an_attached_recipe_reads_the_phase_too() -> None:
    layer = lc.attach(Layer(), "int8")
    with recorded():
        compiled = torch.compile(layer, backend="lattn_compile", fullgraph=True)
        with lc.training_phase([3, 5]):
            assert worst_error(step(compiled, inputs()), step(op, inputs())) < 1e-5


def test_a_state_that_the_graph_rounds_itself_keeps_its_rounding_in_the_prefix() -> None:
    def f(*x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta, S = x
        o = []
        for t in range(T):
            y, S = token(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], S.float())
            S = S.bfloat16()
            o.append(y)
        return torch.stack(o, 1), S

    x = (*inputs(grad=False)[:5], inputs(grad=False)[5].bfloat16())
    with recorded() as record, torch.no_grad(), lc.training_phase(T - 1):
        got = compile_(f, "exact")(*x)
        assert [c.arguments["state_format"] for c in record.calls] == ["bf16"]
    assert worst_error(got, f(*x)) < 1e-5

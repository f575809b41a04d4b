"""What is done for all tokens at once: reads that are taken apart and put back, running scales, and what is told of
associative scans and of loops over chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.proxy_tensor import make_fx

import lattn_compile as lc
from lattn_compile.passes.spelled.identities import restore_identities
from tests.passes.spelled import all_tokens_spellings as spellings
from tests.passes.spelled.harness import copies, gradients, rewrite_graph, worst_error
from tests.passes.spelled.registry import make_args

pytestmark = pytest.mark.filterwarnings("ignore")
T = 4


def _exported(fn: Callable[..., Any], args: Any) -> lc.RewriteResult:
    module = nn.Module()
    module.forward = fn  # type: ignore[method-assign]
    return lc.rewrite(torch.export.export(module, tuple(args), strict=False), "exact")


def _equal(fn: Callable[..., Any], call: Callable[..., Any], args: Any) -> bool:
    a, b = copies(args), copies(args)
    got, want = call(*a), fn(*b)
    return worst_error(got, want) < 1e-9 and worst_error(gradients(got, a), gradients(want, b)) < 1e-9


@pytest.mark.parametrize(
    "fn",
    [
        spellings.transitions_first,
        spellings.identity_by_comparison,
        spellings.states_stacked_and_read_by_einsum,
        spellings.states_joined_and_read_by_a_sum,
        spellings.outer_products_first,
    ],
)
def test_it_is_a_loop_when_decomposed_and_int8_rounds_every_token(fn: Callable[..., Any]) -> None:
    """A chunk form, which these also are, would stay exact under any policy."""
    args = make_args(T, "head", dtype=torch.float64)
    graph = make_fx(fn, decomposition_table=core_aten_decompositions())(*args)
    result = lc.rewrite(graph, "int8")
    [site] = result.report.sites
    assert (site.form, site.verdict) == ("loop", "rewritten"), str(result.report)
    q, k, v, g, beta, S = args
    rule = "delta" if site.rule == "delta" else "additive"
    scale = q.shape[-1] ** -0.5 if fn is spellings.states_joined_and_read_by_a_sum else 1.0
    o, state = lc.linear_attention(
        q, k, v, g, beta if rule == "delta" else None, rule=rule, scale=scale, initial_state=S,
        output_final_state=True, policy="int8",
    )  # fmt: skip
    assert isinstance(state, lc.EncodedState)
    assert worst_error(result.module(*args), (o, state.dense())) < 1e-9
    assert worst_error(fn(*args), (o, state.dense())) > 1e-4


def test_a_read_that_is_no_sites_is_called_as_it_was() -> None:
    """Beside a site: states of a recurrence that is none of ours, stacked and read by one einsum."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, ...]:
        o, R = spellings.states_stacked_and_read_by_einsum(q, k, v, g, beta, S)
        states = []
        for t in range(q.shape[1]):
            S = (S + k[:, t, :, :, None] * v[:, t, :, None]).tanh()
            states.append(S)
        return o, R, torch.einsum("bthkv,bthk->bthv", torch.stack(states, 1), q)

    args = [x.requires_grad_() for x in make_args(T, "head", dtype=torch.float64)]
    result = _exported(fn, args)
    assert [s.verdict for s in result.report.sites] == ["rewritten"]
    assert [u.reason.code for u in result.report.unmatched] == ["STATE_OP"]
    assert _equal(fn, result.module.module(), args)
    calls = Counter(str(n.target) for n in result.module.graph.nodes if n.op == "call_function")
    assert calls["aten.einsum.default"] == 1 and calls["aten.stack.default"] == 1


def _running_scale(worse: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def mlstm(q: Tensor, k: Tensor, v: Tensor, g: Tensor, i: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        m, n, o = torch.zeros_like(g[:, 0]), torch.zeros_like(k[:, 0]), []
        for t in range(q.shape[1]):
            top = worse(g[:, t] + m, i[:, t])
            forget, write = (g[:, t] + m - top).exp()[..., None], (i[:, t] - top).exp()[..., None]
            C = forget[..., None] * C + write[..., None] * k[:, t, :, :, None] * v[:, t, :, None]
            n, m = forget * n + write * k[:, t], top
            read = torch.einsum("bhkv,bhk->bhv", C, q[:, t])
            o.append(read / torch.maximum((n * q[:, t]).sum(-1, keepdim=True).abs(), (-m).exp()[..., None]))
        return torch.stack(o, 1), C

    return mlstm


@pytest.mark.parametrize("worse", [torch.maximum, lambda x, y: -torch.minimum(-x, -y)])
def test_a_running_scale_is_a_decay(worse: Callable[[Tensor, Tensor], Tensor]) -> None:
    """mLSTM: gates are kept finite by the largest exponent so far, a maximum of data."""
    fn = _running_scale(worse)
    args = [x.requires_grad_() for x in make_args(T, "head", dtype=torch.float64)]
    call, report = rewrite_graph(fn, args, "make_fx", tracing_mode="fake")
    assert [(s.rule, s.decay, s.form, s.verdict) for s in report.sites] == [
        ("additive", "head", "loop", "rewritten")
    ], str(report)
    assert _equal(fn, call, args)


@pytest.mark.parametrize("via", ["export", "compile"])
def test_an_associative_scan_is_told(via: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        kv = k[..., :, None] * v[..., None, :]
        kept = g.exp()[..., None, None].expand_as(kv).contiguous()
        _, states = associative_scan(
            lambda x, y: (x[0] * y[0], x[1] * y[0] + y[1]), (kept, kv), dim=1, combine_mode="generic"
        )
        return torch.einsum("bthkv,bthk->bthv", states, q), S * 2

    args = make_args(5, "head", dtype=torch.float64)
    call, report = rewrite_graph(fn, args, via)
    assert not report.sites
    assert [u.reason.code for u in report.unmatched] == ["ASSOCIATIVE_SCAN"], str(report)
    assert worst_error(call(*args), fn(*args)) < 1e-12


def test_slices_with_a_step_are_no_associative_scan() -> None:
    """A rotary embedding of interleaved pairs, and every second token's outer products."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        kv = k[..., :, None] * v[..., None, :]
        x = q[..., 0:-1:2] * 2 + q[..., 1::2]
        return x, (kv[:, 0:-1:2] + kv[:, 1::2]).sum(1) + S

    assert not _exported(fn, make_args(6, "head", dtype=torch.float64)).report.unmatched


def test_a_scan_over_chunks_is_told() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        def chunk(S: Tensor, x: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            q, k, v, g = x
            c = g.cumsum(-1)
            causal = torch.ones(4, 4, dtype=torch.bool).tril()
            D = (c[..., :, None] - c[..., None, :]).masked_fill(~causal, -torch.inf).exp()
            o = (q * c.exp()[..., None]) @ S + (q @ k.mT * D) @ v
            kept = k * (c[..., -1:] - c).exp()[..., None]
            return c[..., -1, None, None].exp() * S + kept.mT @ v, o

        cut = [x.unflatten(1, (-1, 4)).movedim(1, 0).transpose(2, 3).contiguous() for x in (q, k, v, g)]
        S, o = scan(chunk, S.clone(), tuple(cut))
        return o.movedim(0, 1).transpose(2, 3).flatten(1, 2), S

    args = make_args(8, "head", dtype=torch.float64)
    report = _exported(fn, args).report
    assert not report.sites
    assert [u.reason.code for u in report.unmatched] == ["CHUNK_INPUTS"], str(report)


def test_one_token_whose_decay_is_made_of_the_state_is_left() -> None:
    """With the decay taken for an input it would be a recurrence of one token, in every form."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        o = []
        for t in range(q.shape[1]):
            S = S * (S * S).mean((-1, -2), keepdim=True).neg().exp() + k[:, t, :, :, None] * v[:, t, :, None]
            o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(o, 1), S

    report = _exported(fn, make_args(T, "head", dtype=torch.float64)).report
    assert not report.sites and [u.reason.code for u in report.unmatched] == ["STATE_OP"], str(report)


def test_an_identity_that_is_returned_is_as_it_was() -> None:
    """`eye` in place of what was written must not change dtype, shape or where it lies."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, ...]:
        i = torch.arange(4)
        eye = (i[:, None] == i).to(torch.float32).view(4, 1, 4)
        o, R = spellings.identity_by_comparison(q, k, v, g, beta, S)
        return o, R, eye

    args = make_args(T, "head", dtype=torch.float64)
    result = _exported(fn, args)
    got, want = result.module.module()(*args)[-1], fn(*args)[-1]
    assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)


@pytest.mark.parametrize("first", [0, 4096], ids=["numbers that are told apart", "equal in half precision"])
def test_an_identity_is_one_in_its_own_precision(first: int) -> None:
    def fn(x: Tensor) -> Tensor:
        i = (torch.arange(16) + first).half()
        return x @ (i[:, None] == i).float()

    x = torch.randn(2, 16)
    gm = make_fx(fn)(x)
    want = gm(x)
    restore_identities(gm.graph)
    gm.recompile()
    assert torch.equal(gm(x), want) and ("eye" in str(gm.graph)) == (first == 0)

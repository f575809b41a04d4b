"""Layers as they are met in the field: casts kept away, gates that are joined or rounded, buffers of states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.proxy_tensor import make_fx

import lattn_compile as lc
from lattn_compile.testing.backend import recorded
from tests.passes.spelled.harness import copies, errors_against, rewrite_graph, worst_error
from tests.passes.spelled.registry import make_args

T = 4
pytestmark = pytest.mark.filterwarnings("ignore")


def _read(S: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", x, S)


def _loop(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, S: Tensor) -> Any:
    outs = []
    for t in range(q.shape[1]):
        S = S * decay[:, t, :, None, None]
        u = beta[:, t, :, None] * (v[:, t] - _read(S, k[:, t]))
        S = S + k[:, t, :, :, None] * u[:, :, None]
        outs.append(_read(S, q[:, t]))
    return torch.stack(outs, 1), S


class _Mixer(nn.Module):
    """Projections, a short convolution, and the recurrence from a state of zeros, where no cast is wanted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(8, 28)
        self.conv = nn.Conv1d(24, 24, 4, padding=3, groups=24)

    def forward(self, x: Tensor) -> Tensor:
        qkv, g, b = self.proj(x).split([24, 2, 2], -1)
        qkv = F.silu(self.conv(qkv.mT)[..., : x.shape[1]].mT)
        q, k, v = (y.unflatten(-1, (2, 4)) for y in qkv.split(8, -1))
        with torch.autocast("cpu", enabled=False):
            q, k, v, g, b = (y.float() for y in (q, k, v, g, b))
            S = torch.zeros(x.shape[0], 2, 4, 4)
            o, _ = _loop(q, F.normalize(k, dim=-1), v, (-F.softplus(g)).exp(), b.sigmoid(), S)
        return o.flatten(2)


def _x(seed: int = 1) -> Tensor:
    return torch.randn(2, T, 8, generator=torch.Generator().manual_seed(seed))


def test_autocast_that_is_turned_off_is_no_autocast() -> None:
    model = _Mixer()
    program = lc.rewrite(torch.export.export(model, (_x(),), strict=False), "exact")
    assert len(program.report.rewritten) == 1, str(program.report)
    assert worst_error([program.module.module()(_x(2))], [model(_x(2))]) < 1e-5
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})
    with recorded():
        assert worst_error([compiled(_x(2))], [model(_x(2))]) < 1e-5
        assert len(lc.last_report().rewritten) == 1, str(lc.last_report())
        # It is one again where it is turned on around: the guards see that.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, want = compiled(_x(3)), model(_x(3))
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_autocast_that_is_turned_on_somewhere_stays_all_of_it() -> None:
    model = _Mixer()

    def both(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.mT
            return y, model(x)

    torch._dynamo.reset()
    compiled = torch.compile(both, backend="lattn_compile", fullgraph=True, options={"policy": "exact"})
    with recorded():
        got, want = compiled(_x()), both(_x())
    report = lc.last_report()
    assert not report.rewritten and any("autocast" in note for note in report.notes), str(report)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_state_of_zeros_like_an_input_leads_no_further() -> None:
    """`x.new_zeros(...)` asks the layer's input for a dtype: the convolution behind it is not part of the claim."""

    class Layer(_Mixer):
        def forward(self, x: Tensor) -> Tensor:
            qkv, g, b = self.proj(x).split([24, 2, 2], -1)
            qkv = F.silu(self.conv(qkv.mT)[..., : x.shape[1]].mT)
            q, k, v = (y.unflatten(-1, (2, 4)) for y in qkv.split(8, -1))
            S = x.new_zeros(x.shape[0], 2, 4, 4)
            return _loop(q, k, v, (-F.softplus(g)).exp(), b.sigmoid(), S)[0].flatten(2)

    model = Layer()
    made = lc.rewrite(make_fx(model, pre_dispatch=True)(_x()), "exact")
    assert len(made.report.rewritten) == 1, str(made.report)
    assert worst_error([made.module(_x(2))], [model(_x(2))]) < 1e-5


DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "one head keeps": lambda g: torch.cat([torch.ones_like(g[..., :1]), g[..., 1:].exp()], -1),
    "heads of their own": lambda g: torch.stack([g[..., 0].exp(), torch.sigmoid(g[..., 1])], -1),
    "rounded": lambda g: g.exp().bfloat16().to(g.dtype),
    "made in float64": lambda g: g.double().exp().to(g.dtype),
}


@pytest.mark.parametrize("name", DECAYS)
def test_decays_that_are_joined_or_rounded(name: str) -> None:
    decay = DECAYS[name]
    args = tuple(x.requires_grad_() for x in make_args(T, "head", dtype=torch.float32))

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        return _loop(q, k, v, decay(g), beta, S)

    rewritten, report = rewrite_graph(loop, args, "make_fx", tracing_mode="fake")
    assert [s.verdict for s in report.sites] == ["rewritten"], str(report)
    values, slopes = errors_against(loop, rewritten, args)
    assert values < 1e-5 and slopes < 1e-4


def test_a_decay_of_integers_is_none() -> None:
    args = make_args(T, "head", dtype=torch.float64)

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        return _loop(q, k, v, (8 * g.exp()).to(torch.int32).to(g.dtype) / 8, beta, S)

    rewritten, report = rewrite_graph(loop, args, "make_fx", tracing_mode="fake")
    assert worst_error(rewritten(*copies(args)), loop(*copies(args))) < 1e-9
    assert {u.reason.code for u in report.unmatched} <= {"DECAY_RANGE"}, str(report)


def test_states_in_a_buffer_of_which_the_last_is_used() -> None:
    args = make_args(T, "head", dtype=torch.float64)

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        out, states = torch.zeros_like(v), S.new_zeros(T + 1, *S.shape)
        states[0] = S
        for t in range(T):
            o, S = _loop(*(x[:, t : t + 1] for x in (q, k, v, g.exp(), beta)), states[t])
            out[:, t], states[t + 1] = o[:, 0], S
        return out, states[-1]

    rewritten, report = rewrite_graph(loop, args, "make_fx", tracing_mode="fake")
    assert [s.form for s in report.rewritten] == ["loop"], str(report)
    assert worst_error(rewritten(*copies(args)), loop(*copies(args))) < 1e-9


class _Scanned(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> Any:
        q, k, v = (x.unflatten(1, (2, 2)).permute(1, 0, 3, 2, 4) for x in (q, k, v))
        c = g.unflatten(1, (2, 2)).permute(1, 0, 3, 2).cumsum(-1)
        mask = torch.ones(2, 2, dtype=torch.bool).tril()

        def chunk(S: Tensor, x: Any) -> Any:
            q, k, v, c = x
            D = (c[..., :, None] - c[..., None, :]).masked_fill(~mask, -torch.inf).exp()
            o = ((q @ k.mT) * D) @ v + (q * c.exp()[..., None]) @ S
            S = S * c[..., -1, None, None].exp() + (k * (c[..., -1:] - c).exp()[..., None]).mT @ v
            return S, o

        return scan(chunk, S, (q, k, v, c))


class _Associative(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> Any:
        a = g.exp()[..., None, None]
        h = torch.einsum("bthk,bthv->bthkv", k, v)
        h = torch.cat([h[:, :1] + a[:, :1] * S[:, None], h[:, 1:]], 1)

        def both(x: Any, y: Any) -> Any:
            return x[0] * y[0], y[0] * x[1] + y[1]

        _, h = associative_scan(both, (a.expand_as(h), h), 1, combine_mode="generic")
        return torch.einsum("bthkv,bthk->bthv", h, q), h[:, -1]


class _InHalves(nn.Module):
    """A state of which the columns are decayed in two calls, in place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, S: Tensor) -> Any:
        S, outs = S.clone(), []
        for t in range(q.shape[1]):
            for half in (slice(0, 3), slice(3, None)):
                S[..., half].mul_(g[:, t].exp()[..., None, None])
            S += torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
            outs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        return torch.stack(outs, 1), S


@pytest.mark.parametrize(
    ("model", "tokens", "code"),
    [(_Scanned(), 4, "CHUNK_INPUTS"), (_Associative(), 5, "ASSOCIATIVE_SCAN"), (_InHalves(), 3, "STATE_OP")],
    ids=["chunks", "associative", "halves"],
)
def test_what_is_told_and_left(model: nn.Module, tokens: int, code: str) -> None:
    q, k, v, g, _, S = make_args(tokens, "head", dtype=torch.float64)
    report = lc.rewrite(torch.export.export(model, (q, k, v, g, S), strict=False), "exact").report
    assert not report.rewritten and {u.reason.code for u in report.unmatched} == {code}, str(report)


def test_states_that_are_joined_before_they_are_read_are_told() -> None:
    args = make_args(T, "head", heads=4, dtype=torch.float64)

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        one, two = S[:, :2], S[:, 2:]
        outs = []
        for t in range(T):
            one = one * g[:, t, :2].exp()[..., None, None] + k[:, t, :2, :, None] * v[:, t, :2, None]
            two = two * 0.9 + k[:, t, 2:, :, None] * v[:, t, 2:, None]
            outs.append(_read(torch.cat([one, two], 1), q[:, t]))
        return torch.stack(outs, 1), one, two

    _, report = rewrite_graph(loop, args, "make_fx", tracing_mode="fake")
    assert not report.rewritten and {u.reason.code for u in report.unmatched} == {"NOT_READ"}, str(report)
    assert all("read each on its own" in u.stopped_at for u in report.unmatched)


def test_tokens_that_split_cuts_are_no_states() -> None:
    """Each is a whole tensor of [B, 1, H, V], which an error is taken from and a product of the state with it."""

    def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Any:
        outs = []
        for qt, kt, vt, gt, bt in zip(*(x.split(1, 1) for x in (q, k, v, g, beta)), strict=True):
            S = S * gt.exp().permute(0, 2, 1).unsqueeze(-1)
            error = vt - torch.einsum("bthk,bhkv->bthv", kt, S)
            S = S + torch.einsum("bthk,bthv,bth->bhkv", kt, error, bt)
            outs.append(torch.einsum("bthk,bhkv->bthv", qt, S))
        return torch.cat(outs, 1), S

    args = make_args(T, "head", dtype=torch.float64)
    _, report = rewrite_graph(loop, args, "make_fx", tracing_mode="fake")
    assert [(s.rule, s.form) for s in report.rewritten] == [("delta", "loop")], str(report)

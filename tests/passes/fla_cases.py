"""Capture of flash-linear-attention's entry points. Run by `test_capture.py` in a process that has FLA and no GPU.

FLA's kernels cannot run here ("0 active drivers"), so each call is compared with a written-out float64 recurrence.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lattn_compile as lc
from lattn_compile.recurrence import KINDS, KnownCall
from lattn_compile.recurrence.linear import _CHUNK
from lattn_compile.testing.backend import recorded

fla_ops = pytest.importorskip("fla.ops")

B, T, H, HV, K, V = 2, 21, 2, 4, 8, 12


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    S: Tensor | None,
    *,
    delta: bool,
    scale: float | None = None,
    l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double() for x in (q, k, v))
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    R = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(R, 2) for x in (q, k))
    S = torch.zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]).double() if S is None else S.double()
    out = []
    for t in range(q.shape[1]):
        if g is not None:
            decay = g[:, t].double().exp()
            S = S * (decay[..., None, None] if decay.ndim == 2 else decay[..., None])
        u = v[:, t] - (S * k[:, t, :, :, None]).sum(-2) if delta else v[:, t]
        if beta is not None:
            u = u * beta[:, t].double()[..., None]
        S = S + k[:, t, :, :, None] * u[:, :, None]
        out.append((S * q[:, t, :, :, None]).sum(-2))
    return torch.stack(out, 1) * (q.shape[-1] ** -0.5 if scale is None else scale), S


def _inputs(heads: int = HV, *, seed: int = 0, length: int = T) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    return {
        "q": draw(B, length, heads, K),
        "k": F.normalize(draw(B, length, heads, K), dim=-1),
        "v": draw(B, length, HV, V),
        "g": -F.softplus(draw(B, length, HV)),
        "gk": -F.softplus(draw(B, length, HV, K)),
        "beta": torch.sigmoid(draw(B, length, HV)),
        "S": draw(B, HV, K, V),
    }


def _gdn(x: dict[str, Tensor], f: Callable[..., Any]) -> Any:
    return f(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], initial_state=x["S"], output_final_state=True)


def _kda(x: dict[str, Tensor], f: Callable[..., Any]) -> Any:
    return f(x["q"], x["k"], x["v"], g=x["gk"], beta=x["beta"], initial_state=x["S"], output_final_state=True)


def _delta(x: dict[str, Tensor], f: Callable[..., Any]) -> Any:
    return f(
        x["q"],
        x["k"],
        x["v"],
        beta=x["beta"],
        initial_state=x["S"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def _gla(x: dict[str, Tensor], f: Callable[..., Any]) -> Any:
    name = "g" if f is fla_ops.chunk_gla else "gk"
    return f(x["q"], x["k"], x["v"], **{name: x["gk"]}, initial_state=x["S"], output_final_state=True, scale=0.5)


def _simple_gla(x: dict[str, Tensor], f: Callable[..., Any]) -> Any:
    return f(x["q"], x["k"], x["v"], g=x["g"], initial_state=x["S"], output_final_state=True)


def _plain(x: dict[str, Tensor], f: Callable[..., Any]) -> Any:
    return f(x["q"], x["k"], x["v"], initial_state=x["S"], output_final_state=True)


def _linear(x: dict[str, Tensor], f: Callable[..., Any]) -> Any:
    return f(x["q"], x["k"], x["v"], initial_state=x["S"], output_final_state=True, normalize=False)


def _retention_gate(x: dict[str, Tensor]) -> Tensor:
    return (1 - 2.0 ** (-5.0 - torch.arange(HV).float())).log().expand(B, x["q"].shape[1], HV)


# name, how it is called, its kind, groups heads (H < HV), the written-out recurrence
CASES: list[tuple[str, Callable[..., Any], str, bool, Callable[[dict[str, Tensor]], Any]]] = [
    ("chunk_gated_delta_rule", _gdn, "gdn", True, lambda x: _written_out(*_five(x, "g", "beta"), delta=True)),
    ("fused_recurrent_gated_delta_rule", _gdn, "gdn", True, lambda x: _written_out(*_five(x, "g", "beta"), delta=True)),
    ("chunk_kda", _kda, "kda", True, lambda x: _written_out(*_five(x, "gk", "beta"), delta=True)),
    ("fused_recurrent_kda", _kda, "kda", True, lambda x: _written_out(*_five(x, "gk", "beta"), delta=True)),
    (
        "chunk_delta_rule",
        _delta,
        "delta",
        False,
        lambda x: _written_out(*_five(x, None, "beta"), delta=True, l2norm=True),
    ),
    (
        "fused_recurrent_delta_rule",
        _delta,
        "delta",
        False,
        lambda x: _written_out(*_five(x, None, "beta"), delta=True, l2norm=True),
    ),
    ("chunk_gla", _gla, "gla", False, lambda x: _written_out(*_five(x, "gk", None), delta=False, scale=0.5)),
    ("fused_recurrent_gla", _gla, "gla", False, lambda x: _written_out(*_five(x, "gk", None), delta=False, scale=0.5)),
    ("chunk_simple_gla", _simple_gla, "retention", False, lambda x: _written_out(*_five(x, "g", None), delta=False)),
    (
        "fused_recurrent_simple_gla",
        _simple_gla,
        "retention",
        False,
        lambda x: _written_out(*_five(x, "g", None), delta=False),
    ),
    (
        "chunk_retention",
        _plain,
        "retention",
        False,
        lambda x: _written_out(*_five({**x, "g": _retention_gate(x)}, "g", None), delta=False),
    ),
    (
        "fused_recurrent_retention",
        _plain,
        "retention",
        False,
        lambda x: _written_out(*_five({**x, "g": _retention_gate(x)}, "g", None), delta=False),
    ),
    ("chunk_linear_attn", _linear, "linear", False, lambda x: _written_out(*_five(x, None, None), delta=False)),
    (
        "fused_recurrent_linear_attn",
        _linear,
        "linear",
        False,
        lambda x: _written_out(*_five(x, None, None), delta=False),
    ),
]


def _five(x: dict[str, Tensor], g: str | None, beta: str | None) -> tuple[Any, ...]:
    return x["q"], x["k"], x["v"], g and x[g], beta and x[beta], x["S"]


def _close(got: Any, want: Any, what: str) -> None:
    error = (got.double() - want).norm() / want.norm()
    assert error < 2e-6, f"{what}: relative error {error:.2e}"


@pytest.mark.parametrize(("name", "call", "kind", "grouped", "reference"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_entry_point_becomes_one_node_and_computes_its_recurrence(
    name: str, call: Any, kind: str, grouped: bool, reference: Any, dynamic: bool
) -> None:
    f = getattr(fla_ops, name)
    torch._dynamo.reset()
    with recorded() as record:
        compiled = torch.compile(lambda x: call(x, f), backend="lattn_compile", fullgraph=True, dynamic=dynamic)
        for length in (T, 34) if dynamic else (T,):
            x = _inputs(H if grouped else HV, length=length)
            for key in ("q", "k", "v", "S"):
                x[key].requires_grad_()
            o, S = compiled(x)
            want_o, want_S = reference(x)
            _close(o, want_o, "o")
            _close(S, want_S, "final_state")
            weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(7))
            leaves = [x[key] for key in ("q", "k", "v", "S")]
            got = torch.autograd.grad((o * weight).sum() + S.square().sum(), leaves)
            want = torch.autograd.grad((want_o * weight).sum() + want_S.square().sum(), leaves)
            for a, b, key in zip(got, want, "qkvS", strict=True):
                _close(a, b.double(), f"d{key}")
    assert record.lattn_ops == 1, record.text
    (site,) = record.report.sites
    assert (site.kind, site.verdict) == (kind, "rewritten")
    assert len(record.graphs) == 1, "another T must not recompile a dynamic graph"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("name", "call", "kind", "grouped", "reference"), CASES, ids=[c[0] for c in CASES])
def test_export_under_capture_gives_one_node(
    name: str, call: Any, kind: str, grouped: bool, reference: Any, strict: bool
) -> None:
    f = getattr(fla_ops, name)

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, gk: Tensor, beta: Tensor, S: Tensor) -> Any:
            return call({"q": q, "k": k, "v": v, "g": g, "gk": gk, "beta": beta, "S": S}, f)

    x = _inputs(H if grouped else HV)
    torch._dynamo.reset()
    with lc.capture():
        program = torch.export.export(Layer(), tuple(x.values()), strict=strict)
    ops = [n for n in program.graph.nodes if str(n.target).startswith("lattn.")]
    assert len(ops) == 1
    o, S = program.module()(*x.values())
    want_o, want_S = reference(x)
    _close(o, want_o, "o")
    _close(S, want_S, "final_state")
    (site,) = lc.inspect(program).sites
    assert site.kind == kind


def test_raw_gates_become_torch_ops_of_the_published_formulas() -> None:
    x = _inputs(H)
    A_log, dt_bias = torch.randn(HV), torch.randn(HV)
    A_log_k, dt_bias_k = torch.randn(HV), torch.randn(HV * K)
    beta_raw = torch.randn(B, T, HV)
    raw, raw_k = torch.randn(B, T, HV), torch.randn(B, T, HV, K)

    def gdn() -> Any:
        return fla_ops.chunk_gated_delta_rule(
            x["q"],
            x["k"],
            x["v"],
            g=raw,
            beta=beta_raw,
            use_gate_in_kernel=True,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=True,
        )

    def kda(lower_bound: float | None) -> Any:
        return fla_ops.chunk_kda(
            x["q"],
            x["k"],
            x["v"],
            g=raw_k,
            beta=x["beta"],
            use_gate_in_kernel=True,
            A_log=A_log_k,
            dt_bias=dt_bias_k,
            lower_bound=lower_bound,
            safe_gate=lower_bound is not None,
        )

    compiled = lambda f, *a: torch.compile(f, backend="lattn_compile", fullgraph=True)(*a)  # noqa: E731
    g = -A_log.exp() * F.softplus(raw + dt_bias)
    with recorded():
        o, _ = compiled(gdn)
        want, _ = _written_out(x["q"], x["k"], x["v"], g, 2 * torch.sigmoid(beta_raw), None, delta=True)
        _close(o, want, "gdn")
        bias = dt_bias_k.view(HV, K)
        g = -A_log_k.exp()[:, None] * F.softplus(raw_k + bias)
        o, _ = compiled(kda, None)
        _close(o, _written_out(x["q"], x["k"], x["v"], g, x["beta"], None, delta=True)[0], "kda")
        g = -5.0 * torch.sigmoid(A_log_k.exp()[:, None] * (raw_k + bias))
        o, _ = compiled(kda, -5.0)
        _close(o, _written_out(x["q"], x["k"], x["v"], g, x["beta"], None, delta=True)[0], "kda, lower bound")


def test_a_value_major_state_goes_in_and_out_value_major() -> None:
    x = _inputs(H)

    def f(S: Tensor) -> Any:
        return fla_ops.fused_recurrent_kda(
            x["q"],
            x["k"],
            x["v"],
            g=x["gk"],
            beta=x["beta"],
            initial_state=S,
            output_final_state=True,
            state_v_first=True,
        )

    with recorded():
        o, S = torch.compile(f, backend="lattn_compile", fullgraph=True)(x["S"].mT.contiguous())
    want_o, want_S = _written_out(*_five(x, "gk", "beta"), delta=True)
    _close(o, want_o, "o")
    _close(S, want_S.mT, "final_state")


def test_the_normaliser_of_linear_attention_is_kept() -> None:
    x = _inputs(HV)
    q, k = x["q"].abs(), x["k"].abs()
    with recorded():
        o, (S, z) = torch.compile(
            lambda: fla_ops.chunk_linear_attn(q, k, x["v"], output_final_state=True),
            backend="lattn_compile",
            fullgraph=True,
        )()
    plain, want_S = _written_out(q, k, x["v"], None, None, None, delta=False)
    cum = k.double().cumsum(1)
    _close(o, plain / ((q.double() * K**-0.5 * cum).sum(-1, keepdim=True) + 1e-10), "o")
    _close(S, want_S, "final_state")
    _close(z, cum[:, -1:], "z_state")


def test_a_call_without_counterpart_is_left_alone_and_reported() -> None:
    x = _inputs(HV)

    def f() -> Any:
        return fla_ops.fused_recurrent_gla(x["q"], x["k"], x["v"], gk=x["gk"], reverse=True)[0] + 1

    with (
        recorded(),
        pytest.warns(lc.LattnWarning, match=r"chunk_gla|fused_recurrent_gla: reverse=True"),
        # FLA's own kernel is what runs now, and there is no GPU.
        pytest.raises(Exception, match=r"active drivers|CUDA|driver|[Tt]riton"),
    ):
        torch.compile(f, backend="lattn_compile")()


def test_packed_sequences_reach_the_op() -> None:
    x = {name: t[:1] for name, t in _inputs(H).items()}
    cu = torch.tensor([0, 9, T])
    with recorded():
        o, S = torch.compile(
            lambda: fla_ops.chunk_gated_delta_rule(
                x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], output_final_state=True, cu_seqlens=cu
            ),
            backend="lattn_compile",
            fullgraph=True,
        )()
    for i, (a, b) in enumerate([(0, 9), (9, T)]):
        part = {name: t[:, a:b] for name, t in x.items() if name != "S"}
        want_o, want_S = _written_out(part["q"], part["k"], part["v"], part["g"], part["beta"], None, delta=True)
        _close(o[:, a:b], want_o, f"o of sequence {i}")
        _close(S[i : i + 1], want_S, f"final_state of sequence {i}")


def test_another_backend_traces_what_it_always_traced() -> None:
    """fused_recurrent_* is not marked as disabled, so a plain backend sees FLA's own code, not our op."""
    x = _inputs(HV)
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(str(n.target) for n in gm.graph.nodes)
        return gm.forward

    f = torch.compile(lambda: fla_ops.chunk_kda(x["q"], x["k"], x["v"], g=x["gk"], beta=x["beta"])[0], backend=backend)
    with pytest.raises(Exception):  # noqa: B017 - whatever FLA says on a machine without a GPU
        f()
    assert not any("lattn" in s for s in seen)


@pytest.mark.parametrize("call", [c for k in KINDS for c in k.calls if c.library == "fla"], ids=lambda c: c.name)
def test_positional_parameters_are_those_of_the_installed_library(call: KnownCall) -> None:
    function = vars(importlib.import_module(call.module))[call.name]
    names = getattr(call.adapter, "parameters", None) or _CHUNK.parameters
    assert list(inspect.signature(function).parameters)[: len(names)] == names

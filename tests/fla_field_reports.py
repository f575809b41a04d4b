"""Field reports about flash-linear-attention on a machine without a GPU. Run by `passes/test_capture.py` in a
process that has FLA."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lattn_compile as lc
from lattn_compile.testing.backend import recorded
from lattn_compile.testing.inputs import Inputs, make_inputs
from lattn_compile.testing.oracle import oracle

fla_ops = pytest.importorskip("fla.ops")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


class Transformers(nn.Module):
    """transformers' chunk function, which is bound to FLA's at import, whatever the device."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        from transformers.models.qwen3_next import modeling_qwen3_next

        f = modeling_qwen3_next.torch_chunk_gated_delta_rule
        return f(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)[0]


def _arguments(x: Inputs) -> tuple[Any, ...]:
    return (x.q, x.k, x.v, x.g, x.beta, x.cu_seqlens)


@pytest.mark.parametrize("lengths", [None, [5, 9]], ids=["plain", "packed"])
@pytest.mark.parametrize("tracer", ["compile", "export", "strict export"])
def test_three_bodies_are_one_recurrence_and_keep_packed_samples_apart(
    tracer: str, lengths: list[int] | None
) -> None:  # B14a, B21b: while exporting the wrapper takes the torch body, which ignores cu_seqlens
    x = make_inputs("gdn", batch=1, tokens=14, lengths=lengths, initial_state=False)
    with pytest.raises(Exception, match=r"active drivers|driver|CUDA|[Tt]riton"):
        Transformers()(*_arguments(x))
    if tracer == "compile":
        with recorded() as record:
            got = torch.compile(Transformers(), backend="lattn_compile", fullgraph=True)(*_arguments(x))
        assert record.lattn_ops == 1
    else:
        with lc.capture():
            program = torch.export.export(Transformers(), _arguments(x), strict=tracer == "strict export")
        assert [s.kind for s in lc.inspect(program).sites] == ["gdn"]
        got = program.module()(*_arguments(x))
    assert off(got, oracle(*x.tensors(), **x.options()).o) < 2e-6


class FlaLayer(nn.Module):
    """What FLA's own layers do: a convolution that the compiler may not look into, then the recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.conv = nn.Linear(32, 132), nn.Conv1d(128, 128, 4, groups=128, padding=3)

    @torch.compiler.disable
    def short_convolution(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        q, k, v = self.short_convolution(y[..., :128]).unflatten(-1, (-1, 16)).split([2, 2, 4], -2)
        g, beta = y[..., 128:].unflatten(-1, (2, 2)).unbind(-2)
        heads = {"g": -g.exp().repeat_interleave(2, -1), "beta": beta.sigmoid().repeat_interleave(2, -1)}
        return fla_ops.chunk_gated_delta_rule(q, k, v, **heads, use_qk_l2norm_in_kernel=True)[0]


def test_a_break_at_a_disabled_convolution_is_reported_and_the_recurrence_captured() -> None:  # B14
    with recorded() as record, warnings.catch_warnings():
        warnings.simplefilter("ignore", lc.LattnWarning)
        with lc.training_phase(4):
            y = torch.compile(FlaLayer(), backend="lattn_compile", options={"policy": "int8"})(torch.randn(1, 9, 32))
    assert y.isfinite().all()
    assert [s.call for s in record.report.rewritten] == ["fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule"]
    assert [c.op for c in record.calls] == ["lattn::decode"]
    assert len(record.report.graph_breaks) == 1 and "short_convolution" in record.report.graph_breaks[0]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_the_norm_flag_is_honoured(name: str, flag: bool) -> None:  # B45
    x = make_inputs("gdn", batch=1, tokens=9)
    q, k = (30 * F.normalize(t, dim=-1) for t in (x.q, x.k))
    beta = x.beta / 900  # type: ignore[operator]

    def call() -> Tensor:
        options = {"initial_state": x.initial_state, "use_qk_l2norm_in_kernel": flag}
        return getattr(fla_ops, name)(q, k, x.v, g=x.g, beta=beta, **options)[0]

    with recorded():
        got = torch.compile(call, backend="lattn_compile", fullgraph=True)()
    want = oracle(q, k, x.v, x.g, beta, x.initial_state, qk_l2norm=flag).o
    assert off(got, want) < 1e-5


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_the_gate_with_a_lower_bound_is_the_same_in_every_form(name: str) -> None:  # B76
    x = make_inputs("kda", batch=1, tokens=9, key_heads=2, value_heads=2, initial_state=False)
    raw = torch.randn(x.g.shape, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr]
    A_log, dt_bias = torch.tensor([0.5, -0.5]), torch.linspace(-1, 1, 128)
    gate: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": -5.0}
    if name == "chunk_kda":
        gate["safe_gate"] = True

    def call() -> Tensor:
        return getattr(fla_ops, name)(x.q, x.k, x.v, g=raw, beta=x.beta, use_qk_l2norm_in_kernel=True, **gate)[0]

    with recorded():
        got = torch.compile(call, backend="lattn_compile", fullgraph=True)()
    g = -5.0 * torch.sigmoid(A_log.exp()[:, None].double() * (raw.double() + dt_bias.view(2, 64)))
    assert off(got, oracle(x.q, x.k, x.v, g, x.beta, qk_l2norm=True).o) < 1e-5

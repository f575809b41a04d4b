"""What the Triton prefill kernels promise, checked on a GPU against float64: `python -m tests.gpu.run --forms prefill`.

A number is an error in units of what is allowed (`prefill_calls.off`), so that most bounds are 1. Needs nothing but
torch and Triton.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from lattn_compile.kernels import prefill, prefill_call
from lattn_compile.kernels.reference import chunk as reference
from lattn_compile.kernels.reference.operands import Operands
from lattn_compile.modes import BlockDoubling, Prefill
from lattn_compile.ops.residuals import inverse_residuals, record, reset_inverse_residuals
from tests.gpu.checks import Checks, Row
from tests.gpu.chunk_checks import KINDS, MODEL
from tests.kernels.chunk_calls import Call
from tests.kernels.prefill_calls import ALL, INVERSES, ONE, call_of, off

__all__ = ["CHECKS"]

RAGGED = (200, 0, 70, 333)
ADDITIVE = Prefill({"qk": "int8", "qs": "fp8_e4m3", "av": "nvfp4", "kv": "int8"})
MIXED = Prefill(
    {"kk": "int8", "qk": "fp8_e4m3", "w": "nvfp4", "ws": "fp8_e4m3", "kv": "int8"}, inverse=BlockDoubling(8)
)

CHECKS = Checks("prefill ")
_check, _each = CHECKS.check, CHECKS.each


def _call(policy: Prefill, **options: Any) -> Call:
    return call_of(policy, **MODEL | options).to("cuda")


def _held(call: Call, prefix: str = "", *, beside: bool = False) -> list[Row]:
    # Where all sites are rounded, exact pairs of bf16 keys keep 16 bits.
    rounded = call.q.dtype is torch.bfloat16 and call.options["prefill"] in (*ALL.values(), ADDITIVE)
    floor = 6e-5 if rounded else 5e-6
    errors = off(call, floor, beside=beside) | off(call, floor, beside=beside, backward=True)
    return [(f"{prefix}{name}", error, 1.0) for name, error in errors.items()]


@_check("runs")
def _runs() -> list[Row]:
    """Nothing differs between runs: a race would."""
    rows = []
    for name in ALL:
        for kind in ("gdn", "kda"):
            call = _call(ALL[name], lengths=(1500, 700), **KINDS[kind]).inputs(torch.bfloat16)
            first = call.both(prefill)
            differ = sum(len(first.same_bits(call.both(prefill))) for _ in range(4))
            rows.append((f"{name} {kind} tensors that differ", float(differ), 0.0))
    return rows


@_check("tally")
def _tally() -> list[Row]:
    """Residuals are counted by a kernel as torch counts them, at the bound itself and with NaN, without a wait."""
    rows = []
    for size in (1, 5000, 70000):
        norms = torch.randn(size, device="cuda").exp() * 1e-3
        norms[::3] = -1.0
        norms[1::1001] = float(torch.tensor(1e-3))
        norms[4::1001] = float(torch.nextafter(torch.tensor(1e-3), torch.tensor(0.0)))
        for spoilt in (False, True):
            if spoilt:
                norms[size // 2] = math.nan
            reset_inverse_residuals()
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(2):
                record(size, "neumann(7)", 1e-3, norms)
            torch.cuda.set_sync_debug_mode("default")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (got,) = inverse_residuals()
            exact = norms.double()
            chunks, over = int((~(exact < 0)).sum()), int((~(exact <= 1e-3)).sum())
            want = (2 * chunks, 2 * over, float(exact.max().clamp(min=0.0)))
            same = (got.chunks, got.over) == want[:2] and repr(got.largest) == repr(want[2])
            rows.append((f"{size}: counted otherwise", float(not same), 0.0))
    return rows


@_each("one key bf16", ("gdn", "kda"))
def _one_bf16_key(kind: str) -> list[Row]:
    """Beside bf16 inputs, too, exact operands keep 24 bits."""
    rows = []
    for g in (0.0, -0.01):
        call = _call(Prefill({"qs": "int8"}), lengths=(512,), one_key=True, strength=1.9, **KINDS[kind])
        call = call.inputs(torch.bfloat16)
        assert call.g is not None
        call.g.fill_(g)
        rows += _held(call, f"g {g} ")
    return rows


@_each("all sites", [(fmt, kind) for fmt in ALL for kind in ("gdn", "kda", "delta")])
def _all(case: tuple[str, str]) -> list[Row]:
    """Ragged, NaN between sequences, bf16. Without a decay nothing is forgotten: one chunk's codes that fell the other
    way are the next one's errors, so a sequence is one chunk here."""
    lengths = (64, 0, 40) if case[1] == "delta" else RAGGED
    return _held(_call(ALL[case[0]], lengths=lengths, **KINDS[case[1]]).inputs(torch.bfloat16))


@_each("without a decay", ALL)
def _delta(fmt: str) -> list[Row]:
    """Over chunks, where the float32 reference leaves a tenth as well, by a code in a million that fell the other way:
    the bound of semantics §8 for bf16 inputs is twice the reference's own error."""
    return _held(_call(ALL[fmt], lengths=RAGGED, **KINDS["delta"]).inputs(torch.bfloat16), beside=True)


@_each("few tokens", [(fmt, kind) for fmt in ("int8", "fp8_e4m3") for kind in ("gdn", "kda")])
def _few(case: tuple[str, str]) -> list[Row]:
    """Of one token's bf16 keys many lie halfway between two codes, which float32 ones do not."""
    return _held(_call(ALL[case[0]], lengths=(1, 5, 0, 17), **KINDS[case[1]]))


@_each("mixed sites", ("gdn", "kda"))
def _mixed(kind: str) -> list[Row]:
    rows = _held(_call(MIXED, lengths=RAGGED, **KINDS[kind]).inputs(torch.bfloat16))
    return rows + _held(_call(MIXED, lengths=(130, 70), **KINDS[kind]), "float32 ")


@_each("codes", ALL)
def _codes(fmt: str) -> list[Row]:
    """Rows of all magnitudes, and hostile ones, are the codec's to the bit: scales are made without divisions."""
    call = _call(ALL[fmt], lengths=(512,), gap=0, qk_l2norm=False)
    rng = torch.Generator("cuda").manual_seed(0)
    power = torch.randint(-112, 60, call.q.shape[:2], generator=rng, device="cuda")
    q = torch.ldexp(call.q, power[..., None])
    q[::7, 0], q[3, 1, 5], q[5, 2, 9] = 0.0, math.nan, math.inf
    mine = prefill_call.Call(
        q, call.k, call.v, call.g, call.beta, call.starts, call.lengths, rule="delta", scale=1.0, qk_l2norm=False,
        prefill=ALL[fmt],
    )  # fmt: skip
    codes = mine.prepare(0).pairs.rounded["q"]
    assert codes is not None
    got = (codes.x[:, :, 0].float() * codes.scale[..., None])[: 512 // 64].transpose(1, 2).flatten(0, 1)
    want = Operands(ALL[fmt]).left("qk", q)
    differ = (got != want) & ~(got.isnan() & want.isnan())
    return [("numbers that differ", float(differ.sum()), 0.0), ("rows without numbers", float((want == 0).all()), 0.0)]


@_each("additive", ("retention", "gla", "linear"))
def _additive(kind: str) -> list[Row]:
    return _held(_call(ADDITIVE, lengths=RAGGED, **KINDS[kind]).inputs(torch.bfloat16))


@_each("site", ONE)
def _site(site: str) -> list[Row]:
    """One rounded site; float32, where the exact ones keep 24 bits."""
    calls = {kind: _call(ONE[site], lengths=(150,), **KINDS[kind]) for kind in ("gdn", "kda")}
    return [row for kind, call in calls.items() for row in _held(call, f"{kind} ")]


@_each("inverse", INVERSES)
def _inverse(inverse: Any) -> list[Row]:
    rows = _held(_call(Prefill(inverse=inverse), lengths=(130, 20)).inputs(torch.bfloat16))
    return rows + _residuals(_call(Prefill(inverse=inverse), lengths=(130, 0, 20), decay="channel"))


def _residuals(call: Call) -> list[Row]:
    found = []
    for kernel, c in ((prefill, call), (reference, call.exact())):
        mine: list[torch.Tensor] = []
        dataclasses.replace(c, options=c.options | {"measured": mine.append}).forward(kernel)
        norms = torch.cat([x.flatten() for x in mine])
        found.append(norms[norms >= 0].sort().values)
    ours, theirs = found
    apart = (ours - theirs).abs() / (1e-5 + 1e-4 * theirs)
    return [("residuals measured", float(ours.numel() != theirs.numel()), 0.0), ("residuals", float(apart.max()), 1.0)]


@_each("shape", ((7, 5), (16, 36), (60, 100), (64, 64), (256, 256)))
def _shape(shape: tuple[int, int]) -> list[Row]:
    rows = []
    for decay in ("head", "channel"):
        call = _call(ALL["int8"], lengths=(90, 0, 64), key_heads=1, key_dim=shape[0], value_dim=shape[1], decay=decay)
        rows += _held(call.inputs(torch.bfloat16), f"{decay} ")
    return rows


@_each("hostile", ("head", "channel"))
def _hostile(decay: str) -> list[Row]:
    rows: list[Row] = []
    for name, policy in ALL.items():
        call = _call(policy, lengths=(100, 100), decay=decay).inputs(torch.bfloat16)
        assert call.g is not None and call.beta is not None
        call.g[3::7] = -math.inf
        call.g[4::9] = -90.0
        call.k[2::5] = 0.0
        call.beta.fill_(1.9)
        rows += _held(call, f"{name} ")
        call.v[int(call.starts[1]) + 5] = math.nan
        want, got = call.exact().forward(reference).tensors["o"], call.forward(prefill).tensors["o"]
        rows.append((f"{name}: NaNs elsewhere", float((got.isnan() != want.isnan()).sum()), 0.0))
    return rows


@_each("gate above 0", ("head", "channel"))
def _above(decay: str) -> list[Row]:
    """A device cannot refuse it: it is NaN in its own head from its chunk on, and nothing else is."""
    rows = []
    for name, policy in ALL.items():
        call = _call(policy, lengths=(150, 70), decay=decay).inputs(torch.bfloat16)
        assert call.g is not None
        want = call.forward(prefill).tensors
        call.g[int(call.starts[0]) + 70, 1] = 0.5
        got = call.forward(prefill).tensors
        bad = slice(int(call.starts[0]) + 70, int(call.starts[0]) + 150)
        rows.append((f"{name} outputs not NaN", float((~got["o"][bad, 1].isnan()).sum()), 0.0))
        rows.append((f"{name} states not NaN", float((~got["final"][0, 1].isnan()).sum()), 0.0))
        for x in (want, got):
            x["o"][int(call.starts[0]) + 64 : bad.stop, 1], x["final"][0, 1] = 0.0, 0.0
        differ = sum((~torch.isclose(x, got[n], rtol=0, atol=0, equal_nan=True)).sum() for n, x in want.items())
        rows.append((f"{name} others that differ", float(differ), 0.0))
    return rows


@_check("one key")
def _one_key() -> list[Row]:
    """One key repeated, with only the reads of the state rounded: the exact inverse is substitution."""
    rows = []
    for g in (0.0, -0.01):
        call = _call(Prefill({"qs": "int8"}), lengths=(512,), one_key=True, strength=1.9)
        assert call.g is not None
        call.g.fill_(g)
        rows += _held(call, f"g {g} ")
    return rows


@_check("graph")
def _graph() -> list[Row]:
    """It is recorded, waits for nothing, and replays with other lengths."""
    policy = dataclasses.replace(ALL["fp8_e4m3"], inverse=BlockDoubling(8))
    call = _call(policy, lengths=(200, 100)).inputs(torch.bfloat16)
    call.both(prefill)
    grad_o, rows = torch.randn_like(call.v), list[Row]()

    def run(o: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        final = prefill.forward(*call.arguments(), o, **call.options)
        return final, prefill.backward(grad_o, None, *call.arguments(), {"dv": dv}, **call.options)

    o, dv = torch.zeros_like(call.v), torch.zeros_like(call.v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.graph(graph):
        final, dstate = run(o, dv)
    torch.cuda.set_sync_debug_mode("default")
    for lens in ((200, 100), (7, 0)):
        call.lengths.copy_(torch.tensor(lens))
        o.zero_(), dv.zero_()
        graph.replay()
        again, dv_again = torch.zeros_like(o), torch.zeros_like(dv)
        want, dwant = run(again, dv_again)
        wrong = (final != want).sum() + (dstate != dwant).sum() + (dv != dv_again).sum() + (o != again).sum()
        rows.append((f"{lens}: numbers that differ", float(wrong), 0.0))
    return rows

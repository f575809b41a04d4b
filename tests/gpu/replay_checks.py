"""What the Triton replay kernel promises, checked on a GPU against float64 (semantics §8).

Each check returns rows `(what, measured, bound)`; one is broken where the measured number exceeds its bound or is NaN.
Needs nothing but torch and Triton, so that it runs on a bare machine: `python -m tests.gpu.run --forms replay`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.kernels import replay, replay_launch, replay_run
from lattn_compile.kernels.reference import replay as reference
from tests.gpu.checks import Checks, Row
from tests.kernels.replay_calls import Call, errors, make_call, poisoned, taken_over

__all__ = ["CHECKS", "Row"]


DEVICE = "cuda"
MODEL: dict[str, Any] = {"key_heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128, "window": 16}
FORMATS = ("int8", "int8/*x16", "int8/*x32", "int8/*x*", "int8/32x16", "fp8", "fp8/128x1", "nvfp4", "bf16", "fp16")
SHAPES = ((7, 5), (16, 33), (33, 12), (60, 100), (64, 64), (96, 80), (100, 1), (128, 256), (256, 128))
KINDS = ("gdn", "kda", "delta", "gla", "linear", "retention")
WINDOWS = (1, 2, 7, 8, 16, 24, 32, 64)
FACTORS = ("int8", "fp8_e4m3", "bf16")
BOUND = 1e-5

CHECKS = Checks()
_check, _each = CHECKS.check, CHECKS.each


def _call(kind: str = "gdn", **options: Any) -> Call:
    options = MODEL | {"fmt": None} | options
    dtype = options.pop("inputs", torch.float32)
    return make_call(kind, **options).inputs_in(dtype).to(DEVICE)


def _rows(found: dict[str, float], bound: float, prefix: str = "") -> list[Row]:
    return [(prefix + name, error, bound) for name, error in found.items()]


def _both(call: Call) -> dict[str, Tensor]:
    with poisoned():
        return call.both()


def _beside(call: Call, prefix: str = "") -> list[Row]:
    """Errors of bf16 inputs, at the same stored states: bf16 results at most twice those of the reference that computes
    in fp32, and fp32 results the bound of fp32."""
    stored = call.stored()
    got = _both(call)
    with taken_over(call.records()):
        want = call.exact().at(stored).both(reference)
        theirs = errors(call.at(stored).both(reference), want)
    bounds = {name: 2 * theirs[name] if x.dtype is torch.bfloat16 else BOUND for name, x in got.items()}
    return [(prefix + name, error, bounds[name]) for name, error in errors(got, want).items()]


@_each("kind", KINDS)
def _kind(kind: str) -> list[Row]:
    """Nothing rounded, ragged, NaN between sequences and in the workspace: values and every gradient."""
    call = _call(kind, lengths=(5, 0, 37, 16), gap=2)
    return _rows(errors(_both(call), call.want()), BOUND)


@_each("bf16", KINDS)
def _half(kind: str) -> list[Row]:
    return _beside(_call(kind, lengths=(70, 0, 9), inputs=torch.bfloat16, fmt="int8"))


@_each("bf16 window", WINDOWS)
def _half_window(window: int) -> list[Row]:
    kind = "kda" if window % 16 else "gdn"
    call = _call(kind, lengths=(2 * window, 3), fmt="int8", window=window, inputs=torch.bfloat16)
    return _beside(call)


@_each("bf16 shape", SHAPES)
def _half_shape(shape: tuple[int, int]) -> list[Row]:
    sizes = {"key_dim": shape[0], "value_dim": shape[1], "value_heads": 6, "inputs": torch.bfloat16}
    kind = "kda" if SHAPES.index(shape) % 2 else "gdn"
    return _beside(_call(kind, lengths=(40, 9), fmt="int8", **sizes))


@_each("bf16 format", FORMATS)
def _half_format(fmt: str) -> list[Row]:
    readout = "after_write" if FORMATS.index(fmt) % 2 else "before_write"
    return _beside(_call(lengths=(40, 33), fmt=fmt, readout=readout, inputs=torch.bfloat16))


def _records(kind: str, factors: str, anchors: str, inputs: torch.dtype) -> list[Row]:
    """int8 anchors: ragged; fp8: the other readout, a window of 8, a ring and its gradients."""
    options: dict[str, Any] = {"lengths": (5, 0, 37, 16)}
    if anchors == "fp8":
        options = {"lengths": (19, 3), "cursor": (3, 5), "keep": True, "readout": "after_write", "window": 8}
    call = _call(kind, fmt=anchors, factors=factors, inputs=inputs, **options)
    prefix = f"{anchors} {inputs} "
    if inputs is torch.bfloat16:
        return _beside(call, prefix)
    return _rows(errors(_both(call), call.want()), BOUND, prefix)


@_each("factors", [f"{factors} {kind}" for factors in FACTORS for kind in KINDS])
def _factors(name: str) -> list[Row]:
    """Records in few bits, at the states and records that the kernel stored."""
    factors, _, kind = name.partition(" ")
    return _records(kind, factors, "int8", torch.float32) + _records(kind, factors, "fp8", torch.bfloat16)


@_each("other factors", [f"{factors} {kind}" for factors in FACTORS for kind in ("gdn", "kda")])
def _factors_too(name: str) -> list[Row]:
    factors, _, kind = name.partition(" ")
    return _records(kind, factors, "fp8", torch.float32) + _records(kind, factors, "int8", torch.bfloat16)


@_check("factors and windows of 64")
def _factors_long() -> list[Row]:
    """And of 32."""
    rows = []
    for kind, factors, inputs in (("gdn", "int8", torch.float32), ("kda", "fp8_e4m3", torch.bfloat16)):
        window = 64 if inputs is torch.float32 else 32
        call = _call(kind, lengths=(70, 64), fmt="int8", factors=factors, window=window, inputs=inputs)
        rows += (
            _beside(call, f"{kind} ")
            if inputs is torch.bfloat16
            else _rows(errors(_both(call), call.want()), BOUND, f"{kind} ")
        )
    return rows


@_check("factors of one flush")
def _factors_flush() -> list[Row]:
    """A record is a code of what the torch codec gets: the first token's, of which nothing is summed before."""
    rows = []
    for factors in FACTORS:
        call = _call("linear", lengths=(3,) * 64, fmt=None, factors=factors, keep=True, key_heads=8, value_heads=16)
        call.case.options["qk_l2norm"] = False
        ours, theirs = (call.forward(kernel) for kernel in (replay, reference))
        for name in ("ring_k", "ring_u"):
            rows.append((f"{factors} {name}: numbers that differ", float((ours[name] != theirs[name]).sum()), 0.0))
    return rows


@_check("hostile factors")
def _hostile_factors() -> list[Row]:
    rows: list[Row] = []
    for factors in FACTORS:
        for name, kind, change in _changes():
            call = _call(kind, lengths=(40,), factors=factors)
            change(call)
            rows += _rows(errors(_both(call), call.want()), BOUND, f"{factors} {name} ")
        call = _call("linear", lengths=(32, 32), fmt="int8", factors=factors)
        call.case.v[20, 1, 3] = torch.inf
        got, want = (call.forward(kernel) for kernel in (replay, reference))
        for what in ("o", "anchor"):
            apart = float((got[what].isfinite() != want[what].isfinite()).sum())
            rows.append((f"{factors} {what}: an infinity stays where torch keeps it", apart, 0.0))
    return rows


@_each("launch", replay_launch.LAUNCHES)
def _launch(name: str) -> list[Row]:
    """Every way to launch, on the shapes of the benchmark."""
    before, replay_launch.CHOSEN = replay_launch.CHOSEN, name
    rows = []
    for kind, fmt in (("gdn", "int8"), ("kda", "fp8")):
        rows += _beside(_call(kind, lengths=(64, 40), inputs=torch.bfloat16, fmt=fmt), f"{kind} {fmt} ")
    replay_launch.CHOSEN = before
    return rows


@_each("format", FORMATS)
def _format(fmt: str) -> list[Row]:
    """Gradients at the states that the kernel stored; both readouts."""
    rows = []
    for readout in ("before_write", "after_write"):
        call = _call(lengths=(40, 33), fmt=fmt, readout=readout)
        rows += _rows(errors(_both(call), call.want()), BOUND, f"{readout} ")
    return rows


@_each("one flush", ("int8", "int8/*x16", "int8/32x16", "fp8"))
def _one_flush(spec: str) -> list[Row]:
    """From one stored state: at most 1e-5 of the codes differ, by one; scales by two units of their last place."""
    call = _call(lengths=(16,) * 24, key_heads=8, value_heads=16, fmt=spec)
    fmt = parse(spec)
    ours, theirs = (fmt.encode(call.forward(kernel)["anchor"]) for kernel in (replay, reference))
    codes = [x["codes"].view(torch.int8).to(torch.int32) for x in (ours, theirs)]
    if spec.startswith("fp8"):  # sign and magnitude to a line
        codes = [torch.where(x < 0, -(x & 127), x) for x in codes]
    apart = (codes[0] - codes[1]).abs()
    scales = [x["state_scale"].view(torch.int32) >> 8 for x in (ours, theirs)]  # 16 significant bits
    return [
        ("share of codes that differ", float((apart > 0).double().mean()), 1e-5),
        ("codes apart", float(apart.max()), 1.0),
        ("units of scale apart", float((scales[0] - scales[1]).abs().max()), 2.0),
    ]


@_check("carried")
def _carried() -> list[Row]:
    """A ring that comes and a ring that goes, with gradients of both."""
    rows = []
    for kind in ("gdn", "kda"):
        call = _call(kind, lengths=(40, 3, 0), cursor=(5, 9, 15), keep=True, fmt="int8")
        rows += _rows(errors(_both(call), call.want()), BOUND, f"{kind} ")
    return rows


@_check("pairs")
def _pairs() -> list[Row]:
    """two_precision: a read copy, an anchor in fp32 and in bf16, with a ring and without."""
    call = _call(lengths=(40, 3), cursor=(5, 9), keep=True, fmt="fp8/128x1", paired=True)
    rows = _rows(errors(_both(call), call.want()), BOUND, "ring ")
    call = _call("kda", lengths=(33, 16), fmt="fp8/128x1", paired=True, inputs=torch.bfloat16)
    rows += _beside(call, "bf16 inputs ")
    call = _call(lengths=(16, 19), fmt="fp8/128x1", paired=True, anchor_format="bf16")
    got, want = call.forward()["anchor"], call.exact().forward(reference)["anchor"]
    rows.append(("bf16 anchors that are none", float((got.bfloat16().float() != got).sum()), 0.0))
    # Where fp32 rounding puts a value across a boundary, one unit of bf16's last place.
    apart = (got.double() - want).abs() / want.abs().clamp(min=1e-30)
    rows.append(("bf16 anchors apart", float(apart.max()), 2.0**-7))
    return [*rows, ("share of bf16 anchors apart", float((apart > 0).double().mean()), 1e-3)]


@_each("window", WINDOWS)
def _window(window: int) -> list[Row]:
    call = _call("kda" if window % 16 else "gdn", lengths=(2 * window, 3, window + 1), fmt="int8", window=window)
    return _rows(errors(_both(call), call.want()), BOUND)


@_each("shape", SHAPES)
def _shape(shape: tuple[int, int]) -> list[Row]:
    """Any K and V, three value heads to a key head."""
    sizes = {"key_dim": shape[0], "value_dim": shape[1], "value_heads": 6}
    call = _call(lengths=(40, 9), fmt="int8", **sizes)
    rows = _rows(errors(_both(call), call.want()), BOUND, "gdn ")
    call = _call("kda", lengths=(17, 16), fmt="int8", **sizes)
    return rows + _rows(errors(_both(call), call.want()), BOUND, "kda ")


@_check("long exact runs")
def _long() -> list[Row]:
    rows = []
    for g in (-1e-3, -0.02, -2.0):
        call = _call(lengths=(4096,), key_heads=1, value_heads=1)
        assert call.case.g is not None
        call.case.g.fill_(g)
        bound = 5e-6 + 2.0**-24 * min(4096, 1 / -g)
        rows += _rows(errors(call.forward(), call.exact().forward(reference)), bound, f"g = {g} ")
    return rows


@_check("repeated keys")
def _repeated() -> list[Row]:
    """The inverse of a window whose keys are one: what shortcuts to it get wrong by up to 1e19."""
    rows = []
    for beta, g, window in ((0.5, 0.0, 16), (1.0, -0.01, 32), (1.9, 0.0, 16), (1.9, -0.01, 16), (1.9, -0.01, 32)):
        call = _one_key("gdn", beta, g, window, torch.float32)
        bound = 5e-6 + 2.0**-24 * (1024 if g == 0 else min(1024, 1 / -g))
        rows += _rows(errors(call.forward(), call.exact().forward(reference)), bound, f"{beta} {g} {window} ")
    return rows


@_each("repeated bf16 key", [f"{kind} {window}" for kind in ("gdn", "kda") for window in (8, 16, 32)])
def _repeated_half(name: str) -> list[Row]:
    """bf16 inputs and float32 gates: states and gates' gradients are float32's. In a window of 64 these are off by
    2.6e-5 (GDN, beta 1.9, g = -0.01), so "auto" takes 32 (`ops/dispatch.py`)."""
    kind, _, window = name.partition(" ")
    rows = []
    for beta, g in ((0.5, 0.0), (1.0, -0.01), (1.9, 0.0), (1.9, -0.01)):
        rows += _beside(_one_key(kind, beta, g, int(window), torch.bfloat16), f"{beta} {g} ")
    return rows


def _one_key(kind: str, beta: float, g: float, window: int, inputs: torch.dtype) -> Call:
    """One key for all tokens; gates are fp32."""
    call = _call(kind, lengths=(1024,), key_heads=1, value_heads=1, window=window, inputs=inputs)
    assert call.case.g is not None and call.case.beta is not None
    call.case.g = torch.full_like(call.case.g, g, dtype=torch.float32)
    call.case.beta.fill_(beta)
    call.case.k.copy_(call.case.k[5:6].clone())
    return call


@_check("short free runs")
def _free() -> list[Row]:
    """16 tokens from one start: the distance to the float64 run is a small part of what quantization changes."""
    rows = []
    for spec in ("int8", "fp8", "nvfp4"):
        call = _call(lengths=(16,) * 4, fmt=spec, window=4)
        o = [c.forward(k)["o"].double() for c, k in ((call, replay), (call.exact(), reference))]
        exact = call.exact().with_options(quantize=None).forward(reference)["o"]
        live = ~exact.isnan()
        rows.append((spec, float((o[0] - o[1])[live].norm() / (exact - o[1])[live].norm()), 0.1))
    return rows


def _differ(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """How many tensors differ in any bit, NaN being NaN."""
    return float(sum(not torch.equal(got[n].nan_to_num(7.5), x.nan_to_num(7.5)) for n, x in want.items()))


@_check("the same bits")
def _bits() -> list[Row]:
    """Run to run; of a sequence in any company; cut at a flush; in stretches of any length."""
    rows = []
    for inputs in (torch.float32, torch.bfloat16):
        call = _call("kda", lengths=(64, 37), fmt="int8", inputs=inputs)
        whole = call.both()
        rows.append((f"{inputs} run to run", _differ(call.both(), whole), 0.0))
        case = call.case
        alone = dataclasses.replace(
            case, starts=case.starts[:1], lengths=case.lengths[:1], cursor=case.cursor[:1], anchor=case.anchor[:1]
        )
        first = Call(alone, call.cotangents | {"anchor": call.cotangents["anchor"][:1]}).both()
        rows.append((f"{inputs} alone, anchor", float((first["anchor"] != whole["anchor"][:1]).sum()), 0.0))
        rows.append((f"{inputs} alone, o", _differ({"o": first["o"][:64]}, {"o": whole["o"][:64]}), 0.0))
        cut = dataclasses.replace(case, lengths=torch.minimum(case.lengths, case.lengths.new_tensor(32)))
        half = Call(cut, {}).forward()
        rest = dataclasses.replace(case, starts=case.starts + 32, lengths=case.lengths - 32, anchor=half["anchor"])
        again = Call(rest, {}).forward()
        o = torch.where(half["o"].isnan(), again["o"], half["o"])
        rows.append((f"{inputs} cut at a flush", _differ({**again, "o": o}, {n: whole[n] for n in again}), 0.0))
        small, replay_run._SMALL = replay_run._SMALL, 1 << 22
        share, replay_run._SHARE = replay_run._SHARE, 0.0
        rows.append((f"{inputs} short stretches", _differ(call.both(), whole), 0.0))
        replay_run._SMALL, replay_run._SHARE = small, share
    return rows


@_check("hostile")
def _hostile() -> list[Row]:
    rows: list[Row] = []
    for name, kind, change in _changes():
        call = _call(kind, lengths=(40, 40))
        change(call)
        rows += _rows(errors(_both(call), call.want()), BOUND, f"{name} ")
    call = _call(lengths=(32, 32), fmt="int8")
    call.case.anchor[0, 0, 3, 5] = torch.nan
    final, want = (call.forward(kernel)["anchor"] for kernel in (replay, reference))
    rows.append(("NaN stays where torch keeps it", float((final.isnan() != want.isnan()).sum()), 0.0))
    return rows


def _changes() -> Iterator[tuple[str, str, Callable[[Call], object]]]:
    def fill(name: str, value: float, every: int = 1) -> Callable[[Call], object]:
        return lambda call: getattr(call.case, name)[1::every].fill_(value)

    yield "reset", "gdn", fill("g", -math.inf, 3)
    yield "reset of channels", "kda", lambda call: call.case.g[4::3, :, ::2].fill_(-math.inf)  # type: ignore[index]
    yield "strong decay", "gdn", fill("g", -90.0, 4)
    yield "zero keys", "gdn", fill("k", 0.0, 3)
    yield "beta 1.9", "gdn", fill("beta", 1.9)
    yield "no beta", "kda", fill("beta", 0.0, 2)


@_check("strides")
def _strides() -> list[Row]:
    """Tokens, heads and channels in any order, or apart, have the same bits."""
    rows = []
    for kind, inputs in (("kda", torch.float32), ("gdn", torch.bfloat16)):
        call = _call(kind, lengths=(20, 17), fmt="int8", inputs=inputs)
        whole = call.both()
        strided = call.map(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 3 else x)
        wide = call.map(lambda x: torch.stack((x, x), -1)[..., 0])
        for name, other in (("transposed", strided), ("every second element", wide)):
            rows.append((f"{kind} {name}: tensors that differ", _differ(other.both(), whole), 0.0))
    return rows


@_check("graph")
def _graph() -> list[Row]:
    """Forward and backward are recorded, wait for nothing, and replay with other lengths."""
    call = _call(lengths=(40, 40), fmt="int8", inputs=torch.bfloat16)
    call.both()
    lengths = call.case.lengths
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = call.both()
    torch.cuda.set_sync_debug_mode("default")
    rows = []
    for lens in ((40, 40), (7, 0), (16, 40)):
        lengths.copy_(torch.tensor(lens))
        graph.replay()
        rows.append((f"{lens}: tensors that differ", _differ(recorded, call.both()), 0.0))
    return rows


@_each("memory", ("gdn", "kda"))
def _memory(kind: str) -> list[Row]:
    """Forward and backward of 8,192 tokens take no more than their tokens and the outputs again."""
    heads, tokens = 16, 8192
    q, k = (torch.randn(tokens, heads, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    v, grad_o = (torch.randn(tokens, 2 * heads, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    g = -torch.rand((tokens, 2 * heads) if kind == "gdn" else (tokens, 2 * heads, 128), device=DEVICE)
    beta = torch.rand(tokens, 2 * heads, device=DEVICE)
    small = _call(kind, lengths=(16,), fmt="int8")
    anchor = torch.zeros(1, 2 * heads, 128, 128, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    case = dataclasses.replace(
        small.case, q=q, k=k, v=v, g=g, beta=beta, anchor=anchor, starts=zero, lengths=zero + tokens, cursor=zero
    )
    o = torch.empty_like(v)
    grads = {f"d{n}": torch.empty_like(x) for n, x in case.tensors().items()}
    given = sum(x.nbytes for x in (q, k, v, g, beta, o))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    replay.forward(*case.arguments(), o, **case.options, keep=False)
    replay.backward(grad_o, anchor, None, *case.arguments(), grads, **case.options)
    torch.cuda.synchronize()
    return [("bytes beside them / bytes of them", (torch.cuda.max_memory_allocated() - before) / given, 1.0)]

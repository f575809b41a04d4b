"""What the Triton chunk kernel promises, checked on a GPU against float64 (semantics §8).

Each check returns rows `(what, measured, bound)`; one is broken where the measured number exceeds its bound or is NaN.
Needs nothing but torch and Triton, so that it runs on a bare machine: `python -m tests.gpu.run`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.kernels import chunk, chunk_call
from lattn_compile.kernels.reference import chunk as reference
from tests.gpu.checks import Checks, Row
from tests.kernels.chunk_calls import Call, make_call
from tests.kernels.decode_calls import Given, Outcome

__all__ = ["CHECKS", "SMALL", "Row"]


DEVICE = "cuda"
MODEL: dict[str, Any] = {"key_heads": 8, "ratio": 2, "key_dim": 128, "value_dim": 128, "gap": 2}
RAGGED = (200, 0, 1, 333)
KINDS: dict[str, dict[str, Any]] = {
    "gdn": {},
    "kda": {"decay": "channel"},
    "delta": {"decay": None},
    "retention": {"rule": "additive", "beta": False, "qk_l2norm": False},
    "gla": {"rule": "additive", "qk_l2norm": False, "decay": "channel"},
    "linear": {"rule": "additive", "decay": None},
}
# Kernels are compiled per shape and kind, which takes longest: checks share shapes where they can.
SHAPES = (
    *((1, 1), (8, 8), (16, 16), (16, 32), (32, 16), (32, 32), (16, 64), (64, 16)),
    *((7, 5), (16, 36), (33, 12), (64, 64), (60, 100), (128, 256), (256, 128), (256, 256)),
)
CHANNEL_SHAPES = (*SHAPES[:8], (100, 60), (64, 128), (256, 64))

WRITES: dict[str, dict[str, Any]] = {
    "int8": {"state_format": "int8"},
    "int8/*x32": {"state_format": "int8/*x32", "decay": "channel"},
    "int8/16x16": {"state_format": "int8/16x16", "chunk_size": 32, "readout": "after_write", "decay": "channel"},
    "int8/*x*": {"state_format": "int8/*x*", "chunk_size": 16},
    "fp8": {"state_format": "fp8", "chunk_size": 100, "readout": "after_write"},
    "nvfp4": {"state_format": "nvfp4", "decay": "channel"},
    "bf16": {"state_format": "bf16", "chunk_size": 48, "readout": "after_write"},
}

SHORT: dict[str, Any] = {"lengths": (200, 200), "gap": 0, "key_heads": 1}
"""One span of the reference, so that it writes every state once (`decode_calls.Given`)."""

CHECKS = Checks("chunk ")
_check, _each = CHECKS.check, CHECKS.each


def _call(**options: Any) -> Call:
    return make_call(**MODEL | options).to(DEVICE)


def _held(call: Call, prefix: str = "") -> list[Row]:
    """Outputs, state and gradients of a call against the float64 reference on its very inputs.

    fp32 inputs: values within semantics §8's bound of exact mode, gradients 1e-5. bf16 and fp16 inputs: what is
    returned in their dtype, at most twice the error that rounding to it makes; what is fp32 (states, gates), 2e-5.
    """
    want = call.exact().both(reference)
    got = call.both(chunk)
    errors, own = got.errors(want), _rounding(got, want)
    longest = int(call.lengths.max())
    rate = 0.0 if call.g is None else float(-call.g.nan_to_num(0.0, neginf=0.0).mean())
    exact = 5e-6 + 2.0**-24 * min(longest, 1 / max(rate, 1e-9))
    rows = []
    for name, error in errors.items():
        bound = 1e-5 if call.q.dtype is torch.float32 else 2e-5
        if got.tensors[name].dtype is not torch.float32:
            bound = 2 * own[name]
        elif name in ("o", "final") and call.q.dtype is torch.float32:
            bound = exact
        rows.append((f"{prefix}{name}", error, bound))
    return rows


def _rounding(got: Outcome, want: Outcome) -> dict[str, float]:
    """What rounding the right values to the dtypes of `got` costs, as errors."""
    rounded = {name: x.to(got.tensors[name].dtype) for name, x in want.tensors.items()}
    return Outcome(rounded).errors(want)


@_each("kind", KINDS)
def _kind(kind: str) -> list[Row]:
    """Exact mode in bf16, ragged, NaN between sequences: values and every gradient."""
    return _held(_call(lengths=RAGGED, **KINDS[kind]).inputs(torch.bfloat16))


@_each("fp32", ("gdn", "kda", "retention"))
def _fp32(kind: str) -> list[Row]:
    return _held(_call(lengths=(130, 70), **KINDS[kind]))


@_each("fp16", ("gdn", "kda"))
def _fp16(kind: str) -> list[Row]:
    return _held(_call(lengths=(130, 0, 70), **KINDS[kind]).inputs(torch.float16))


@_each("shape", SHAPES)
def _shape(shape: tuple[int, int]) -> list[Row]:
    return _of_shape(shape, "head", 3)


@_each("channel shape", CHANNEL_SHAPES)
def _channel_shape(shape: tuple[int, int]) -> list[Row]:
    return _of_shape(shape, "channel", 2)


def _of_shape(shape: tuple[int, int], decay: str, ratio: int) -> list[Row]:
    options = {"key_dim": shape[0], "value_dim": shape[1], "decay": decay, "ratio": ratio}
    call = _call(lengths=(90, 0, 64), key_heads=1, **options)
    if shape[0] == 1:  # the gradient of a normalised vector of one channel is nothing but rounding
        call = dataclasses.replace(call, options=call.options | {"qk_l2norm": False}, k=call.k * 0.5)
        return _held(call)
    return _held(call.inputs(torch.bfloat16))


@_each("fp32 shape", ((7, 5), (64, 64), (256, 256)))
def _fp32_shape(shape: tuple[int, int]) -> list[Row]:
    return _held(_call(lengths=(70, 20), key_heads=1, ratio=1, key_dim=shape[0], value_dim=shape[1]))


@_each("few tokens", (5, 17, 32))
def _few(tokens: int) -> list[Row]:
    """Blocks of 16 and 32 tokens."""
    rows = _held(_call(lengths=(tokens,), gap=0).inputs(torch.bfloat16), "head ")
    return rows + _held(_call(lengths=(tokens,), gap=0, decay="channel").inputs(torch.bfloat16), "channel ")


SMALL_KINDS: dict[str, dict[str, Any]] = {
    "gdn": {},
    "kda": {"decay": "channel"},
    "int8": {"state_format": "int8", "chunk_size": 64},
}


@_each("small", SMALL_KINDS)
def _small(kind: str) -> list[Row]:
    """Three blocks of one head."""
    call = _call(**SMALL_KINDS[kind] | {"lengths": (140,), "key_heads": 1, "ratio": 1}).inputs(torch.bfloat16)
    return _held(call) if kind != "int8" else _free(call, "")


@_each("one key", (torch.float16, torch.float32, torch.bfloat16))
def _one_key(dtype: torch.dtype) -> list[Row]:
    """One key repeated, where an inverse by doubling is wrong by up to 1e19."""
    return _repeated(dtype, "head")


@_each("one key by channel", (torch.float32, torch.bfloat16))
def _one_key_by_channel(dtype: torch.dtype) -> list[Row]:
    return _repeated(dtype, "channel")


def _repeated(dtype: torch.dtype, decay: str) -> list[Row]:
    rows = []
    for strength in (0.5, 1.0, 1.9):
        for g in (0.0, -0.01):
            call = _call(lengths=(1024,), one_key=True, strength=strength, decay=decay)
            assert call.g is not None
            call.g.fill_(g)
            rows += _held(call.inputs(dtype), f"beta {strength} g {g} ")
    return rows


@_each("hostile", ("head", "channel"))
def _hostile(decay: str) -> list[Row]:
    rows: list[Row] = []
    for name, change in _changes():
        call = _call(lengths=(100, 100), decay=decay)
        change(call)
        rows += _held(call.inputs(torch.float32 if name == "beta 1.9" else torch.bfloat16), f"{name} ")
    return rows


def _changes() -> Iterator[tuple[str, Callable[[Call], object]]]:
    def fill(name: str, value: float, every: int = 1) -> Callable[[Call], object]:
        return lambda call: getattr(call, name)[1::every].fill_(value)

    yield "reset", fill("g", -math.inf, 7)
    yield "strong decay", fill("g", -90.0, 4)
    yield "zero keys", fill("k", 0.0, 3)
    yield "beta 1.9", fill("beta", 1.9)
    yield "masked", lambda call: (fill("g", 0.0, 2)(call), fill("beta", 0.0, 2)(call))


@_each("spans", ("head", "channel"))
def _spans(decay: str) -> list[Row]:
    """A call in many spans is the call in one: the same bits of values, the same gradients."""
    call = _call(lengths=(700, 0, 1300), decay=decay).inputs(torch.bfloat16)
    whole = call.both(chunk)
    kept = chunk_call.LEAST_BUDGET, chunk_call.GIVEN, chunk_call.LEAST_SPAN
    chunk_call.LEAST_BUDGET, chunk_call.GIVEN, chunk_call.LEAST_SPAN = 1 << 10, 0, 2
    try:
        parts = call.both(chunk)
    finally:
        chunk_call.LEAST_BUDGET, chunk_call.GIVEN, chunk_call.LEAST_SPAN = kept
    return [("tensors that differ", float(len(whole.same_bits(parts))), 0.0), *_held(call)]


@_each("chunk mode", WRITES)
def _chunk_mode(name: str) -> list[Row]:
    """States stay by the float64 run's; gradients are those of the reference at the stored states."""
    call = _call(lengths=(1024,), gap=0, **WRITES[name]).inputs(torch.bfloat16)
    rows = _free(call, "1024 ")
    return rows + _at_its_states(_call(**SHORT | WRITES[name]).inputs(torch.bfloat16), "200 ")


@_check("chunk mode float32")
def _chunk_mode_wide() -> list[Row]:
    return _at_its_states(_call(**SHORT | WRITES["int8"]), "")


def _free(call: Call, prefix: str) -> list[Row]:
    """How far the final state, which is fp32, is from the float64 run's, as a part of what quantization changes."""
    exact = dataclasses.replace(call.exact(), options=call.options | {"quantize": None})
    want, plain = call.exact().forward(reference).tensors["final"], exact.forward(reference).tensors["final"]
    got = call.forward(chunk).tensors["final"].double()
    return [(prefix + "distance", float((got - want).norm() / (plain - want).norm()), 0.1)]


def _at_its_states(call: Call, prefix: str) -> list[Row]:
    """Gradients against the reference's where every write gives what the kernel wrote there."""
    size, length = call.options["chunk_size"], int(call.lengths[0])
    states, state = [], call.state
    for begin in range(0, length - size + 1, size):
        part = dataclasses.replace(
            call, state=state, starts=call.starts + begin, lengths=torch.full_like(call.lengths, size)
        )
        state = part.forward(chunk).tensors["final"]
        states.append(state.double())
    got = call.backward(chunk)
    exact = call.exact()
    given = Given(call.options["quantize"].fmt).using(states)
    want = dataclasses.replace(exact, options=exact.options | {"quantize": given}).backward(reference)
    own, errors = _rounding(got, want), got.errors(want)
    low = call.q.dtype is not torch.float32
    return [
        (f"{prefix}{n}", e, (2e-5 if got.tensors[n].dtype is torch.float32 else 2 * own[n]) if low else 1e-5)
        for n, e in errors.items()
    ]


@_each("one write", ("int8", "fp8"))
def _one_write(spec: str) -> list[Row]:
    """From one stored state, a chunk later: at most 1e-5 of the codes differ, by one; scales by two last places."""
    call = _call(state_format=spec, lengths=(64,) * 16)
    fmt = parse(spec)
    ours, theirs = (fmt.encode(call.forward(kernel).tensors["final"]) for kernel in (chunk, reference))
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


@_check("grid")
def _grid() -> list[Row]:
    """A run cut on its grid has the bits of the uncut one, from any offset."""
    rows = []
    for offset in (0, 40):
        call = _call(state_format="int8", chunk_size=64, lengths=(300,), offsets=(offset,), gap=0)
        whole = call.forward(chunk).tensors
        cut = 128 - offset
        first = dataclasses.replace(call, lengths=torch.full_like(call.lengths, cut)).forward(chunk).tensors
        rest = dataclasses.replace(
            call, state=first["final"], starts=call.starts + cut, lengths=call.lengths - cut,
            offsets=torch.zeros_like(call.lengths),
        ).forward(chunk).tensors  # fmt: skip
        rows.append((f"final from {offset}", float((rest["final"] != whole["final"]).sum()), 0.0))
        rows.append((f"o from {offset}", float((rest["o"][cut:] != whole["o"][cut:]).sum()), 0.0))
    return rows


@_check("runs")
def _runs() -> list[Row]:
    """Nothing differs between runs: a race would."""
    rows = []
    for kind in ("gdn", "kda"):
        call = _call(lengths=(1500, 700), **KINDS[kind]).inputs(torch.bfloat16)
        first = call.both(chunk)
        differ = sum(len(first.same_bits(call.both(chunk))) for _ in range(4))
        rows.append((f"{kind} tensors that differ", float(differ), 0.0))
    return rows


@_check("strides")
def _strides() -> list[Row]:
    """Tokens and heads in any order have the same bits; channels apart are summed in another order."""
    rows = []
    for decay in ("head", "channel"):
        call = _call(lengths=(100, 33), decay=decay).inputs(torch.bfloat16)
        other = call.map(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
        differ = call.both(chunk).same_bits(other.both(chunk))
        rows.append((f"{decay} transposed: tensors that differ", float(len(differ)), 0.0))
        rows += _held(call.map(lambda x: torch.stack((x, x), -1)[..., 0]), f"{decay} every second element ")
    return rows


@_check("memory")
def _memory() -> list[Row]:
    """Forward and backward of 8,192 tokens take no more than their inputs, outputs and gradients again."""
    rows = []
    for decay in ("head", "channel"):
        call = _call(key_heads=16, lengths=(8192,), gap=0, decay=decay).inputs(torch.bfloat16)
        o, grad_o = torch.empty_like(call.v), torch.randn_like(call.v)
        inputs = [call.q, call.k, call.v, call.g, call.beta]
        grads = {
            f"d{n}": torch.empty_like(x)
            for n, x in zip(("q", "k", "v", "g", "beta"), inputs, strict=True)
            if x is not None
        }
        given = sum(x.nbytes for x in (*inputs, o, grad_o, *grads.values()) if x is not None)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        chunk.backward(grad_o, None, *call.arguments(), grads, **call.options)
        rows.append((f"{decay}: bytes / bytes of them", (torch.cuda.max_memory_allocated() - before) / given, 1.5))
    return rows


@_each("graph", (torch.float32, torch.bfloat16))
def _graph(dtype: torch.dtype) -> list[Row]:
    """Forward and backward are recorded, wait for nothing, and replay with other lengths."""
    most, few = ((200, 100), (7, 0)) if dtype is torch.float32 else ((2200,), (7,))
    call = _call(lengths=most).inputs(dtype)
    call.both(chunk)
    grad_o = torch.randn_like(call.v)

    def run(o: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        final = chunk.forward(*call.arguments(), o, **call.options)
        return final, chunk.backward(grad_o, None, *call.arguments(), {"dv": dv}, **call.options)

    o, dv = torch.zeros_like(call.v), torch.zeros_like(call.v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.graph(graph):
        final, dstate = run(o, dv)
    torch.cuda.set_sync_debug_mode("default")
    rows = []
    for lens in (most, few):
        call.lengths.copy_(torch.tensor(lens))
        o.zero_(), dv.zero_()
        graph.replay()
        o_want, dv_want = torch.zeros_like(o), torch.zeros_like(dv)
        want, dwant = run(o_want, dv_want)
        wrong = (final != want).sum() + (dstate != dwant).sum() + (dv != dv_want).sum() + (o != o_want).sum()
        rows.append((f"{lens}: numbers that differ", float(wrong), 0.0))
    return rows


@_each("not a number", ("head", "channel"))
def _not_a_number(decay: str) -> list[Row]:
    """A gate that is NaN, or above 0, leaves no finite number behind it in its head, and none of the kind in others."""
    rows = []
    for dtype, gate in itertools.product((torch.float32, torch.bfloat16), (math.nan, 0.5)):
        call = _call(**SHORT | {"key_heads": 2, "ratio": 1, "decay": decay}).inputs(dtype)
        begin, end = int(call.starts[0]), int(call.starts[0] + call.lengths[0])
        call.g[begin + 100, 0] = gate
        got = call.forward(chunk).tensors
        o, final = got["o"], got["final"]
        behind = o[begin + 100 : end, 0].isfinite().sum() + final[0, 0].isfinite().sum()
        other = (~o[begin:end, 1].isfinite()).sum() + (~final[1].isfinite()).sum() + (~final[0, 1].isfinite()).sum()
        rows.append((f"{dtype} {gate}: finite numbers behind it", float(behind), 0.0))
        rows.append((f"{dtype} {gate}: numbers of others that are not finite", float(other), 0.0))
    return rows


SMALL = (
    *(f"chunk {name}" for name in ("few tokens 5", "shape (16, 36)", "channel shape (16, 16)")),
    *(f"chunk {name}" for name in ("small gdn", "small kda", "small int8")),
)
"""Few tokens, every kernel: what a sanitizer, which is slow, is given."""

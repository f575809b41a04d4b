"""What the Triton decode kernel promises, checked on a GPU against float64 (semantics §8).

Each check returns rows `(what, measured, bound)`; one is broken where the measured number exceeds its bound or is NaN.
Needs nothing but torch and Triton, so that it runs on a bare machine: `python -m tests.gpu.run`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.kernels import decode
from lattn_compile.kernels.reference import decode as reference
from tests.gpu.checks import Checks, Row
from tests.kernels.codec_kernels import exponentials, qdq, tiles
from tests.kernels.decode_calls import Call, at_its_states, make_call

__all__ = ["CHECKS", "SMALL", "Row"]


DEVICE = "cuda"
MODEL: dict[str, Any] = {"key_heads": 2, "ratio": 2, "key_dim": 128, "value_dim": 128}
FORMATS = ("int8/*x16", "int8/*x32", "int8/*x64", "int8/*x*", "int8/16x16", "fp8", "fp8/*x1", "nvfp4", "bf16", "fp16")
# K = 1 is left out: the gradient of a normalised vector of one channel is nothing but rounding.
SHAPES = ((7, 8), (16, 36), (33, 12), (60, 100), (64, 64), (100, 60), (96, 80), (128, 256), (256, 128))
ODD = ((16, 1), (128, 5), (60, 33), (7, 6), (200, 3))  # threads that hold less than four columns
KINDS: dict[str, dict[str, Any]] = {
    "gdn": {},
    "kda": {"decay": "channel"},
    "delta": {"decay": None},
    "retention": {"rule": "additive", "beta": False, "qk_l2norm": False},
    "gla": {"rule": "additive", "beta": False, "qk_l2norm": False, "decay": "channel"},
    "linear": {"rule": "additive", "decay": None},
}

CHECKS = Checks()
_check, _each = CHECKS.check, CHECKS.each


def _call(**options: Any) -> Call:
    return make_call(**MODEL | options).to(DEVICE)


def _rows(errors: dict[str, float], bound: float, prefix: str = "") -> list[Row]:
    return [(prefix + name, error, bound) for name, error in errors.items()]


@_each("codec", (*FORMATS, "int8/4x4", "fp8/32x16", "fp8/*x*"))
def _codec(spec: str) -> list[Row]:
    """Bits of the torch codec, edge rules included; on the CPU, where it is the reference of every device."""
    rows = []
    for key_dim, value_dim in ((128, 128), (20, 24), (60, 100)):
        states = tiles(key_dim, value_dim)
        got, want = qdq(states.to(DEVICE), spec).cpu(), parse(spec).qdq(states)
        wrong = (got.view(torch.int32) != want.view(torch.int32)) & ~(got.isnan() & want.isnan())
        rows.append((f"{key_dim}x{value_dim} values that differ", float(wrong.sum()), 0.0))
    return rows


@_check("exp")
def _exponentials() -> list[Row]:
    x = torch.cat([-torch.logspace(-8, 2.02, 1 << 14), torch.tensor([0.0, -torch.inf])]).to(DEVICE)
    got, want = exponentials(x).double(), x.double().exp()
    units = (got - want).abs() / torch.exp2(want.log2().floor().clamp(min=-126) - 23)
    return [("units", float(units.max()), 1.0), ("units near 0", float(units[x > -0.1].max()), 0.6)]


@_each("one step", ("int8/*x16", "int8/*x32", "int8/*x64", "int8/*x*", "int8/16x16", "fp8"))
def _one_step(spec: str) -> list[Row]:
    """From one stored state: at most 1e-5 of the codes differ, by one; scales by two units of their last place."""
    call = _call(state_format=spec, key_heads=8, lengths=(1,) * 32)
    fmt = parse(spec)
    ours, theirs = (fmt.encode(call.forward(kernel).tensors["final"]) for kernel in (decode, reference))
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


@_each("kind", KINDS)
def _kind(kind: str) -> list[Row]:
    """Exact mode, ragged, NaN between sequences, from checkpoints and without: values and every gradient."""
    rows = []
    for lengths in ((5, 0, 37, 1), (70, 70)):
        call = _call(lengths=lengths, gap=2, **KINDS[kind])
        want = call.exact().both(reference, 16)
        rows += _rows(call.both(decode, 16).errors(want), 1e-5, f"{lengths} ")
        bare = {name: x for name, x in want.tensors.items() if name.startswith("d")}
        rows += _rows(call.backward(decode).errors(dataclasses.replace(want, tensors=bare)), 1e-5, f"{lengths} bare ")
    return rows


@_each("gradients", (*FORMATS, "fp8/*x*"))
def _gradients(spec: str) -> list[Row]:
    """Token mode: gradients of the float64 loop at the states that the kernel stored, over several stretches."""
    rows = []
    for readout in ("before_write", "after_write"):
        call = _call(lengths=(16, 16), state_format=spec, readout=readout)
        want = at_its_states(call, decode)
        marks = call.forward(decode, 5).tensors["checkpoints"]
        rows += _rows(call.backward(decode, marks, 5).errors(want), 1e-5, f"{readout} ")
    return rows


@_each("gradients int8 of", [kind for kind in KINDS if kind != "gdn"])
def _gradients_of(kind: str) -> list[Row]:
    call = _call(lengths=(16, 16), state_format="int8/*x32", **KINDS[kind])
    marks = call.forward(decode, 7).tensors["checkpoints"]
    return _rows(call.backward(decode, marks, 7).errors(at_its_states(call, decode)), 1e-5)


@_each("shape", (*SHAPES, *ODD))
def _shape(shape: tuple[int, int]) -> list[Row]:
    """Any K and V: exact values and gradients; int8 gradients at the stored states."""
    sizes = {"key_dim": shape[0], "value_dim": shape[1]}
    call = _call(lengths=(9, 0, 20), ratio=3, **sizes)
    rows = _rows(call.both(decode, 8).errors(call.exact().both(reference, 8)), 1e-5, "exact ")
    call = _call(lengths=(12, 12), state_format="int8", decay="channel", **sizes)
    marks = call.forward(decode, 5).tensors["checkpoints"]
    return rows + _rows(call.backward(decode, marks, 5).errors(at_its_states(call, decode)), 1e-5, "int8 ")


@_each("checkpoints", ("exact", *FORMATS, "int8/4x4"))
def _checkpoints(spec: str) -> list[Row]:
    """Rows of bytes are what torch would store, and gradients from them those from states, to the bit."""
    call = _call(lengths=(45, 0, 19), state_format=None if spec == "exact" else spec)
    rows, theirs = call.rows(16), call.rows(16)
    final = decode.forward(*call.arguments(), torch.empty_like(call.v), rows, 16, **call.options)
    want = call.forward(decode, 16).tensors
    back = call.backward(decode, rows, 16, longest=45)
    used = torch.tensor([0, 1, 2, 5, 6], device=DEVICE)
    theirs.index_copy_(0, used, want["checkpoints"][used])
    wrong = rows.index_select(0, used) != want["checkpoints"][used]
    bare = call.backward(decode, want["checkpoints"], 16, longest=45)
    return [
        ("values that differ", float(wrong.sum()), 0.0),
        ("bytes that differ", float((rows.buffer.nan_to_num() != theirs.buffer.nan_to_num()).sum()), 0.0),
        ("final state", float((final != want["final"]).sum()), 0.0),
        ("gradients that differ", float(len(bare.same_bits(back))), 0.0),
    ]


@_check("segments")
def _segments() -> list[Row]:
    """A training forward over sequences of one length is cut, and has the bits of one that is not; its checkpoints too,
    which nvfp4 then encodes in a kernel of their own."""
    rows: list[Row] = []
    for spec in ("exact", "int8/*x64", "nvfp4"):
        call = _call(lengths=(70, 70), gap=0, state_format=None if spec == "exact" else spec)
        o = torch.full_like(call.v, torch.nan)
        ours, theirs = call.rows(8), call.rows(8)
        final = decode.forward(*call.arguments(), o, ours, 8, **call.options)
        want = call.forward(decode, 8).tensors
        used = torch.tensor([*range(9), *range(9, 18)], device=DEVICE)
        theirs.index_copy_(0, used, want["checkpoints"][used])
        rows.append((f"{spec} o", float((o != want["o"]).sum()), 0.0))
        rows.append((f"{spec} final", float((final != want["final"]).sum()), 0.0))
        wrong = ours.buffer[used].nan_to_num() != theirs.buffer[used].nan_to_num()
        rows.append((f"{spec} bytes of checkpoints", float(wrong.sum()), 0.0))
    return rows


@_each("op", ("gdn exact", "gdn int8/*x32", "gdn int8/*x64", "gdn nvfp4", "gdn bf16", "kda exact", "kda int8/*x32"))
def _op(name: str) -> list[Row]:
    """What `lattn-compile bench` does before it times; leaves its kernels compiled."""
    from lattn_compile.bench import decode as bench

    return next(bench.prepare(case) for case in bench.CASES if case.name == name)


@_check("long exact runs")
def _long() -> list[Row]:
    rows = []
    for g in (None, -1e-3, -0.02, -2.0):
        call = _call(key_heads=1, lengths=(4096,), decay=None if g is None else "head")
        if call.g is not None and g is not None:
            call.g.fill_(g)
        bound = 5e-6 + 2.0**-24 * (4096 if g is None else min(4096, 1 / -g))
        errors = call.forward(decode).errors(call.exact().forward(reference))
        rows += _rows(errors, bound, f"g = {g} ")
    return rows


@_check("short free runs")
def _free() -> list[Row]:
    """16 tokens from one start: the distance to the float64 run is a small part of what quantization changes."""
    rows = []
    for spec in ("int8/*x32", "fp8", "nvfp4"):
        call = _call(lengths=(16,) * 8, state_format=spec)
        o = [c.forward(k).tensors["o"].double() for c, k in ((call, decode), (call.exact(), reference))]
        exact = call.exact().with_options(quantize=None).forward(reference).tensors["o"]
        live = ~exact.isnan()
        distance = (o[0] - o[1])[live].norm() / (exact - o[1])[live].norm()
        rows.append((spec, float(distance), 0.1))
    return rows


@_each("dtype", (torch.bfloat16, torch.float16))
def _dtype(dtype: torch.dtype) -> list[Row]:
    """At most twice the error of the torch reference on the same inputs, against float64 on them."""
    call = dataclasses.replace(_call(lengths=(64, 33), dtype=dtype))
    want = call.exact().both(reference, 16)
    ours, theirs = call.both(decode, 16).errors(want), call.both(reference, 16).errors(want)
    return [(name, ours[name], 2 * theirs[name] + 1e-6) for name in ours]


@_each("bits", ("exact", "int8/*x16", "int8/*x64", "fp8", "nvfp4"))
def _bits(spec: str) -> list[Row]:
    """One call of T tokens is T calls of one, a sequence is the same alone, and nothing differs between two runs."""
    call = _call(lengths=(24, 24, 24), state_format=None if spec == "exact" else spec)
    whole = call.forward(decode)
    states = call.tokenwise(decode)
    rows = [("final state by single tokens", float((whole.tensors["final"] != states[-1]).sum()), 0.0)]
    alone = dataclasses.replace(call, state=call.state[1:2], starts=call.starts[1:2], lengths=call.lengths[1:2])
    apart = alone.forward(decode).tensors
    inside = slice(int(call.starts[1]), int(call.starts[1]) + 24)
    rows.append(("final state alone", float((apart["final"] != whole.tensors["final"][1:2]).sum()), 0.0))
    rows.append(("outputs alone", float((apart["o"][inside] != whole.tensors["o"][inside]).sum()), 0.0))
    first, second = (call.both(decode, 10) for _ in range(2))
    rows.append(("tensors that differ between runs", float(len(first.same_bits(second))), 0.0))
    back, marks = alone.backward(decode), alone.forward(decode, 10).tensors["checkpoints"]
    small = alone.backward(decode, marks, 10)
    # Recomputed states are those of the forward: else codes would differ, and gradients by far more than this.
    return rows + _rows(small.errors(back), 2e-6, "other stretches ")


@_check("hostile")
def _hostile() -> list[Row]:
    rows: list[Row] = []
    for name, kind, change in _changes():
        call = _call(lengths=(40, 40), **kind)
        change(call)
        want = call.exact().both(reference, 16)
        rows += _rows(call.both(decode, 16).errors(want), 1e-5, f"{name} ")
    call = _call(lengths=(12, 12), state_format="int8")
    call.state[0, 0, 3, 5] = torch.nan
    final, want = (call.forward(kernel).tensors["final"] for kernel in (decode, reference))
    rows.append(("NaN stays where torch keeps it", float((final.isnan() != want.isnan()).sum()), 0.0))
    return rows


def _changes() -> Iterator[tuple[str, dict[str, Any], Callable[[Call], object]]]:
    def fill(name: str, value: float, every: int = 1) -> Callable[[Call], object]:
        return lambda call: getattr(call, name)[1::every].fill_(value)

    yield "reset", {}, fill("g", -math.inf, 3)
    yield "reset of channels", {"decay": "channel"}, lambda call: call.g[4::3, :, ::2].fill_(-math.inf)  # type: ignore[index]
    yield "strong decay", {}, fill("g", -90.0, 4)
    yield "zero keys", {}, fill("k", 0.0, 3)
    yield "beta 1.9", {}, fill("beta", 1.9)
    yield "masked", {}, lambda call: (fill("g", 0.0, 2)(call), fill("beta", 0.0, 2)(call))


@_check("strides")
def _strides() -> list[Row]:
    call = _call(lengths=(20, 11), state_format="int8/*x32", decay="channel")
    strided = call.map(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    wide = call.map(lambda x: torch.stack((x, x), -1)[..., 0])
    rows = []
    for name, other in (("transposed", strided), ("every second element", wide)):
        assert not other.q.is_contiguous()
        differ = call.both(decode, 8).same_bits(other.both(decode, 8))
        rows.append((f"{name}: tensors that differ", float(len(differ)), 0.0))
    ones = torch.ones((), device=DEVICE).expand(call.v.shape)
    grads = []
    for grad_o in (ones, ones.contiguous()):
        into = {"dv": torch.full_like(call.v, torch.nan)}
        decode.backward(grad_o, None, *call.arguments(), None, 0, into, **call.options)
        grads.append(into["dv"])
    rows.append(("expanded gradient", float((grads[0] != grads[1]).logical_and(~grads[0].isnan()).sum()), 0.0))
    return rows


@_check("graph")
def _graph() -> list[Row]:
    """Forward and backward are recorded, wait for nothing, and replay with other lengths."""
    call = _call(lengths=(30, 30), state_format="int8/*x32")
    call.both(decode, 16)
    lengths = call.lengths.clone()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    o = torch.zeros_like(call.v)
    grad_o = torch.randn_like(o)
    grads = {"dv": torch.zeros_like(o), "dq": torch.zeros_like(call.q)}
    with torch.cuda.graph(graph):
        marks = call.state.new_zeros(call.q.shape[0] // 16 + 2, *call.state.shape[1:])
        final = decode.forward(*call.arguments(), o, marks, 16, **call.options)
        dstate = decode.backward(grad_o, None, *call.arguments(), marks, 16, grads, **call.options)
    torch.cuda.set_sync_debug_mode("default")
    rows = []
    for lens in ((30, 30), (7, 0)):
        call.lengths.copy_(torch.tensor(lens))
        grads["dv"].zero_()
        graph.replay()
        again = {"dv": torch.zeros_like(o), "dq": torch.zeros_like(call.q)}
        out = torch.zeros_like(o)
        kept = torch.zeros_like(marks)
        want = decode.forward(*call.arguments(), out, kept, 16, **call.options)
        dwant = decode.backward(grad_o, None, *call.arguments(), kept, 16, again, **call.options)
        wrong = (final != want).sum() + (dstate != dwant).sum() + (grads["dv"] != again["dv"]).sum()
        rows.append((f"{lens}: numbers that differ", float(wrong), 0.0))
    call.lengths.copy_(lengths)
    return rows


@_check("far tokens")
def _far() -> list[Row]:
    """Offsets beyond 2^31: the last tokens of a buffer of 4 GB are those of a small one."""
    tokens, heads = (1 << 20) + 64, 16
    call = _call(key_heads=heads, ratio=1, lengths=(24,), gap=0, dtype=torch.bfloat16, state_format="int8/*x32")

    def tail(x: Tensor) -> Tensor:
        big = torch.zeros(tokens, *x.shape[1:], dtype=x.dtype, device=DEVICE)
        big[-24:] = x
        return big

    big = dataclasses.replace(
        call,
        **{n: tail(getattr(call, n)) for n in ("q", "k", "v", "g", "beta")},
        starts=torch.tensor([tokens - 24], device=DEVICE),
    )
    o = torch.zeros_like(big.v)
    final = decode.forward(*big.arguments(), o, None, 0, **big.options)
    want = call.forward(decode).tensors
    return [
        ("final", float((final != want["final"]).sum()), 0.0),
        ("o", float((o[-24:] != want["o"]).sum()), 0.0),
        ("tokens before", float(o[:-24].any()), 0.0),
    ]


@_each("memory", (None, "int8", "bf16", "nvfp4"))
def _memory(spec: str | None) -> list[Row]:
    """The ops on 4 x 4,096 tokens: forward and backward take no more than their inputs and outputs again."""
    import lattn_compile.ops  # noqa: F401 - registers them

    inputs = [torch.randn(4, 4096, 16, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    inputs.append(torch.randn(4, 4096, 32, 128, device=DEVICE, dtype=torch.bfloat16))
    inputs.append(-torch.rand(4, 4096, 32, device=DEVICE))
    inputs.append(torch.rand(4, 4096, 32, device=DEVICE, dtype=torch.bfloat16))
    options: dict[str, Any] = {"scale": 128**-0.5, "qk_l2norm": True, "checkpoint_every": 64}
    options |= {"write": "exact"} if spec is None else {"write": "token", "state_format": spec}
    absent = (None,) * 5
    grad_o = torch.randn_like(inputs[2])
    taken = []
    for measured in (False, True):  # the first time compiles
        if measured:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o, final, rows = torch.ops.lattn.decode(*inputs, *absent, **options)
        torch.cuda.synchronize()
        taken = [torch.cuda.max_memory_allocated() - before - o.nbytes]
        del final
        torch.cuda.reset_peak_memory_stats()
        grads = torch.ops.lattn.decode_backward(grad_o, None, *inputs, *absent, None, None, rows, **options)
        torch.cuda.synchronize()
        taken.append(torch.cuda.max_memory_allocated() - before - o.nbytes - sum(x.nbytes for x in grads))
        del grads, o, rows
    given = sum(x.nbytes for x in inputs) + inputs[2].nbytes
    return [
        (f"{name}: bytes beside them / bytes of them", n / given, 1.0)
        for name, n in zip(("forward", "backward"), taken, strict=True)
    ]


@_each("recorded op", ("exact", "int8", "nvfp4"))
def _recorded(spec: str) -> list[Row]:
    """Forward and backward of the op, ragged, in a CUDA graph: nothing is read on the host, other lengths replay."""
    import lattn_compile.ops  # noqa: F401 - registers them

    call = _call(lengths=(40, 40), gap=0, dtype=torch.bfloat16)
    inputs = [x.unflatten(0, (2, 40)) for x in (call.q, call.k, call.v, call.g, call.beta) if x is not None]
    counts = torch.tensor([40, 40], device=DEVICE, dtype=torch.int32)
    options: dict[str, Any] = {"scale": 0.1, "qk_l2norm": True, "checkpoint_every": 16}
    options |= {"write": "exact"} if spec == "exact" else {"write": "token", "state_format": spec}
    lengths = (None, None, counts, None)
    grad_o = torch.randn_like(inputs[2])

    def train(forward: Any, backward: Any) -> tuple[Tensor, ...]:
        o, final, rows = forward(*inputs, None, *lengths, **options)
        return (o, final, *backward(grad_o, final, *inputs, None, *lengths, None, None, rows, **options))

    train(torch.ops.lattn.decode, torch.ops.lattn.decode_backward)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(torch.ops.lattn.decode_recorded, torch.ops.lattn.decode_backward_recorded)
    torch.cuda.set_sync_debug_mode("default")
    found = []
    for lens in ((40, 40), (0, 17)):
        counts.copy_(torch.tensor(lens))
        graph.replay()
        want = train(torch.ops.lattn.decode, torch.ops.lattn.decode_backward)
        wrong = sum(float((a != b).sum()) for a, b in zip(got, want, strict=True))
        found.append((f"{lens}: numbers that differ", wrong, 0.0))
    return found


SMALL = (
    *(f"checkpoints {spec}" for spec in ("exact", "int8/*x64", "int8/16x16", "nvfp4", "bf16")),
    *(f"shape {shape}" for shape in ((7, 8), (60, 33), (16, 1))),
    "kind kda",
    "strides",
)
"""Few tokens, every kernel and every way to keep a state: what a sanitizer, which is slow, is given."""

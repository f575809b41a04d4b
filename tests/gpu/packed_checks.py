"""What the in-place Triton kernels promise, checked on a GPU (semantics §5 and §8).

Each check returns rows `(what, measured, bound)`; one is broken where the measured number exceeds its bound or is NaN.
Needs nothing but torch and Triton, so that it runs on a bare machine: `python -m tests.gpu.run --forms packed`.

Bits: a step in token or exact mode has those of the emulated Triton kernel from the same rows; several tokens in one
call those of one at a time; a sequence those that it has alone. Numbers: outputs, records and written states against
the reference in float64 from the same stored rows, codes by §8's share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.kernels import packed, packed_launch, packed_lines_call
from lattn_compile.policy import Exact, Policy, Replay, TwoPrecision
from tests.gpu.checks import Checks, Row
from tests.kernels.packed_calls import SCALE, Rows, Tokens, bits, differing, make_tokens

__all__ = ["CHECKS", "Row"]


DEVICE = "cuda"
MODEL: dict[str, Any] = {"key_heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128}
BOUND = 1e-5
SLOTS = [5, 0, 7, 2]
COUNT = 9

EXACT = Policy(write=Exact())
DECODE = {
    "exact": EXACT,
    "int8": Policy("int8"),
    "int8 after": Policy("int8", readout="after_write"),
    "int8/*x16": Policy("int8/*x16"),
    "int8/32x16": Policy("int8/32x16"),
    "int8/*x1": Policy("int8/*x1"),
    "fp8": Policy("fp8"),
    "fp8/128x1": Policy("fp8/128x1"),
    "nvfp4": Policy("nvfp4"),
    "bf16": Policy("bf16"),
    "fp16": Policy("fp16"),
}
WINDOWED = {
    "int8 8": Policy("int8", write=Replay(8)),
    "int8 10": Policy("int8", write=Replay(10)),
    "int8 4 after": Policy("int8", write=Replay(4), readout="after_write"),
    "int8/32x16 3": Policy("int8/32x16", write=Replay(3)),
    "fp8 8": Policy("fp8", write=Replay(8)),
    "nvfp4 16": Policy("nvfp4", write=Replay(16)),
    "bf16 2": Policy("bf16", write=Replay(2)),
    "two precision 16": Policy(write=TwoPrecision(16)),
    "two precision 10": Policy(write=TwoPrecision(10)),
    "two precision 4 bf16": Policy(write=TwoPrecision(4, read="int8", anchor="bf16")),
}
KINDS = ("gdn", "kda", "delta", "gla", "linear", "retention")
SIZES = ((60, 64, 2, 2), (64, 128, 1, 3), (128, 33, 2, 2), (128, 256, 1, 2), (256, 64, 1, 1), (17, 5, 1, 2))
"""K, V, H, HV."""

CHECKS = Checks()
_check, _each = CHECKS.check, CHECKS.each


def _tokens(kind: str, tokens: int, seed: int, *, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Tokens:
    sizes = {name: more.pop(name, MODEL[name]) for name in MODEL}
    return make_tokens(kind, tokens, more.pop("slots", SLOTS), seed=seed, **sizes, **more).in_dtype(dtype).to(DEVICE)


def _rows(policy: Policy, kind: str, like: Tokens) -> Rows:
    return Rows(policy, kind, like, COUNT, device=DEVICE)


def _same(what: str, a: dict[str, Tensor], b: dict[str, Tensor]) -> Row:
    return what, float(len(differing(a, b))), 0.0


def _equal(what: str, a: Tensor, b: Tensor) -> Row:
    return what, float((bits(a) != bits(b)).sum()), 0.0


# -- bits of the emulated kernel -------------------------------------------------------------------------------------


def _bits(policy: Policy, kind: str, **more: Any) -> list[Row]:
    """One token, then three of ragged sequences, from slots full of NaN."""
    found: list[Row] = []
    rows: Rows | None = None
    for seed, (tokens, lengths) in enumerate([(1, None), (3, [3, 0, 2, 1]), (1, None)]):
        x = _tokens(kind, tokens, seed, lengths=lengths, **more)
        rows = rows or _rows(policy, kind, x)
        want_o, want, _ = rows.emulated(x, "triton")
        before, free = rows.records(x.slots), rows.records(torch.tensor([1, 3, 4, 6, 8], device=DEVICE))
        o = rows.step(x, "triton")
        got = rows.records(x.slots)
        found.append(_equal(f"call {seed} outputs", o, want_o))
        for i in range(len(SLOTS)):
            expected = before if lengths is not None and lengths[i] == 0 else want
            found.append(
                _same(
                    f"call {seed} slot {i}", {n: y[i] for n, y in got.items()}, {n: y[i] for n, y in expected.items()}
                )
            )
        found.append(_same(f"call {seed} free slots", free, rows.records(torch.tensor([1, 3, 4, 6, 8], device=DEVICE))))
    assert rows is not None
    cursor = [0 if slot in SLOTS else -1 for slot in range(COUNT)]
    return [*found, ("cursor", float(rows.cursor.tolist() != cursor), 0.0)]


@_each("bits gdn", DECODE)
def _bits_gdn(name: str) -> list[Row]:
    return _bits(DECODE[name], "gdn")


@_each("bits int8", KINDS[1:])
def _bits_kinds(kind: str) -> list[Row]:
    return _bits(DECODE["int8"], kind)


@_check("bits kda exact", "exact")
@_check("bits kda fp8", "fp8")
@_check("bits kda nvfp4", "nvfp4")
def _bits_kda(name: str) -> list[Row]:
    return _bits(DECODE[name], "kda")


@_each("bits fp32 inputs", ("exact", "int8"))
def _bits_inputs(name: str) -> list[Row]:
    return _bits(DECODE[name], "gdn", dtype=torch.float32)


@_each("bits hostile", ("int8", "fp8", "nvfp4"))
def _bits_hostile(name: str) -> list[Row]:
    """Columns from 2^-120 to 2^120, then some that are no numbers; and every step that an int8 code may have."""
    found: list[Row] = []
    rows: Rows | None = None
    for seed in range(4):
        x = _tokens("gdn", 1, seed, dtype=torch.float32)
        v = x.x[2]
        column = torch.arange(v.shape[-1], device=DEVICE)
        v.mul_(torch.exp2((column * 37 % 241 - 120).float()))
        if seed == 2:
            v[0, ..., 3], v[1, ..., 70], v[2, ..., 5] = torch.nan, torch.inf, -torch.inf
        rows = rows or _rows(DECODE[name], "gdn", x)
        if name == "int8" and seed == 1:
            steps = rows.tensors["state_scale"]
            mantissa = torch.arange(steps.numel(), device=DEVICE) % 512 + 65024
            steps.copy_((mantissa * 2.0**-20).float().view(steps.shape))
        want_o, want, _ = rows.emulated(x, "triton")
        if name == "nvfp4":  # an emulated state does not say what zeros were encoded as
            single, fast = rows.copy(), packed._fast
            packed._fast = lambda *_: 0
            single.step(x, "triton")
            packed._fast, want = fast, single.records(x.slots)
        o = rows.step(x, "triton")
        own = want_o.isnan() == o.isnan()
        found.append((f"call {seed} where outputs are NaN", float((~own).sum()), 0.0))
        found.append(_equal(f"call {seed} outputs", o.nan_to_num(7.0), want_o.nan_to_num(7.0)))
        found.append(_same(f"call {seed} rows", rows.records(x.slots), want))
    return found


@_each("value first", ["exact", "int8", "fp8", "int8/32x16", "nvfp4", "bf16", "int8 8", "two precision 16"])
def _value_first(name: str) -> list[Row]:
    """Codes as `[slots, HV, V, K]`: the bits of those as `[slots, HV, K, V]`, in one token, several, and a flush."""
    policy = DECODE[name] if name in DECODE else WINDOWED[name]
    found: list[Row] = []
    both: list[Rows] = []
    for seed, (tokens, lengths) in enumerate([(1, None), (3, [3, 0, 2, 1]), (19, None), (1, None)]):
        x = _tokens("gdn", tokens, seed, lengths=lengths)
        both = both or [Rows(policy, "gdn", x, COUNT, device=DEVICE, v_first=turned) for turned in (False, True)]
        o = [rows.step(x, "triton") for rows in both]
        found.append(_equal(f"call {seed} outputs", *o))
        found.append(_same(f"call {seed} rows", *(rows.records(x.slots) for rows in both)))
        if name in WINDOWED and tokens == 19:
            for rows in both:
                rows.flush(x.slots, "triton")
            found.append(_same("flushed", *(rows.records(x.slots) for rows in both)))
    return found


# -- float64 ---------------------------------------------------------------------------------------------------------


def _error(a: Tensor, b: Tensor) -> float:
    norm = float(b.double().norm())
    return float((a.double() - b.double()).norm()) / norm if norm else float(a.double().norm())


def _apart(ours: Tensor, theirs: Tensor, fp8: bool) -> Tensor:
    """How many codes lie between 8-bit codes."""
    codes = [x.view(torch.int8).to(torch.int32) for x in (ours, theirs)]
    if fp8:  # sign and magnitude to a line
        codes = [torch.where(x < 0, -(x & 127), x) for x in codes]
    return (codes[0] - codes[1]).abs()


def _against_float64(policy: Policy, kind: str, plan: Any, **more: Any) -> list[Row]:
    """Every token from the kernel's own stored rows: outputs and records within 1e-5, codes by one.

    Tokens of one call are stepped singly here, because a code that float64 rounds the other way moves what comes after
    it; the call of all of them has the bits of that.
    """
    found: list[Row] = []
    rows: Rows | None = None
    flipped, codes, farthest = 0, 0, 0
    for seed, (tokens, lengths) in enumerate(plan):
        x = _tokens(kind, tokens, seed, lengths=lengths, dtype=torch.float32, **more)
        rows = rows or _rows(policy, kind, x)
        whole, o = rows.copy(), []
        for t in range(tokens):
            one = x if tokens == 1 else x.at(t, x.lengths)
            what = f"call {seed} token {t}"
            oracle = rows.copy(torch.float64)
            want = oracle.step(one.in_dtype(torch.float64), "reference")
            o.append(rows.step(one, "triton"))
            found.append((f"{what} outputs", _error(o[-1], want), BOUND))
            found.append((f"{what} cursors", float((rows.cursor != oracle.cursor).sum()), 0.0))
            theirs = oracle.records(one.slots)
            for name, y in rows.records(one.slots).items():
                stored = rows.cursor[one.slots.long()] >= 0
                if y.dtype.itemsize > 1:
                    bound = 4e-3 if y.dtype is torch.bfloat16 else BOUND
                    ring = name.startswith("ring_")
                    a, b = (z if ring else z[stored] for z in (y, theirs[name]))
                    found.append((f"{what} {name}", _error(a, b) if a.numel() else 0.0, bound))
                elif name.endswith("codes") and policy.state.name != "nvfp4":
                    apart = _apart(y, theirs[name], y.dtype is torch.float8_e4m3fn)[stored]
                    flipped, codes = flipped + int((apart > 0).sum()), codes + apart.numel()
                    farthest = max(farthest, int(apart.max()) if apart.numel() else 0)
        if tokens > 1:
            found.append(_equal(f"call {seed} at once", whole.step(x, "triton"), torch.cat(o, 1)))
            found.append(_same(f"call {seed} rows", whole.records(x.slots), rows.records(x.slots)))
    if codes:
        # A share needs numbers to be a share of: a single flip is one code.
        found += [("codes that differ", float(flipped), max(1.0, 1e-5 * codes)), ("codes apart", float(farthest), 1.0)]
    return found


PLAN = [(1, None)] * 5 + [(6, [6, 0, 3, 5]), (1, None)]


@_each("oracle gdn", [*WINDOWED, "exact", "int8", "fp8"])
def _oracle_gdn(name: str) -> list[Row]:
    return _against_float64(DECODE[name] if name in DECODE else WINDOWED[name], "gdn", PLAN)


@_each("oracle int8 8", KINDS[1:])
def _oracle_kinds(kind: str) -> list[Row]:
    return _against_float64(WINDOWED["int8 8"], kind, PLAN)


@_check("oracle kda two precision", "two precision 16")
@_check("oracle kda fp8 8", "fp8 8")
def _oracle_kda(name: str) -> list[Row]:
    return _against_float64(WINDOWED[name], "kda", PLAN)


@_each("sizes", SIZES)
def _sizes(size: tuple[int, int, int, int]) -> list[Row]:
    """Heads and channels that fill no tile; one policy of each kernel."""
    K, V, H, HV = size
    own = {"key_dim": K, "value_dim": V, "key_heads": H, "value_heads": HV}
    found = _bits(DECODE["int8"], "gdn", **own)
    return found + _against_float64(WINDOWED["int8/32x16 3"], "kda", [(1, None), (4, [4, 0, 3, 1])], **own)


# -- promises of a call ----------------------------------------------------------------------------------------------


@_each("one by one", ["int8", "nvfp4", "int8 8", "two precision 16"])
def _one_by_one(name: str) -> list[Row]:
    """T calls of one token = one call of T, ragged; then a flush on the device and by the reference."""
    policy = DECODE[name] if name in DECODE else WINDOWED[name]
    lengths = [19, 0, 7, 18]
    x = _tokens("gdn", 19, 0, lengths=lengths)
    whole = _rows(policy, "gdn", x)
    cut = whole.copy()
    o = whole.step(x, "triton")
    ones = [cut.step(x.at(t, torch.tensor(lengths, device=DEVICE)), "triton") for t in range(19)]
    found = [_equal("outputs", o, torch.cat(ones, 1)), _same("rows", whole.records(x.slots), cut.records(x.slots))]
    if name in WINDOWED:
        oracle = whole.copy(torch.float64)
        oracle.flush(x.slots, "reference")
        whole.flush(x.slots, "triton")
        found.append(("cursors", float((whole.cursor != oracle.cursor).sum()), 0.0))
        if "codes" in whole.tensors and whole.tensors["codes"].dtype is torch.float32:
            own = x.slots[x.lengths > 0]
            error = _error(whole.records(own)["codes"], oracle.records(own)["codes"])
            found.append(("flushed anchor", error, BOUND))
    return found


@_each("any batch", ["exact", "int8", "nvfp4", "int8 8", "two precision 16"])
def _any_batch(name: str) -> list[Row]:
    """A sequence alone and among 300 others, under every row of the launch table."""
    policy = DECODE[name] if name in DECODE else WINDOWED[name]
    many = list(range(300))
    plan = [
        make_tokens("gdn", 1, many, seed=seed, **MODEL).in_dtype(torch.bfloat16).to(DEVICE)
        for seed in range(18 if name in WINDOWED else 1)  # a whole window and more
    ]
    x = plan[0]
    found: list[Row] = []
    first: tuple[Tensor, dict[str, Tensor]] | None = None
    before = dict(packed_launch.CHOSEN)
    for row in packed_launch.LAUNCHES:
        packed_launch.CHOSEN.update(dict.fromkeys(packed_launch.CHOSEN, (row,) * 3))
        for mine in (slice(0, 300), slice(7, 8)):
            rows = Rows(policy, "gdn", x, 300, device=DEVICE)
            o = [
                rows.step(dataclasses.replace(y, x=[t[mine] for t in y.x], slots=y.slots[mine]), "triton")[
                    7 - mine.start
                ]
                for y in plan
            ]
            got = torch.stack(o), {n: y[7:8] for n, y in rows.tensors.items() if not n.startswith("ring_")}
            first = first or got
            found += [_equal(f"{row} outputs", got[0], first[0]), _same(f"{row} rows", got[1], first[1])]
    packed_launch.CHOSEN.update(before)
    return found


def _kernel(rows: Rows, x: Tokens, padding_slot: int = -1, **more: Any) -> Tensor:
    call = rows.call
    quantize = None if call.write == "exact" else Quantizer(parse(call.state_format))
    return packed.step(
        *x.x, rows.tensors, rows.cursor, x.slots, x.has, x.ends, x.lengths, rule=rows.rule, scale=SCALE, qk_l2norm=True,
        padding_slot=padding_slot, write=call.write, readout=call.readout, quantize=quantize, window=call.window,
        anchor=call.anchor, **more,
    )  # fmt: skip


@_each("whole heads", ["int8 gdn", "int8 kda", "int8 linear", "fp8 gdn"])
def _whole_heads(name: str) -> list[Row]:
    """Several key heads a program, three value heads of each, from shared memory (`packed_token_cuda.py`), whole and in
    halves: the bits of columns in registers, also of tiles that are no number, of slots without a state and of
    sequences without a token."""
    spec, kind = name.split()
    sizes = {"key_heads": 4, "value_heads": 12, "slots": [5, 0, -1, 7, 2]}
    chosen, programs = dict(packed_launch.CHOSEN), packed_launch.FULL
    packed_launch.FULL = dict.fromkeys(packed_launch.FULL, 1)
    found: list[Row] = []
    every: list[Rows] = []
    for seed in range(4):
        lengths = [1, 0, 1, 1, 1] if seed == 1 else None
        x = _tokens(kind, 1, seed, lengths=lengths, has=[True, seed != 2, True, True, True], **sizes)
        if seed == 2:
            x.x[2][0, ..., 3], x.x[2][3, ..., 70] = torch.nan, torch.inf
        every = every or [_rows(DECODE[spec], kind, x) for _ in range(3)]
        o, kept = [], []
        for rows, row in zip(every, ("wide 2 early", "heads", "half heads"), strict=True):
            packed_launch.CHOSEN.update(dict.fromkeys(packed_launch.CHOSEN, (row,) * 3))
            o.append(_kernel(rows, x).nan_to_num(7.0))
            kept.append(rows.records(x.slots[[0, 1, 3, 4]]))
        for i, row in ((1, "heads"), (2, "half heads")):
            found.append(_equal(f"{row}, call {seed}: outputs", o[i], o[0]))
            found.append(_same(f"{row}, call {seed}: rows", kept[i], kept[0]))
            found.append(_equal(f"{row}, call {seed}: cursors", every[i].cursor, every[0].cursor))
    packed_launch.CHOSEN.update(chosen)
    packed_launch.FULL = programs
    return found


@_each("slots", ["exact", "int8", "int8 8", "two precision 16"])
def _slots(name: str) -> list[Row]:
    """Padding (as often as one likes), fresh sequences, a slot that there is not, NaN for padding's inputs, a last row
    of tokens that is nobody's, no tokens at all."""
    policy = DECODE[name] if name in DECODE else WINDOWED[name]
    x = _tokens("gdn", 2, 0, slots=[8, 2, -1, 40, 8, 6], has=[False] * 6)
    x.x[2][0] = torch.nan
    rows = _rows(policy, "gdn", x)
    rows.cursor.fill_(1)
    others = torch.tensor([0, 1, 3, 4, 5, 7, 8], device=DEVICE)
    before = rows.records(others)
    o = _kernel(rows, x, 8)
    found = [
        ("padding is zero", float(o[[0, 2, 4]].count_nonzero()), 0.0),
        ("no such slot is NaN", float((~o[3].isnan()).sum()), 0.0),
        _same("other slots", before, rows.records(others)),
        ("fresh is finite", float((~o[[1, 5]].isfinite()).sum()), 0.0),
    ]
    own = _rows(policy, "gdn", x)
    alone = dataclasses.replace(x, x=[t[5:6] for t in x.x], slots=x.slots[5:6], has=None)
    found.append(_equal("fresh is a start at zero", _kernel(own, alone), o[5:6]))
    line = _tokens("gdn", 0, 1, slots=[1, 3, 0], lengths=[2, 0, 1], packed=True)
    many = _rows(policy, "gdn", line)
    o = _kernel(many, line)
    found += [("nobody's row", float(o[0, 3].count_nonzero()), 0.0), ("others", float(o[0, :3].isnan().sum()), 0.0)]
    state = many.copy()
    _kernel(many, dataclasses.replace(line, x=[t[:, :0] for t in line.x]))
    return [*found, _same("no tokens", state.tensors, many.tensors)]


@_each("fresh", ["int8", "int8 8", "two precision 16"])
def _fresh(name: str) -> list[Row]:
    """Sequences that start at zero in slots full of others and read what their own call stored, over windows' ends."""
    policy = DECODE[name] if name in DECODE else WINDOWED[name]
    x = _tokens("gdn", 40, 0)
    clean, used = _rows(policy, "gdn", x), _rows(policy, "gdn", x)
    _kernel(used, _tokens("gdn", 5, 1))
    want, got = (
        _kernel(clean, x),
        _kernel(used, dataclasses.replace(x, has=torch.zeros_like(x.slots, dtype=torch.bool))),
    )
    return [_equal("o", got, want), _same("rows", clean.records(x.slots), used.records(x.slots))]


@_each("unaligned", ["int8", "fp8", "nvfp4", "int8 8"])
def _unaligned(name: str) -> list[Row]:
    """Codes that begin one byte into a buffer have the bits of others."""
    policy = DECODE[name] if name in DECODE else WINDOWED[name]
    x = _tokens("gdn", 1, 0)
    plain, odd = _rows(policy, "gdn", x), _rows(policy, "gdn", x)
    codes = odd.tensors["codes"]
    buffer = torch.zeros(codes.numel() + 1, dtype=torch.uint8, device=DEVICE)
    odd.tensors["codes"] = buffer[1:].view(codes.dtype).view(codes.shape)
    found = []
    for seed in range(18):
        x = _tokens("gdn", 1, seed)
        found.append(_equal(f"o {seed}", _kernel(odd, x), _kernel(plain, x)))
    return [*found, _same("rows", plain.records(x.slots), odd.records(x.slots))]


@_each("recorded", ["exact", "int8", "int8 8", "two precision 16"])
def _recorded(name: str) -> list[Row]:
    """A CUDA graph of one step, replayed over flushes, with other slots than it was recorded with."""
    policy = DECODE[name] if name in DECODE else WINDOWED[name]
    x = _tokens("gdn", 1, 0)
    warm = _rows(policy, "gdn", x)
    _kernel(warm, x)
    rows = _rows(policy, "gdn", x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        o = _kernel(rows, x)
    rows.cursor.fill_(-1)
    plain = rows.copy()
    x.slots.copy_(torch.tensor([3, 8, 1, 6]))
    found: list[Row] = []
    for seed in range(18):
        fresh = _tokens("gdn", 1, seed)
        for into, y in zip(x.x, fresh.x, strict=True):
            into.copy_(y)
        graph.replay()
        found.append(_equal(f"outputs {seed}", o, _kernel(plain, x)))
    return [*found, _same("rows", rows.tensors, plain.tensors), _equal("cursors", rows.cursor, plain.cursor)]


@_each("reduce overhead", ["int8", "int8 8", "two precision 16"])
def _reduce_overhead(name: str) -> list[Row]:
    """`torch.compile(mode="reduce-overhead")` of a step records it, and replays do what calls do."""
    from torch._dynamo.utils import counters

    import lattn_compile as lc

    policy = dataclasses.replace(DECODE[name] if name in DECODE else WINDOWED[name], kernel="triton")
    x = _tokens("gdn", 1, 0)
    eager, compiled = (lc.QuantizedState(policy) for _ in range(2))
    for state in (eager, compiled):
        state.step(*x.x, use_qk_l2norm_in_kernel=True)
    for y in compiled.held().values():
        torch._dynamo.mark_static_address(y)
    before = dict(counters["inductor"])

    def step(tokens: list[Tensor]) -> Tensor:
        return compiled.step(*tokens, use_qk_l2norm_in_kernel=True) * 2.0

    recorded = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    found: list[Row] = []
    with torch.no_grad():
        for seed in range(20):
            fresh = _tokens("gdn", 1, seed)
            want = eager.step(*fresh.x, use_qk_l2norm_in_kernel=True) * 2.0
            torch.compiler.cudagraph_mark_step_begin()
            found.append(_equal(f"outputs {seed}", recorded(fresh.x).clone(), want))
    skipped = counters["inductor"]["cudagraph_skips"] - before.get("cudagraph_skips", 0)
    manager = torch._inductor.cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    graphs = 0 if manager is None else len(list(manager.get_roots()))
    return [
        *found,
        _same("rows", eager.held(), compiled.held()),
        ("graphs skipped", float(skipped), 0.0),
        ("no graph recorded", float(graphs == 0), 0.0),
    ]


@_each("hostile", ["int8", "int8 8", "two precision 16"])
def _hostile(name: str) -> list[Row]:
    """A decay of 0, a strength of 0, a zero key, one key repeated with beta 1.9; and a NaN stays in its own tiles."""
    policy = DECODE[name] if name in DECODE else WINDOWED[name]
    plan = [_tokens("gdn", 1, seed, dtype=torch.float32) for seed in range(9)]
    for i, x in enumerate(plan):
        _, k, _, g, beta = x.x
        g[0] = -0.01
        g[1] = -torch.inf if i % 3 == 1 else g[1]
        beta[0], beta[2] = 1.9, 0.0
        k[0] = plan[0].x[1][0]
        if i % 3 == 0:
            k[3] = 0.0
    rows = _rows(policy, "gdn", plan[0])
    found: list[Row] = []
    for i, x in enumerate(plan):
        oracle = rows.copy(torch.float64)
        want = oracle.step(x.in_dtype(torch.float64), "reference")
        got = rows.step(x, "triton")
        for n in range(len(SLOTS)):
            found.append((f"call {i} sequence {n}", _error(got[n], want[n]), BOUND))
    ill = _tokens("gdn", 1, 9, dtype=torch.float32)
    ill.x[2][1, 0, -1, -1] = torch.nan
    other = rows.copy()
    clean = dataclasses.replace(ill, x=[t.clone() for t in ill.x])
    clean.x[2][1, 0, -1, -1] = 0.0
    sick, well = rows.step(ill, "triton"), other.step(clean, "triton")
    mine = torch.zeros_like(sick, dtype=torch.bool)
    mine[1, 0, -1, -1] = True
    return [
        *found,
        ("NaN is seen", float((~sick[mine].isnan()).sum()), 0.0),
        ("and nowhere else", float((bits(sick[~mine]) != bits(well[~mine])).sum()), 0.0),
    ]


# -- pools so large that other kernels step them ---------------------------------------------------------------------


def _large(check: Callable[[str], list[Row]], name: str) -> list[Row]:
    """A check of kernels for small pools, of those for large ones."""
    before, fits, taken = packed_lines_call.STATES, packed_lines_call.fits, list[bool]()

    def seen(*args: Any, **kwargs: Any) -> bool:
        taken.append(fits(*args, **kwargs))
        return taken[-1]

    packed_lines_call.STATES, packed_lines_call.fits = 1, seen
    try:
        found = check(name)
    finally:
        packed_lines_call.STATES, packed_lines_call.fits = before, fits
    return [*found, ("steps of other kernels", float(not taken) + taken.count(False), 0.0)]


_OF_LARGE_POOLS: dict[str, tuple[Callable[[str], list[Row]], tuple[str, ...]]] = {
    "oracle": (_oracle_gdn, ("int8 8", "int8 10", "fp8 8", "two precision 10", "two precision 16")),
    "oracle int8 8": (_oracle_kinds, ("delta", "linear", "retention")),
    "one by one": (_one_by_one, ("int8 8", "two precision 16")),
    "any batch": (_any_batch, ("int8 8", "two precision 16")),
    "slots": (_slots, ("int8 8", "two precision 16")),
    "fresh": (_fresh, ("int8 8", "two precision 16")),
    "value first": (_value_first, ("int8 8", "two precision 16")),
    "unaligned": (_unaligned, ("int8 8",)),
    "recorded": (_recorded, ("int8 8", "two precision 16")),
    "hostile": (_hostile, ("int8 8", "two precision 16")),
}
for _of, (_small, _names) in _OF_LARGE_POOLS.items():
    for _name in _names:
        _check(f"large pool {_of} {_name}", _small, _name)(_large)


@_each("raw gates", ["gdn", "kda"])
def _raw_gates(kind: str) -> list[Row]:
    """An engine's packed projection as it comes: slices for q, k and v, gates before their activations."""
    from lattn_compile.recurrence import gates

    x = _tokens(kind, 1, 0, dtype=torch.float32)
    H, HV, K = MODEL["key_heads"], MODEL["value_heads"], MODEL["key_dim"]
    shape = x.x[3].shape
    raw, a_log, bias, raw_beta = (torch.randn(s, device=DEVICE) for s in (shape, (HV,), shape[2:], shape[:3]))
    line = torch.cat([y.flatten(2) for y in x.x[:3]], -1)
    q, k, v = (y.unflatten(2, (-1, K)) for y in line.split([H * K, H * K, HV * K], 2))
    found: list[Row] = []
    for bound in (None, -5.0):
        g = gates.softplus_gate(raw, a_log, bias) if bound is None else gates.lower_bound_gate(raw, a_log, bound, bias)
        given = dataclasses.replace(x, x=[q, k, v, g, gates.write_strength(raw_beta, allow_neg_eigval=True)])
        rows = _rows(EXACT, kind, x)
        oracle = rows.copy(torch.float64)
        want = oracle.step(given.in_dtype(torch.float64), "reference")
        own = packed.RawGates(a_log, bias, bound, raw_beta=True, beta_scale=2.0)
        got = _kernel(rows, dataclasses.replace(x, x=[q, k, v, raw, raw_beta]), gates=own)
        found.append((f"bound {bound}", _error(got, want), BOUND))
    return found

"""`packed_token.py`'s step where heads of 8-bit codes pass through shared memory: from sm_90 on, by Triton's Gluon.

A head's codes are 128 lines of 128 bytes. The copy engine (TMA) brings them to shared memory while the heads before are
computed, so that what is on its way takes neither registers nor instructions, and takes the new codes from there back.
A program does some heads of one sequence one after the other. What else they need is read at its beginning, at once:
in the loop over heads the assembler puts loads off until registers are free, and then everything waits for them.

A thread holds four neighbouring columns, a word of codes, as four tensors, and 32 channels of each: sums over channels
take two exchanges between lanes. They run in the order of `common/pieces.py`: channel `lane * 16 + piece * 2 + step` is
place `[piece, step, lane]` of a tensor `[8, 2, 8, words]`; so stored states have the bits that the other kernels make.
"""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lattn_compile.formats.fp8_e4m3.triton import LARGEST as FP8_LARGEST
from lattn_compile.formats.int8.triton import LARGEST as INT8_LARGEST
from lattn_compile.kernels.common.codec import scales as scales_of
from lattn_compile.kernels.common.inputs import exp, no_less, rstd
from lattn_compile.kernels.common.packed_gates import decay_of, gates_of, strength_of
from lattn_compile.kernels.common.packed_rows import begin, has_state, slot_of
from lattn_compile.kernels.common.packed_tiles import FP8_NUMBERS, INT8_NUMBERS, INT8_OFFSET, INT8_STEPS
from lattn_compile.kernels.packed_fetch import likely_slot
from lattn_compile.kernels.packed_write import FP8_BYTES, INT8_BYTES

__all__ = ["WARPS", "rows_of", "token_step_cuda"]

WARPS = {"whole": 4, "half": 2}


def rows_of(codes: Tensor, form: str) -> TensorDescriptor:
    """Codes `[slots, HV, 128, 128]`, contiguous bytes, as `token_step_cuda` takes them."""
    words = codes.view(torch.int32)
    heads = words.shape[0] * words.shape[1]
    n = 16 if form == "half" else 32
    layout = gl.NVMMASharedLayout(4 * n, 32, rank=4)
    return TensorDescriptor(words, [heads, 16, 8, 32], [4096, 32, 512, 1], [1, 16, 8, n], layout)


@gluon.constexpr_function
def _layout(form, what):
    """How a state lies in threads, as FORM says: "state", `[8, 2, 8, words]`; its "words" as they lie in shared memory,
    `[1, 16, 8, words]`; a vector of its "channels" there, `[8, 16]`, or of its "columns", for all threads
    that need it."""
    lanes = ((0, 0, 1), (0, 0, 2), (0, 0, 4), (0, 1, 0), (0, 2, 0))
    registers = ((1, 0, 0), (2, 0, 0), (4, 0, 0), (8, 0, 0), (0, 4, 0))
    parts = (registers, lanes, ((0, 0, 8),) if form == "half" else ((0, 0, 8), (0, 0, 16)))
    bases = []
    for part in parts:
        if what == "state":
            bases.append([[channel // 2, channel % 2, lane, word] for channel, lane, word in part])
        elif what == "words":
            bases.append([[0, channel, lane, word] for channel, lane, word in part])
        elif what == "channels":
            bases.append([[lane, channel] for channel, lane, _ in part])
        else:
            bases.append([[4 * word] for channel, lane, word in part if channel + lane == 0 or part is not registers])
    if what == "columns":
        bases[0] = [[1], [2]]
    words = 16 if form == "half" else 32
    shape = {"state": [8, 2, 8, words], "words": [1, 16, 8, words], "channels": [8, 16], "columns": [4 * words]}[
        str(what)
    ]
    return gl.DistributedLinearLayout(bases[0], bases[1], bases[2], [], shape)


@gluon.jit
def _steps_of(words, step, shift):
    """Four codes of each word times a step; `shift` as INT8_STEPS has it."""
    return gl.inline_asm_elementwise(
        INT8_STEPS,
        "=&f,=&f,=&f,=&f,r,f,f",
        [words, step, shift],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _numbers_of(words, step, known, FORMAT: gl.constexpr):
    """The same by two operations a code; zeros where `known`, a scalar, is not: what lies there may be NaN."""
    a, b, c, d = gl.inline_asm_elementwise(
        INT8_NUMBERS if FORMAT == "int8" else FP8_NUMBERS,
        "=&f,=&f,=&f,=&f,r,r",
        [words, gl.where(known, -1, 0)],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    return a * step, b * step, c * step, d * step


@gluon.jit
def _bytes(a, b, c, d, keep, ASM: gl.constexpr):
    """Words of four codes, of scaled values; 0 where `keep` is."""
    return gl.inline_asm_elementwise(ASM, "=r,f,f,f,f,r", [a, b, c, d, keep], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _onto(total, s, x, then, then_s, then_x):
    return gl.fma(then_s, then_x, total), then_s, then_x


@gluon.jit
def _dot(S, x):
    """`S^T x`, `[words]`, of one of four columns of each word; x `[8, 2, 8]`."""
    x = gl.broadcast(x[:, :, :, None], S)[0]
    # Chains of fused multiply-adds; of the products only the first is used.
    total, _, _ = gl.reduce((S * x, S, x), 0, _onto)
    return gl.sum(gl.sum(total, 0), 0)


@gluon.jit
def _wide(x):
    """Of words, `[words]`, as something that broadcasts against a state."""
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 0), 0), 0)


@gluon.jit
def _magnitude(S):
    return gl.reduce(gl.reduce(gl.abs(S), 0, no_less), 0, no_less)


@gluon.jit
def _channels(buffer, at, FORM: gl.constexpr, L: gl.constexpr):
    """A vector of 128 channels, stored `[lane, place]`, as `[8, 2, 8]`."""
    x = buffer.index(at).load(_layout(FORM, "channels"))
    x = gl.permute(gl.reshape(x, (8, 8, 2)), (1, 2, 0))
    return gl.convert_layout(x, gl.SliceLayout(3, L))


@gluon.jit
def _key_heads(p, apart, KEYS: gl.constexpr):
    """128 numbers of each of KEYS heads. A row lies in a thread and its neighbours as in `common.inputs.pair_up`, so
    that sums run in the same order."""
    PER: gl.constexpr = 16 // (p.dtype.element_ty.primitive_bitwidth // 8)
    LINE: gl.constexpr = gl.BlockedLayout([1, PER], [PER // 4, 128 // PER], [gl.num_warps(), 1], [1, 0])
    head = gl.arange(0, KEYS, gl.SliceLayout(1, LINE))[:, None]
    channel = gl.arange(0, 128, gl.SliceLayout(0, LINE))[None, :]
    return gl.load(p + head * apart + channel)


@gluon.jit
def _pair_up(b_q, b_k, scale, queries, keys, dots, KEYS: gl.constexpr, NORM: gl.constexpr):
    """KEYS heads' queries and keys, normalised, and their products, into shared memory."""
    b_q = b_q.to(gl.float32)
    b_k = b_k.to(gl.float32)
    if NORM:
        b_q = b_q * rstd(gl.sum(b_q * b_q, 1))[:, None]
        b_k = b_k * rstd(gl.sum(b_k * b_k, 1))[:, None]
    b_q = b_q * scale
    queries._reinterpret(gl.float32, [KEYS * 8, 16], queries.layout).store(gl.reshape(b_q, (KEYS * 8, 16)))
    keys._reinterpret(gl.float32, [KEYS * 8, 16], keys.layout).store(gl.reshape(b_k, (KEYS * 8, 16)))
    dots._reinterpret(gl.float32, [KEYS], dots.layout).store(gl.sum(b_k * b_q, 1))


@gluon.jit
def _bring(p):
    """Has lines brought to the L2 cache, and waits for nothing."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _copy(rows, row, word, bar, target, inside):
    mbarrier.expect(bar, target.type.shape[3] * 512, pred=inside)
    tma.async_copy_global_to_shared(rows, [row, 0, 0, word], bar, target, pred=inside)


@gluon.jit
def _scalar(buffer, at):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(buffer.index(at).load(one), 0)


@gluon.jit
def _columns(buffer, at, FORM: gl.constexpr, N: gl.constexpr, COLUMN: gl.constexpr):
    """A vector of columns in shared memory: every fourth of them, four times."""
    x = gl.reshape(buffer.index(at).load(_layout(FORM, "columns")), (N, 2, 2))
    even, odd = gl.split(x)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    a, b = gl.convert_layout(a, COLUMN), gl.convert_layout(b, COLUMN)
    return a, b, gl.convert_layout(c, COLUMN), gl.convert_layout(d, COLUMN)


@gluon.jit
def _rows(p, apart, along, COUNT: gl.constexpr, HEADS: gl.constexpr):
    """128 numbers of each of COUNT heads, in HEADS rows; and which head and number stand where."""
    PER: gl.constexpr = 16 // (p.dtype.element_ty.primitive_bitwidth // 8)
    LINE: gl.constexpr = gl.BlockedLayout([1, PER], [PER // 4, 128 // PER], [gl.num_warps(), 1], [1, 0])
    row = gl.minimum(gl.arange(0, HEADS, gl.SliceLayout(1, LINE)), COUNT - 1)[:, None]
    at = gl.arange(0, 128, gl.SliceLayout(0, LINE))[None, :]
    return gl.load(p + row * apart + at * along), row, at


@gluon.jit(do_not_specialize=["slots", "padding"])
def token_step_cuda(
    rows,
    codes,
    q,
    k,
    v,
    g,
    beta,
    scales,
    cursor,
    indices,
    fresh,
    lengths,
    o,
    a_log,
    bias,
    scale,
    bound,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    v_column,
    g_token,
    g_head,
    beta_token,
    beta_head,
    slots,
    padding,
    H: gl.constexpr,
    HV: gl.constexpr,
    KEYS: gl.constexpr,
    HEADS: gl.constexpr,
    FORM: gl.constexpr,
    NORM: gl.constexpr,
    DELTA: gl.constexpr,
    DECAY: gl.constexpr,
    GATE: gl.constexpr,
    SIGMOID: gl.constexpr,
    FORMAT: gl.constexpr,
    PDL: gl.constexpr,
):
    """A step of one token of every sequence, in place; arguments as `packed_decode.step` has them.

    Args:
        rows: the codes as words, seen as `[slots * HV, 16, 8, 32]`: channel `lane * 16 + place` is `[place, lane]`.
        codes: the same, as bytes. KEYS: key heads of a program, a power of two. HEADS: the power of two next to the
            number of their value heads. FORM: a tile is a "whole" head, over four warps, or "half" of one, over two:
            more programs, whose warps wait for each other less. A thread has 32 channels of a word either way.

    Grid: (H / KEYS * N,).
    """
    W: gl.constexpr = gl.num_warps()
    STAGES: gl.constexpr = 4  # tiles in shared memory: one that is computed, others that come or go
    L: gl.constexpr = _layout(FORM, "state")
    WORDS: gl.constexpr = _layout(FORM, "words")
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, L)))
    RATIO: gl.constexpr = HV // H
    N: gl.constexpr = 16 if FORM == "half" else 32  # words of a tile
    SPLIT: gl.constexpr = 32 // N
    COUNT: gl.constexpr = KEYS * RATIO * SPLIT
    PROGRAMS: gl.constexpr = H // KEYS
    i = gl.program_id(0)
    i_seq = i // PROGRAMS
    first_key = i % PROGRAMS * KEYS
    first = first_key * RATIO
    buffer = gl.allocate_shared_memory(
        gl.int32, [STAGES, 1, 16, 8, N], gl.NVMMASharedLayout(4 * N, 32, rank=4)
    )  # fmt: skip
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    if PDL:
        # The kernel before may still write what is read here: then a wrong head comes into the cache, and no harm.
        guess = likely_slot(i_seq, indices, slots)
        line = gl.arange(0, 128, gl.BlockedLayout([1], [32], [W], [0])) * 128
        for near in gl.static_range(min(STAGES - 1, COUNT) // SPLIT):
            _bring(codes + (guess * HV + first + near) * 16384 + line)
        _bring(scales + (guess * HV + first) * 2)
        _bring(cursor + guess)
        begin()
    slot, live, wrong = slot_of(i_seq, indices, padding, slots)
    token = i_seq.to(gl.int64)
    # All that the slot has no part in is asked for beside it, and before the codes, behind which it would wait.
    LINEAR: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    given_q = _key_heads(q + token * q_token + first_key * q_head, q_head, KEYS)
    given_k = _key_heads(k + token * k_token + first_key * k_head, k_head, KEYS)
    given_v, _, _ = _rows(v + token * v_token + first * v_head, v_head, v_column, KEYS * RATIO, HEADS)
    mine = first + gl.arange(0, HEADS, LINEAR)
    if beta is not None:
        given_beta = gl.load(beta + token * beta_token + mine * beta_head, mask=mine < HV, other=0.0)
    if DECAY == 1:
        given_g = gl.load(g + token * g_token + mine * g_head, mask=mine < HV, other=0.0)
    if DECAY == 2:
        given_g, own, channel = _rows(g + token * g_token + first * g_head, g_head, 1, KEYS * RATIO, HEADS)
    if lengths is not None:
        live = live & (gl.load(lengths + i_seq) > 0)
    has = has_state(i_seq, fresh)
    word = gl.arange(0, N, COLUMN)
    p_o = o + token * (HV * 128) + word * 4
    if not live:
        blank = gl.full([N], 0.0, gl.float32, COLUMN) + gl.where(wrong, float("nan"), 0.0)
        blank = blank.to(o.dtype.element_ty)
        for n in range(COUNT):
            for c in gl.static_range(4):
                gl.store(p_o + first * 128 + n * (4 * N) + c, blank)
        return

    at = gl.load(cursor + slot)
    stored = has & (at >= 0)
    p_scales = scales + slot * (HV * 2)
    place = gl.arange(0, 2 * HEADS, LINEAR)
    given_steps = gl.load(p_scales + first * 2 + place, mask=place < 2 * KEYS * RATIO, other=0.0)
    row = (slot * HV).to(gl.int32) + first
    for s in gl.static_range(STAGES - 1):
        _copy(rows, row + s // SPLIT, s % SPLIT * N, bars.index(s), buffer.index(s), s < COUNT)

    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 4, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.float32, [KEYS, 8, 16], VECTOR)
    keys = gl.allocate_shared_memory(gl.float32, [KEYS, 8, 16], VECTOR)
    dots = gl.allocate_shared_memory(gl.float32, [KEYS, 1], FLAT)
    if q_token >= 0:  # always so, which the assembler does not know: it would put the copies behind these sums
        _pair_up(given_q, given_k, scale, queries, keys, dots, KEYS, NORM)

    # Numbers of the program's heads: scales, write strengths and, of GDN, decays.
    steps = gl.allocate_shared_memory(gl.float32, [2 * HEADS, 1], FLAT)
    steps._reinterpret(gl.float32, [2 * HEADS], FLAT).store(gl.where(stored, given_steps, 0.0))
    strengths = steps
    if beta is not None:
        strengths = gl.allocate_shared_memory(gl.float32, [HEADS, 1], FLAT)
        strengths._reinterpret(gl.float32, [HEADS], FLAT).store(strength_of(given_beta, SIGMOID))
    decays = steps
    if DECAY == 1:
        decays = gl.allocate_shared_memory(gl.float32, [HEADS, 1], FLAT)
        given_g = decay_of(given_g, a_log, bias, bound, gl.minimum(mine, HV - 1), GATE)
        decays._reinterpret(gl.float32, [HEADS], FLAT).store(exp(given_g))
    if DECAY == 2:
        decays = gl.allocate_shared_memory(gl.float32, [HEADS, 8, 16], VECTOR)
        given_g = given_g.to(gl.float32)
        if GATE:
            given_g = gates_of(given_g, bias, a_log, bound, first + own, channel, 128, GATE)
        decays._reinterpret(gl.float32, [HEADS * 8, 16], VECTOR).store(gl.reshape(exp(given_g), (HEADS * 8, 16)))
    values = gl.allocate_shared_memory(v.dtype.element_ty, [HEADS * SPLIT, 4 * N], FLAT)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    values._reinterpret(v.dtype.element_ty, [HEADS, 128], PLAIN).store(given_v)
    SCALES: gl.constexpr = N // 16
    most = gl.allocate_shared_memory(gl.int32, [SCALES, W // SCALES], FLAT)
    for n in range(COUNT):
        head = first + n // SPLIT
        side = n % SPLIT
        stage = n % STAGES
        b_k = _channels(keys, n // (RATIO * SPLIT), FORM, L)
        b_q = _channels(queries, n // (RATIO * SPLIT), FORM, L)
        dot_kq = _scalar(dots, n // (RATIO * SPLIT))
        step_0 = _scalar(steps, n * SCALES)
        step_1 = step_0
        if SCALES == 2:
            step_1 = _scalar(steps, n * 2 + 1)
        step = _wide(gl.where(word < 16, step_0, step_1))
        u0, u1, u2, u3 = _columns(values, n, FORM, N, COLUMN)
        u0, u1, u2, u3 = u0.to(gl.float32), u1.to(gl.float32), u2.to(gl.float32), u3.to(gl.float32)
        mbarrier.wait(bars.index(stage), n // STAGES % 2)
        words = gl.reshape(buffer.index(stage).load(WORDS), (8, 2, 8, N))
        words = gl.convert_layout(words, L, assert_trivial=True)
        if FORMAT == "int8":
            # All steps but the odd ones of the last 256 in a binade, see `packed_tiles.decoded_words`.
            exact_0 = gl.fma(step_0, INT8_OFFSET, step_0 * -INT8_OFFSET) == 0.0
            exact_1 = gl.fma(step_1, INT8_OFFSET, step_1 * -INT8_OFFSET) == 0.0
            if exact_0 & exact_1:
                a, b, c, d = _steps_of(words, step, step * -INT8_OFFSET)
            else:
                a, b, c, d = _numbers_of(words, step, stored, FORMAT)
        else:
            a, b, c, d = _numbers_of(words, step, stored, FORMAT)
        if DECAY == 1:
            decay = _scalar(decays, n // SPLIT)
            a, b, c, d = a * decay, b * decay, c * decay, d * decay
        if DECAY == 2:
            by = _channels(decays, n // SPLIT, FORM, L)[:, :, :, None]
            a, b, c, d = a * by, b * by, c * by, d * by
        if DELTA:
            u0, u1, u2, u3 = u0 - _dot(a, b_k), u1 - _dot(b, b_k), u2 - _dot(c, b_k), u3 - _dot(d, b_k)
        # Of the state before the update, so that both sums run side by side.
        r0, r1, r2, r3 = _dot(a, b_q), _dot(b, b_q), _dot(c, b_q), _dot(d, b_q)
        if beta is not None:
            strength = _scalar(strengths, n // SPLIT)
            u0, u1, u2, u3 = strength * u0, strength * u1, strength * u2, strength * u3
        p = p_o + head * 128 + side * 64
        gl.store(p, gl.fma(u0, dot_kq, r0).to(o.dtype.element_ty))
        gl.store(p + 1, gl.fma(u1, dot_kq, r1).to(o.dtype.element_ty))
        gl.store(p + 2, gl.fma(u2, dot_kq, r2).to(o.dtype.element_ty))
        gl.store(p + 3, gl.fma(u3, dot_kq, r3).to(o.dtype.element_ty))
        over = b_k[:, :, :, None]
        a, b = gl.fma(over, _wide(u0), a), gl.fma(over, _wide(u1), b)
        c, d = gl.fma(over, _wide(u2), c), gl.fma(over, _wide(u3), d)

        # Codes and scales.
        m = no_less(no_less(_magnitude(a), _magnitude(b)), no_less(_magnitude(c), _magnitude(d)))
        m = gl.reshape(m.to(gl.int32, bitcast=True), (8, W, N // W))
        m = gl.reshape(gl.permute(m, (1, 0, 2)), (W, 8 * N // W))
        most._reinterpret(gl.int32, [W], FLAT).store(gl.max(m, 1))
        ALL: gl.constexpr = gl.BlockedLayout([W // SCALES], [32], [W], [0])
        most_0 = gl.max(most.index(0).load(ALL), 0)
        most_1 = gl.max(most.index(SCALES - 1).load(ALL), 0)
        LARGEST: gl.constexpr = INT8_LARGEST if FORMAT == "int8" else FP8_LARGEST
        step, inverse, zero = scales_of(gl.where(word < 16, most_0, most_1), LARGEST, True)
        gl.store(p_scales + head * 2 + side + word // 16, step, mask=word % 16 == 0)
        keep = _wide(gl.where(step == step, -1, 0))
        inverse, zero = _wide(inverse), _wide(zero)
        a, b = gl.fma(a, inverse, zero), gl.fma(b, inverse, zero)
        c, d = gl.fma(c, inverse, zero), gl.fma(d, inverse, zero)
        words = _bytes(a, b, c, d, keep, INT8_BYTES if FORMAT == "int8" else FP8_BYTES)
        words = gl.convert_layout(gl.reshape(words, (1, 16, 8, N)), WORDS, assert_trivial=True)
        buffer.index(stage).store(words)
        fence_async_shared()
        tma.async_copy_shared_to_global(rows, [row + n // SPLIT, 0, 0, n % SPLIT * N], buffer.index(stage))
        # What the head before was written back from makes room.
        tma.store_wait(1)
        ahead = n + (STAGES - 1)
        _copy(
            rows, row + ahead // SPLIT, ahead % SPLIT * N, bars.index(ahead % STAGES), buffer.index(ahead % STAGES),
            ahead < COUNT,
        )  # fmt: skip
    tma.store_wait(0)
    if at < 0:  # noqa: SIM102 - an atomic belongs into one branch only
        # Every program has to find a cursor of a slot without a state before it says that there is one. So each takes
        # one off, and who finds that all others have writes it.
        if gl.atomic_add(cursor + slot, -1, sem="relaxed") == -PROGRAMS:
            gl.store(cursor + slot, 0)

"""What a chunk's tokens see of each other under a decay by channel, of rounded keys and queries: sites `kk` and `qk`.

As `reference/prefill_pairs.py` has it,

    overlaps[i, j] = k_i . (w(j -> i) k_j)   for j <  i
    reads[i, j]    = q_i . (w(j -> i) k_j)   for j <= i

The decay is inside: 16 rows meet each earlier 16 tokens at the rows' start, rounded there. Among themselves they are
exact, and meet in the middle of the 16, of 8, of 4 and of 2 (`chunk_levels.py`). And with these, since weights are
there, what queries have as operands of the products with the state and with V':

    Q e^G                      the left operand of qs
    reads                      that of av

Sums of gates are products with matrices of zeros and ones: they leave weights in the registers where the next product
and a row's largest magnitude want them, while sums along tokens, one after the other, took a third of all instructions.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from lattn_compile.kernels.chunk_math import (
    block_tokens,
    exp2,
    fine_parts,
    fine_product,
    gate_exp,
    held,
    load_beta,
    load_rows,
    operand,
    product,
    summed,
)
from lattn_compile.kernels.chunk_pairs import halves, parted
from lattn_compile.kernels.common.inputs import rstd
from lattn_compile.kernels.prefill_codec import flipped_parts, lanes, site, site_product, store_site

__all__ = ["DOWN", "SUB_BLOCK", "gate_parts", "norm_of", "pairs_of_channels", "rows", "weight_of"]

SUB_BLOCK = tl.constexpr(16)
_UP = tl.constexpr(1.4426950408889634 * 2.0**7)  # to powers of two, and away from fp16's subnormal numbers
DOWN = tl.constexpr(2.0**-7)


@triton.jit
def norm_of(x, NORM: tl.constexpr):
    """What rows `x` are multiplied with: 1 where they stay as they are."""
    if NORM:
        x = x.to(tl.float32)
        return rstd(tl.sum(x * x, 1))
    else:
        return tl.full([x.shape[0]], 1.0, tl.float32)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def rows(
    q, k, beta, starts, lengths, offsets, owner, index, norms, strengths, skip, q_token, q_head, q_channel, k_token,
    k_head, k_channel, beta_token, beta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """What a chunk's rows have by themselves.

    Args:
        norms: fp32 `[NB, H, 2, BT]`: what k is multiplied with, and q. strengths: fp32 `[NB, HV, BT]`: beta.

    Grid: (NB * H,).
    """
    pid = tl.program_id(0)
    block, i_key = pid // H, pid % H
    if tl.load(owner + block) < 0:
        return
    at, slot = pid.to(tl.int64), tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    b_k = load_rows(k, token * k_token + i_key * k_head, inside, 0, k_channel, K, BK)
    b_q = load_rows(q, token * q_token + i_key * q_head, inside, 0, q_channel, K, BK)
    tl.store(norms + at * (2 * BT) + slot, norm_of(b_k, NORM))
    tl.store(norms + at * (2 * BT) + BT + slot, norm_of(b_q, NORM))
    for ratio in range(HV // H):
        i_head = i_key * (HV // H) + ratio
        b_beta = load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA)
        tl.store(strengths + (block.to(tl.int64) * HV + i_head) * BT + slot, b_beta)


@triton.jit
def gate_parts(g, LOW: tl.constexpr):
    """Held gates `[16, channels]` as an operand of `weight_of`."""
    if LOW and not is_hip():
        return fine_parts(g * _UP)
    else:
        return (g,)


@triton.jit
def weight_of(which, gates, LOW: tl.constexpr):
    """`exp(which @ g)`, which of zeros and ones `[16, 16]`: below 2^-126 zero, one instruction a number.

    A product leaves it in the registers where sites are rounded and the next product wants them, and no lane gives
    a sum of gates to another.
    """
    if LOW and not is_hip():
        zeros = tl.zeros([which.shape[0], gates[0].shape[1]], tl.float32)
        total = fine_product(((which * DOWN).to(tl.float16),), gates, zeros)
        return exp2(total)
    else:
        return gate_exp(summed(which, gates[0], LOW, False), LOW)


@triton.jit
def _parted(P, A, q, k, gates, half, DELTA: tl.constexpr, LOW: tl.constexpr):
    """Adds to a tile's `P` and `A` the pairs that the middle of 2 `half` rows parts."""
    SIZE: tl.constexpr = q.shape[0]
    i = tl.arange(0, SIZE)
    apart = parted(i[:, None], i[None, :], half)
    weight = weight_of(halves(half, SIZE), gates, LOW)
    o_k = operand(k.to(tl.float32) * weight, LOW)
    P += tl.where(apart, product(operand(q.to(tl.float32) * weight, LOW), flipped_parts(o_k)), 0.0)
    if DELTA:
        A += tl.where(apart, product(o_k, flipped_parts(o_k)), 0.0)
    return P, A


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def pairs_of_channels(
    q, k, g, starts, lengths, offsets, owner, index, norms, overlaps, reads, from_start, to_end, ends, whole,
    query, query_scale, seen, seen_scale, late_scale, read_scale, key_scale, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, DELTA: tl.constexpr, LOW: tl.constexpr,
    KK: tl.constexpr, QK: tl.constexpr, QS: tl.constexpr, AV: tl.constexpr,
):  # fmt: skip
    """Args:
        q, k: `[M, H, K]`, g: `[M, HV, K]`, any strides. norms: of `rows`.
        reads: fp32 `[NB, HV, BT, BT]`; overlaps likewise, without beta, zero on and above its diagonal; None unless
            DELTA. KK, QK, QS, AV: the sites' formats. BS: channels at a time, of pairs of the same 16.
        from_start: fp32 `[NB, HV, BT, BK]`, K e^G. to_end: likewise, keys decayed to the end of their 16 tokens; ends:
            fp32 `[NB, HV, 2, BT / 16, BK]`, the decay of 16 tokens, and from there to the chunk's end. whole: fp32
            `[NB, HV, BK]`, the chunk's.
        query: `[NB, HV, parts, BT, BK]`, query_scale: fp32 `[NB, HV, BT]`, Q e^G as the left operand of qs.
        seen: `[NB, HV, parts, BT, BT]`, seen_scale likewise, reads as that of av.
        late_scale: for a backward fp32 `[NB, HV, 2, BT]`, factors of rows of k and of q; read_scale, key_scale:
            `[NB, HV, BT / 16, BT]`, those of columns at the start of each 16 rows, at qk and at kk, one tensor where
            these are of one format. Else None.

    Grid: (NB * HV,), of one warp: all sums over channels stay in it.
    """
    SIZE: tl.constexpr = SUB_BLOCK
    TILES: tl.constexpr = BT // SIZE
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, i_key = pid.to(tl.int64), i_head // (HV // H)
    p_q, p_k, p_g = q + i_key * q_head, k + i_key * k_head, g + i_head * g_head
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT)
    i, channel = tl.arange(0, SIZE), tl.arange(0, BK)
    row, column = i[:, None], i[None, :]
    p_ends = ends + at * (2 * TILES * BK) + channel
    p_seen = reads + at * (BT * BT)
    upto = tl.where(column <= row, 1.0, 0.0)
    before = tl.full([BK], 1.0, tl.float32)
    for tile in range(TILES):
        slot = tile * SIZE + i
        token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
        k_norm, q_norm = tl.load(p_norm + slot)[:, None], tl.load(p_norm + BT + slot)[:, None]
        p_reads = p_seen + slot[:, None] * BT + column
        p_overlaps = p_reads
        if DELTA:
            p_overlaps = overlaps + at * (BT * BT) + slot[:, None] * BT + column

        # Of its own 16, every pair is parted by one middle. A token and itself are not parted.
        P = tl.zeros([SIZE, SIZE], tl.float32)
        A = tl.zeros([SIZE, SIZE], tl.float32)
        for first in range(0, BK, BS):
            s_q = load_rows(p_q, token * q_token, inside, first, q_channel, K, BS)
            s_k = load_rows(p_k, token * k_token, inside, first, k_channel, K, BS)
            gates = gate_parts(held(load_rows(p_g, token * g_token, inside, first, g_channel, K, BS)), LOW)
            alone = product(operand(s_q, LOW), flipped_parts(operand(s_k, LOW)))
            P += tl.where(row == column, alone, 0.0)
            for step in range(4):  # unrolled, it would want more registers
                P, A = _parted(P, A, s_q, s_k, gates, SIZE // 2 >> step, DELTA, LOW)
        e_norm = tl.load(p_norm + slot)[None, :]
        tl.store(p_reads + tile * SIZE, P * (q_norm * e_norm))
        if DELTA:
            tl.store(p_overlaps + tile * SIZE, A * (k_norm * e_norm))

        gates = gate_parts(held(load_rows(p_g, token * g_token, inside, 0, g_channel, K, BK)), LOW)
        p_channel = (at * BT + slot[:, None]) * BK + channel[None, :]
        b_k = load_rows(p_k, token * k_token, inside, 0, k_channel, K, BK).to(tl.float32) * k_norm
        tl.store(to_end + p_channel, b_k * weight_of(1.0 - upto, gates, LOW))
        later = weight_of(upto, gates, LOW)
        tl.store(p_ends[None, :] + (tile * BK + 0 * row), later, mask=row == SIZE - 1)
        b_k = b_k * later
        tl.store(from_start + p_channel, b_k * before[None, :])
        o_k, k_scale = site(b_k, 1, KK, LOW)
        b_q = load_rows(p_q, token * q_token, inside, 0, q_channel, K, BK).to(tl.float32) * q_norm * later
        o_q, scale = site(b_q * before[None, :], 1, QS, LOW)
        store_site(query, at, slot[:, None] * BK + channel[None, :], lanes(o_q, query), BT * BK)
        tl.store(query_scale + at * BT + slot, scale)
        o_q, q_scale = site(b_q, 1, QK, LOW)
        if late_scale is not None:
            tl.store(late_scale + at * (2 * BT) + slot, k_scale)
            tl.store(late_scale + at * (2 * BT) + BT + slot, q_scale)

        # Earlier ones, at this one's start.
        between = tl.full([BK], 1.0, tl.float32)
        for back in range(1, tile + 1):
            other = tile - back
            at_j = other * SIZE + i
            e_k = tl.load(to_end + (at * BT + at_j[:, None]) * BK + channel[None, :]) * between[None, :]
            between *= tl.load(p_ends + other * BK)
            o_early, e_scale = site(e_k, 1, QK, LOW)
            if read_scale is not None:
                tl.store(read_scale + (at * TILES + tile) * BT + at_j, e_scale)
            P = site_product(o_q, flipped_parts(o_early)) * (q_scale[:, None] * e_scale[None, :])
            tl.store(p_reads + other * SIZE, P)
            if DELTA:
                if KK != QK:
                    o_early, e_scale = site(e_k, 1, KK, LOW)
                    if key_scale is not None:
                        tl.store(key_scale + (at * TILES + tile) * BT + at_j, e_scale)
                A = site_product(o_k, flipped_parts(o_early)) * (k_scale[:, None] * e_scale[None, :])
                tl.store(p_overlaps + other * SIZE, A)
        for other in range(tile + 1, TILES):
            tl.store(p_reads + other * SIZE, tl.zeros([SIZE, SIZE], tl.float32))
            if DELTA:
                tl.store(p_overlaps + other * SIZE, tl.zeros([SIZE, SIZE], tl.float32))
        tl.debug_barrier()  # what was stored is what other threads load
        before *= tl.load(p_ends + tile * BK)
        place = slot[:, None] * BT + tl.arange(0, BT)[None, :]
        o_P, scale = site(tl.load(p_seen + place), 1, AV, LOW)
        store_site(seen, at, place, lanes(o_P, seen), BT * BT)
        tl.store(seen_scale + at * BT + slot, scale)
    tl.store(whole + at * BK + channel, before)
    behind = tl.full([BK], 1.0, tl.float32)
    for back in range(TILES):
        tile = TILES - 1 - back
        tl.store(p_ends + (TILES + tile) * BK, behind)
        behind *= tl.load(p_ends + tile * BK)

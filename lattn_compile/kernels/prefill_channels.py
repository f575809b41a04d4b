"""Of a decay by channel: what pairs of tokens of a chunk make of the gradients of q, k and g.

As `prefill_pairs.py` computes them: among 16 tokens level by level, as in `chunk_levels.py`, exact, and between 16 rows
and each earlier 16 tokens at the rows' start, with their operands as the forward rounded them. A program has some
channels of a chunk, which is all that gradients of channels want of each other once the forward has told the factors of
rows, and goes from the last 16 tokens to the first: what later rows made of these as columns is in memory by then.

All transposed, channels first: what a product leaves in its registers is where the next one wants it on its left side,
and on the right stand matrices of 16 x 16.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from lattn_compile.kernels.chunk_math import (
    block_tokens,
    exact_operand,
    exp2,
    fine_product,
    gate_exp,
    held,
    load_rows,
    operand,
    product,
)
from lattn_compile.kernels.chunk_pairs import halves
from lattn_compile.kernels.common.inputs import no_more
from lattn_compile.kernels.prefill_codec import site_again, site_product
from lattn_compile.kernels.prefill_pairs import DOWN, SUB_BLOCK, gate_parts

__all__ = ["grad_channels"]


@triton.jit
def _weights(gates, which, LOW: tl.constexpr):
    """`weight_of`, transposed: which `[16, 16]`, gates `[channels, 16]`."""
    if LOW and not is_hip():
        zeros = tl.zeros([gates[0].shape[0], which.shape[1]], tl.float32)
        return exp2(fine_product(gates, ((which * DOWN).to(tl.float16),), zeros))
    else:
        return gate_exp(no_more(product(operand(gates[0], LOW), exact_operand(which)), 0.0), LOW)


@triton.jit
def _sums(x, which, LOW: tl.constexpr):
    """`x @ which`, which of zeros and ones: gradients of exponents to those of the gates that they are sums of."""
    return product(operand(x, LOW), exact_operand(which))


@triton.jit
def _level(dq, dk, total, D1, D2, k, q, gates, half, DELTA: tl.constexpr, LOW: tl.constexpr):
    """Adds to gradients of q, k and g those of the pairs that the middle of 2 `half` tokens parts.

    Of two such tokens the earlier one sees the later one's query and key, and that one the earlier one's key: with
    symmetric matrices one product gives what both get of it.
    """
    SIZE: tl.constexpr = D1.shape[0]
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    late = (j & half) != 0
    apart = ((i ^ j) >= half) & ((i ^ j) < 2 * half)
    which = halves(half, SIZE)
    weight = _weights(gates, tl.trans(which), LOW)
    shown = tl.where(late, q, k)
    seen = product(operand(shown * weight, LOW), operand(tl.where(apart, D1, 0.0), LOW)) * weight
    dq += tl.where(late, seen, 0.0)
    dk += tl.where(late, 0.0, seen)
    exponent = seen * shown
    if DELTA:
        seen = product(operand(k * weight, LOW), operand(tl.where(apart, D2, 0.0), LOW)) * weight
        dk += seen
        exponent += seen * k
    return dq, dk, total + _sums(exponent, which, LOW)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def grad_channels(
    q, k, g, starts, lengths, offsets, owner, index, norms, to_end, ends, late_scale, read_scale, key_scale,
    dreads, doverlaps, dkeys, dgates, after, passed, dg, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel,
    dg_token, dg_head, dg_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, LOW: tl.constexpr, KK: tl.constexpr, QK: tl.constexpr,
):  # fmt: skip
    """Adds to `dkeys`, and to `dgates` for what it writes to `dg`, `[M, HV, K]`; both of `grad_keys`.

    Args:
        norms: of `rows`; to_end, ends, late_scale, read_scale, key_scale: of `pairs_of_channels`.
        dreads, doverlaps: of the kernels before.
        after: memory, fp32 `[NB, HV, BT, BK]`: what later rows make of each column, but for its own decay.
        passed: memory, fp32 `[NB, HV, BT / 16, BT / 16, BK]`: what the columns of one 16 and the rows of a later one,
            in this order, make of each gate of the tokens between them.
        BS: channels of a program.

    Grid: (NB * HV * BK / BS,), of one warp.
    """
    SIZE: tl.constexpr = SUB_BLOCK
    TILES: tl.constexpr = BT // SIZE
    SLICES: tl.constexpr = BK // BS
    first, pid = tl.program_id(0) % SLICES * BS, tl.program_id(0) // SLICES
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    at, i, channel = pid.to(tl.int64), tl.arange(0, SIZE), first + tl.arange(0, BS)
    row, column = i[:, None], i[None, :]
    p_q, p_k, p_g = q + i_key * q_head, k + i_key * k_head, g + i_head * g_head
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT)
    p_late, p_read, p_key = late_scale + at * (2 * BT), read_scale + at * (TILES * BT), key_scale
    p_reads, p_overlaps = dreads + at * (BT * BT), doverlaps
    if DELTA:
        p_overlaps = doverlaps + at * (BT * BT)
        p_key = key_scale + at * (TILES * BT)
    p_channel = at * (BT * BK) + channel[:, None]
    p_passed = passed + at * (TILES * TILES * BK) + channel
    for last in range(TILES):
        tile = TILES - 1 - last
        slot = tile * SIZE + i
        token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
        b_q = tl.trans(load_rows(p_q, token * q_token, inside, first, q_channel, K, BS)).to(tl.float32)
        b_k = tl.trans(load_rows(p_k, token * k_token, inside, first, k_channel, K, BS)).to(tl.float32)
        gates = gate_parts(held(tl.trans(load_rows(p_g, token * g_token, inside, first, g_channel, K, BS))), LOW)
        b_k, b_q = b_k * tl.load(p_norm + slot)[None, :], b_q * tl.load(p_norm + BT + slot)[None, :]
        pair, flip = slot[:, None] * BT + tile * SIZE + column, (tile * SIZE + column) * BT + slot[:, None]
        D1 = tl.load(p_reads + pair) + tl.load(p_reads + flip)
        D2 = D1
        if DELTA:
            D2 = tl.load(p_overlaps + pair) + tl.load(p_overlaps + flip)
        own = tl.load(p_reads + slot * (BT + 1))[None, :]
        p_rows = p_channel + slot[None, :] * BK
        p_keys = dkeys + at * (BT * BK) + p_rows
        dq, dk = own * b_k, own * b_q
        total = tl.zeros([BS, SIZE], tl.float32)
        for step in range(4):  # unrolled, it would want more registers
            dq, dk, total = _level(dq, dk, total, D1, D2, b_k, b_q, gates, SIZE // 2 >> step, DELTA, LOW)

        # As columns of later rows.
        if last > 0:
            dearly = tl.load(after + p_rows) * _weights(gates, tl.where(row > column, 1.0, 0.0), LOW)
            dk += dearly
            total += _sums(dearly * b_k, tl.where(column > row, 1.0, 0.0), False)

        # As rows of earlier columns.
        weight = _weights(gates, tl.where(row <= column, 1.0, 0.0), LOW)
        k_scale, q_scale = tl.load(p_late + slot), tl.load(p_late + BT + slot)
        o_q = site_again(b_q * weight, q_scale, 0, QK, LOW)
        o_k = o_q
        if DELTA:
            o_k = site_again(b_k * weight, k_scale, 0, KK, LOW)
        dlate = tl.zeros([BS, SIZE], tl.float32)
        dlater = tl.zeros([BS, SIZE], tl.float32)
        between = tl.full([BS], 1.0, tl.float32)
        for back in range(1, tile + 1):
            other = tile - back
            at_j = other * SIZE + i
            e_rows = p_channel + at_j[None, :] * BK
            there, flip = slot[:, None] * BT + at_j[None, :], slot[None, :] * BT + at_j[:, None]
            e_k = tl.load(to_end + e_rows)
            e_scale = tl.load(p_read + tile * BT + at_j)
            o_early = site_again(e_k * between[:, None], e_scale, 0, QK, LOW)
            dlate += site_product(o_early, operand(tl.load(p_reads + flip) * e_scale[:, None], LOW))
            dearly = site_product(o_q, operand(tl.load(p_reads + there) * q_scale[:, None], LOW))
            if DELTA:
                if KK != QK:
                    e_scale = tl.load(p_key + tile * BT + at_j)
                    o_early = site_again(e_k * between[:, None], e_scale, 0, KK, LOW)
                dlater += site_product(o_early, operand(tl.load(p_overlaps + flip) * e_scale[:, None], LOW))
                dearly += site_product(o_k, operand(tl.load(p_overlaps + there) * k_scale[:, None], LOW))
            dearly = dearly * between[:, None]
            tl.store(p_passed + (other * TILES + tile) * BK, tl.sum(dearly * e_k, 1))
            if last > 0:
                dearly += tl.load(after + e_rows)
            tl.store(after + e_rows, dearly)
            between *= tl.load(ends + (at * (2 * TILES) + other) * BK + channel)
        dlate, dlater = dlate * weight, dlater * weight
        total += _sums(dlate * b_q + dlater * b_k, tl.where(column <= row, 1.0, 0.0), False)
        over = tl.zeros([BS], tl.float32)
        for early in range(tile):
            for late in range(tile + 1, TILES):
                over += tl.load(p_passed + (early * TILES + late) * BK)
        total += tl.load(dgates + p_rows) + over[:, None]
        tl.store(p_keys, tl.load(p_keys) + (dq + dlate))
        p_keys += BT * BK
        tl.store(p_keys, tl.load(p_keys) + (dk + dlater))
        p_dg = dg + (token * dg_token + i_head * dg_head)[None, :] + channel[:, None] * dg_channel
        tl.store(p_dg, total.to(dg.dtype.element_ty), mask=inside[None, :] & (channel < K)[:, None])
        tl.debug_barrier()  # what was stored is what other threads load

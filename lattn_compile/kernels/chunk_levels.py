"""Of a decay by channel: what pairs of tokens of a block make of the gradients of q, k and g.

In the tiles and levels of `pairs_channel` and `pairs_across`. A program handles some channels of a block and value
head, a warp of it 16 tokens. Of two tokens that a middle parts, the earlier one sees the later one's key and query, the
later one the earlier one's key: with matrices that are symmetric, one product gives what both get of it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import (
    block_place,
    exact_operand,
    operand,
)
from lattn_compile.kernels.chunk_tiles import (
    from_tile,
    spread,
    tile_channels,
    tile_gates,
    tile_product,
    tile_sums,
    tile_weights,
    turned,
)

__all__ = ["grad_levels"]


@triton.jit
def _kept(a, which):
    """An operand's numbers where `which` holds, else 0; transposed."""
    out = ()
    for i in tl.static_range(len(a)):
        kept = tl.where(which, a[i], 0.0).to(a[i].dtype)
        out = out + (tl.trans(kept, (0, 2, 1)),)  # type: ignore[assignment] # noqa: RUF005
    return out


@triton.jit
def _weighted(q, k, weight, late, LOW: tl.constexpr):
    """What tokens show to those on the other side of the middle, as operands: of those behind it the query, of those
    before it the key, and of all the key."""
    return operand(tl.where(late, q, k) * weight, LOW), operand(k * weight, LOW)


@triton.jit
def _received(dq, dk, first, second, q, k, weight, late, DELTA: tl.constexpr):
    """Adds to dq and dk what tokens saw, `first` through `reads` and `second` through `overlaps`.

    Returns:
        dq, dk, and the gradient of the weights' exponents.
    """
    first = first * weight
    dq += tl.where(late, first, 0.0)
    dk += tl.where(late, 0.0, first)
    exponent = first * tl.where(late, q, k)
    if DELTA:
        second = second * weight
        dk += second
        exponent += second * k
    return dq, dk, exponent


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def grad_levels(
    q, k, g, starts, lengths, offsets, owner, index, norms, dreads, doverlaps, dkeys, dgates, dg, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel,
    dg_token, dg_head, dg_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr,
    DELTA: tl.constexpr, LOW: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Adds to `dkeys`, and writes g's gradients, with `dgates`, to `dg`; both of `grad_keys`.

    Channels are rows here, and tokens columns: what a product makes is then, in the same registers, the left side of
    the next one.

    Args:
        dreads, doverlaps: of `grad_pairs`, symmetric. TILE: 16 tokens.

    Grid: (NB * HV * BK / BS,), BT / TILE warps.
    """
    SLICES: tl.constexpr = BK // BS
    TILES: tl.constexpr = BT // TILE
    pid = tl.program_id(0) // SLICES
    first = tl.program_id(0) % SLICES * BS
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    at = pid.to(tl.int64)
    channel = first + tl.arange(0, BS)
    p_q, p_k, p_g = q + i_key * q_head, k + i_key * k_head, g + i_head * g_head
    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT)
    p_reads, p_overlaps = dreads + at * (BT * BT), doverlaps
    if DELTA:
        p_overlaps = doverlaps + at * (BT * BT)
    i = tl.arange(0, TILE)
    row, column = i[:, None], i[None, :]
    slot = tl.arange(0, TILES)[:, None] * TILE + column
    base, low, high = block_place(owner, index, starts, lengths, offsets, block, skip, CHUNK, TOKENS, PER)
    token, inside = base + slot, (slot >= low) & (slot < high)
    b_q = tile_channels(p_q, token * q_token, inside, first, q_channel, K, BS).to(tl.float32)
    b_k = tile_channels(p_k, token * k_token, inside, first, k_channel, K, BS).to(tl.float32)
    b_k, b_q = b_k * tl.load(p_norm + slot)[:, None, :], b_q * tl.load(p_norm + BT + slot)[:, None, :]
    b_g = tile_gates(p_g, token * g_token, inside, first, g_channel, K, BS, LOW)
    place = (at * (2 * BT) + slot[:, None, :]) * BK + channel[None, :, None]
    own = tl.load(p_reads + slot * (BT + 1))[:, None, :]
    dq, dk = tl.load(dkeys + place) + own * b_k, tl.load(dkeys + BT * BK + place) + own * b_q
    total = tl.load(dgates + (at * BT + slot[:, None, :]) * BK + channel[None, :, None])

    pair = slot[:, :, None] * BT + slot[:, None, :]
    o_D1 = turned(operand(tl.load(p_reads + pair), LOW), TILES)
    o_D2 = o_D1
    if DELTA:
        o_D2 = turned(operand(tl.load(p_overlaps + pair), LOW), TILES)
    for step in range(4):  # unrolled, it would want more registers
        half = TILE // 2 >> step
        late = ((i & half) != 0)[None, None, :]
        distance = row ^ column
        apart = spread((distance >= half) & (distance < 2 * half), TILES)
        # Gates between a token and the middle, gates by tokens, and the other way round.
        to_tokens = (distance < half) & (((column & half) != 0) == (row <= column))
        to_gates = (distance < half) & (((row & half) != 0) == (column <= row))
        weight = tile_weights(tile_sums(b_g, spread(to_tokens.to(tl.float32), TILES), LOW), LOW)
        x, keys = _weighted(b_q, b_k, weight, late, LOW)
        first_seen = tile_product(x, _kept(o_D1, apart))
        second = first_seen
        if DELTA:
            second = tile_product(keys, _kept(o_D2, apart))
        dq, dk, exponent = _received(dq, dk, first_seen, second, b_q, b_k, weight, late, DELTA)
        total += tile_product(operand(exponent, LOW), exact_operand(spread(to_gates.to(tl.float32), TILES)))
    if TILES == 4:
        # Whole tiles: the two beside each other, and those two on the other side of the block's middle.
        tile = tl.arange(0, TILES)[:, None]
        tile_wide = tile[:, :, None]
        all_ones = tl.full([TILES, TILE, TILE], 1.0, tl.float32)
        for step in tl.static_range(2):
            half = TILE << step
            late = (tile * TILE & half != 0)[:, :, None]
            which = (spread(row > column, TILES) != late).to(tl.float32)
            sums = tile_sums(b_g, which, LOW)
            if step == 1:
                # The outer two have all of their neighbours between themselves and the middle.
                outer = (tile_wide == 0) | (tile_wide == 3)
                sums += tile_sums(from_tile(b_g, 1), tl.where(outer, all_ones, 0.0), LOW)
            weight = tile_weights(sums, LOW)
            x, keys = tl.where(late, b_q, b_k) * weight, b_k * weight
            first_seen = tl.zeros([TILES, BS, TILE], tl.float32)
            second = tl.zeros([TILES, BS, TILE], tl.float32)
            for away in tl.static_range(1 << step, 2 << step):
                pair = ((tile ^ away) * TILE + column)[:, :, None] * BT + slot[:, None, :]
                seen = operand(from_tile(x, away), LOW)
                first_seen += tile_product(seen, operand(tl.load(p_reads + pair), LOW))
                if DELTA:
                    seen = operand(from_tile(keys, away), LOW)
                    second += tile_product(seen, operand(tl.load(p_overlaps + pair), LOW))
            dq, dk, exponent = _received(dq, dk, first_seen, second, b_q, b_k, weight, late, DELTA)
            which = (spread(column > row, TILES) != late).to(tl.float32)
            total += tile_product(operand(exponent, False), exact_operand(which))
            if step == 1:
                inner = tl.where((tile_wide == 1) | (tile_wide == 2), all_ones, 0.0)
                total += tile_product(operand(from_tile(exponent, 1), False), exact_operand(inner))
    tl.store(dkeys + place, dq)
    tl.store(dkeys + BT * BK + place, dk)
    p_dg = dg + (token * dg_token + i_head * dg_head)[:, None, :] + channel[None, :, None] * dg_channel
    tl.store(p_dg, total.to(dg.dtype.element_ty), mask=inside[:, None, :] & (channel < K)[None, :, None])

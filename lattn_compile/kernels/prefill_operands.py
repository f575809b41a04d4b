"""What a chunk needs besides the state, as operands of the products with it (`reference/prefill.py`).

    W = T (beta K e^G)      U = T (beta V)      (K e^(G_C - G))^T

A program makes those of one chunk and head; products have ROWS rows, see "Hopper" in `chunk.py`.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import block_tokens, load_rows
from lattn_compile.kernels.prefill_codec import flipped_parts, lanes, load_site, site, site_product, store_site
from lattn_compile.kernels.prefill_pairs import SUB_BLOCK

__all__ = ["state_operands"]


@triton.jit
def _load_left(p, scale, at, row, BT: tl.constexpr, FORMAT: tl.constexpr):
    """Some rows of a `[parts, BT, BT]` operand, and their factors."""
    PARTS: tl.constexpr = 3 if FORMAT == "" else 1
    place = row[:, None] * BT + tl.arange(0, BT)[None, :]
    return load_site(p, at, place, BT * BT, PARTS), tl.load(scale + at * BT + row)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def state_operands(
    k, v, starts, lengths, offsets, owner, index, norms, strengths, factors, earlier, later, ends, w_left, w_left_scale,
    u_left, u_left_scale, erase, erase_scale, out, out_scale, whole, updates, skip,
    k_token, k_head, k_channel, v_token, v_head, v_column, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    ROWS: tl.constexpr, DECAY: tl.constexpr, DELTA: tl.constexpr, LOW: tl.constexpr,
    W: tl.constexpr, U: tl.constexpr, WS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Args:
        k: `[M, H, K]`, v: `[M, HV, V]`. norms, strengths: of `prefill_pairs.rows`.
        factors: of `prefill_heads.py`, or, of a decay by channel, earlier, later, ends: from_start, to_end and ends of
            `prefill_pairs.py`.
        w_left, u_left: T as the left operands of w and u, of `solve`, w_left_scale and u_left_scale with them.
        erase: `[NB, HV, parts, BT, BK]`, W as the left operand of ws, erase_scale: fp32 `[NB, HV, BT]`.
        out: `[NB, HV, parts, BK, BT]`, the left operand of kv, out_scale: fp32 `[NB, HV, BK]`.
        whole: fp32 `[NB, HV, BK]`, e^G_C; by channel of `prefill_pairs.py`. updates: U, fp32 `[NB, HV, VP, BT]`.
        BV: columns of v at a time. W, U, WS, KV: the sites' formats.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, i_key = pid.to(tl.int64), i_head // (HV // H)
    slot, channel = tl.arange(0, BT), tl.arange(0, BK)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    # All that comes from far first, so that no load waits for another.
    if DECAY < 2:
        b_k = load_rows(k, token * k_token + i_key * k_head, inside, 0, k_channel, K, BK)
        k_norm = tl.load(norms + (block.to(tl.int64) * H + i_key) * (2 * BT) + slot)
    b_v = load_rows(v, token * v_token + i_head * v_head, inside, 0, v_column, V, BV)
    strength = tl.load(strengths + at * BT + slot)

    for first in tl.static_range(0, VP, BV):
        if first > 0:
            b_v = load_rows(v, token * v_token + i_head * v_head, inside, first, v_column, V, BV)
        known = b_v.to(tl.float32) * strength[:, None]
        p_updates = updates + at * (BT * VP) + (first + tl.arange(0, BV))[None, :] * BT
        if DELTA:
            o_known, known_scale = site(known, 0, U, LOW)
            for half in tl.static_range(BT // ROWS):
                row = half * ROWS + tl.arange(0, ROWS)
                t, t_scale = _load_left(u_left, u_left_scale, at, row, BT, U)
                solved = site_product(t, o_known) * (t_scale[:, None] * known_scale[None, :])
                tl.store(p_updates + row[:, None], solved)
        else:
            tl.store(p_updates + slot[:, None], known)

    if DECAY == 2:
        p_weights = (at * BT + slot[:, None]) * BK + channel[None, :]
        TILES: tl.constexpr = BT // SUB_BLOCK
        p_ends = ends + (at * (2 * TILES) + TILES + slot[:, None] // SUB_BLOCK) * BK + channel[None, :]
        to_end = tl.load(later + p_weights) * tl.load(p_ends)
    else:
        p_factors = factors + at * (4 * BT)
        tl.store(whole + at * BK + channel, tl.zeros([BK], tl.float32) + tl.load(p_factors + 3 * BT - 1))
        to_end = b_k.to(tl.float32) * (tl.load(p_factors + 3 * BT + slot) * k_norm)[:, None]
    a, scale = site(to_end, 0, KV, LOW)
    a = lanes(flipped_parts(a), out)
    store_site(out, at, channel[:, None] * BT + slot[None, :], a, BT * BK)
    tl.store(out_scale + at * BK + channel, scale)

    if DELTA:
        if DECAY == 2:
            from_start = tl.load(earlier + p_weights) * strength[:, None]
        else:
            strength = tl.load(p_factors + 2 * BT + slot) * (strength * k_norm)
            from_start = b_k.to(tl.float32) * strength[:, None]
        o_known, known_scale = site(from_start, 0, W, LOW)
        for half in tl.static_range(BT // ROWS):
            row = half * ROWS + tl.arange(0, ROWS)
            t, t_scale = _load_left(w_left, w_left_scale, at, row, BT, W)
            solved = site_product(t, o_known) * (t_scale[:, None] * known_scale[None, :])
            o_W, scale = site(solved, 1, WS, LOW)
            store_site(erase, at, row[:, None] * BK + channel[None, :], lanes(o_W, erase), BT * BK)
            tl.store(erase_scale + at * BT + row, scale)

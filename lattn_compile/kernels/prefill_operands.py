"""What a chunk needs besides the state, as operands of the products with it (`reference/prefill.py`).

    W = T (beta K e^G)      U = T (beta V)      (K e^(G_C - G))^T

A program makes those of one chunk and head; products have ROWS rows, see "Hopper" in `chunk.py`.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import block_tokens, gate_exp, held, load_rows
from lattn_compile.kernels.prefill_codec import load_site, site, site_product, store_site

__all__ = ["erase_operands", "out_operands", "value_operands"]


@triton.jit
def _load_left(p, at, first, ROWS: tl.constexpr, BT: tl.constexpr, PARTS: tl.constexpr):
    """Rows `first` to `first + ROWS` of a `[parts, BT, BT]` operand."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BT)
    return load_site(p, at, row[:, None] * BT + column[None, :], BT * BT, PARTS)


@triton.jit
def _keys(
    k, norms, owner, index, starts, lengths, offsets, block, skip, i_key, H, slot, k_token, k_head, k_channel,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """A chunk's keys, fp32, what normalises them, and their tokens."""
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    b_k = load_rows(k, token * k_token + i_key * k_head, inside, 0, k_channel, K, BK)
    k_norm = tl.load(norms + (block.to(tl.int64) * H + i_key) * (2 * BT) + slot)
    return b_k.to(tl.float32), k_norm, token, inside


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def out_operands(
    k, g, starts, lengths, offsets, owner, index, norms, factors, out, out_scale, whole, skip,
    k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, DECAY: tl.constexpr, LOW: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """Args:
        k: `[M, H, K]`, g: `[M, HV]` or `[M, HV, K]` as DECAY says. norms, factors: of `rows`.
        out: `[NB, HV, parts, BK, BT]`, the left operand of kv, out_scale: fp32 `[NB, HV, BK]`.
        whole: fp32 `[NB, HV, BK]`, e^G_C. KV: the site's format.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, i_key = pid.to(tl.int64), i_head // (HV // H)
    slot, channel = tl.arange(0, BT), tl.arange(0, BK)
    b_k, k_norm, _, _ = _keys(
        k, norms, owner, index, starts, lengths, offsets, block, skip, i_key, H, slot, k_token, k_head, k_channel, K,
        BK, BT,
    )  # fmt: skip
    p_whole = whole + at * BK + channel
    if DECAY == 2:
        p_g = g + i_head * g_head
        behind, follows = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot + 1, BT, BT, 1)
        later = held(load_rows(p_g, behind * g_token, follows & (slot < BT - 1), 0, g_channel, K, BK))
        first = tl.load(starts + tl.load(owner + block)) + (tl.load(index + block) + skip).to(tl.int64) * BT
        opening = held(tl.load(p_g + first * g_token + channel * g_channel, mask=channel < K, other=0.0))
        to_end = tl.cumsum(later, 0, reverse=True)
        tl.store(p_whole, gate_exp(tl.sum(later, 0) + opening, LOW))
        to_end = gate_exp(to_end, LOW) * k_norm[:, None]
    else:
        p_factors = factors + at * (4 * BT)
        to_end = (tl.load(p_factors + 3 * BT + slot) * k_norm)[:, None]
        tl.store(p_whole, tl.zeros([BK], tl.float32) + tl.load(p_factors + 3 * BT - 1))
    a, scale = site(b_k * to_end, 0, KV, LOW)
    store_site(out, at, slot[:, None] + channel[None, :] * BT, a, BT * BK)
    tl.store(out_scale + at * BK + channel, scale)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def erase_operands(
    k, g, starts, lengths, offsets, owner, index, norms, strengths, factors, left, left_scale, erase, erase_scale,
    skip, k_token, k_head, k_channel, g_token, g_head, g_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr,
    DECAY: tl.constexpr, LOW: tl.constexpr, W: tl.constexpr, WS: tl.constexpr,
):  # fmt: skip
    """Args:
        k, g: as in `out_operands`. norms, strengths, factors: of `rows`.
        left, left_scale: T as the left operand of w, of `solve`.
        erase: `[NB, HV, parts, BT, BK]`, W as the left operand of ws, erase_scale: fp32 `[NB, HV, BT]`.
        W, WS: the sites' formats.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, i_key = pid.to(tl.int64), i_head // (HV // H)
    slot, channel = tl.arange(0, BT), tl.arange(0, BK)
    b_k, k_norm, token, inside = _keys(
        k, norms, owner, index, starts, lengths, offsets, block, skip, i_key, H, slot, k_token, k_head, k_channel, K,
        BK, BT,
    )  # fmt: skip
    strength = tl.load(strengths + at * BT + slot) * k_norm
    if DECAY == 2:
        b_g = held(load_rows(g, token * g_token + i_head * g_head, inside, 0, g_channel, K, BK))
        from_start = gate_exp(tl.cumsum(b_g, 0), LOW) * strength[:, None]
    else:
        from_start = (tl.load(factors + at * (4 * BT) + 2 * BT + slot) * strength)[:, None]
    known, known_scale = site(b_k * from_start, 0, W, LOW)
    EXACT: tl.constexpr = 3 if W == "" else 1
    for half in tl.static_range(BT // ROWS):
        row = half * ROWS + tl.arange(0, ROWS)
        t = _load_left(left, at, half * ROWS, ROWS, BT, EXACT)
        t_scale = tl.load(left_scale + at * BT + row)
        solved = site_product(t, known) * (t_scale[:, None] * known_scale[None, :])
        w, w_scale = site(solved, 1, WS, LOW)
        store_site(erase, at, row[:, None] * BK + channel[None, :], w, BT * BK)
        tl.store(erase_scale + at * BT + row, w_scale)


@triton.jit(do_not_specialize=["skip", "HV"])
def value_operands(
    v, starts, lengths, offsets, owner, index, strengths, left, left_scale, updates, skip,
    v_token, v_head, v_column, HV,
    V: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr,
    DELTA: tl.constexpr, LOW: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Args:
        v: `[M, HV, V]`. strengths: of `rows`. left, left_scale: T as the left operand of u.
        updates: U, fp32 `[NB, HV, VP, BT]`.

    Grid: (NB * HV * VP / BV,).
    """
    NV: tl.constexpr = VP // BV
    pid, first = tl.program_id(0) // NV, tl.program_id(0) % NV * BV
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at = pid.to(tl.int64)
    slot, column = tl.arange(0, BT), first + tl.arange(0, BV)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, BT, BT, 1)
    b_v = load_rows(v, token * v_token + i_head * v_head, inside, first, v_column, V, BV)
    b_v = b_v.to(tl.float32) * tl.load(strengths + at * BT + slot)[:, None]
    p_updates = updates + at * (BT * VP) + column[None, :] * BT
    if DELTA:
        known, known_scale = site(b_v, 0, U, LOW)
        EXACT: tl.constexpr = 3 if U == "" else 1
        for half in tl.static_range(BT // ROWS):
            row = half * ROWS + tl.arange(0, ROWS)
            t = _load_left(left, at, half * ROWS, ROWS, BT, EXACT)
            t_scale = tl.load(left_scale + at * BT + row)
            solved = site_product(t, known) * (t_scale[:, None] * known_scale[None, :])
            tl.store(p_updates + row[:, None], solved)
    else:
        tl.store(p_updates + slot[:, None], b_v)

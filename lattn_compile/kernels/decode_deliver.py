"""What `retreat` left, added up to the gradients of queries, keys, decays and strengths."""

# Triton's language, not Python: no annotations but constants, tuples grow, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.common.inputs import rstd

__all__ = ["deliver"]


@triton.jit(do_not_specialize=["first", "span", "room", "rows"])
def deliver(
    q,
    k,
    by_channel,
    by_head,
    starts,
    lengths,
    dq,
    dk,
    dg,
    dbeta,
    scale,
    q_token,
    q_head,
    q_channel,
    k_token,
    k_head,
    k_channel,
    dq_token,
    dq_head,
    dk_token,
    dk_head,
    dg_token,
    dg_head,
    dbeta_token,
    dbeta_head,
    value_heads,
    first,
    span,
    room,
    rows,
    K: tl.constexpr,
    RATIO: tl.constexpr,
    LANES: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    DECAY: tl.constexpr,
    BETA: tl.constexpr,
):
    """Adds up what `retreat` left, over groups of columns and the value heads of a key head, and writes gradients.

    Args:
        q, k, scale: as the call got them. by_channel, by_head, starts, lengths, first, span, room: of `retreat`.
        dq, dk: `[M, H, K]`, dg: `[M, HV(, K)]`, dbeta: `[M, HV]`, contiguous in K; only these tokens' rows are written.
        rows: N * room. RATIO: HV / H. OWN: groups of columns.

    Grid: (ceil(rows / ROWS), H).
    """
    RUN: tl.constexpr = PIECES * STEP
    STRIDE: tl.constexpr = LANES * STEP * COLUMNS
    VECTORS: tl.constexpr = PIECES * (3 if DECAY == 2 else 2)
    SIZE: tl.constexpr = (VECTORS + COLUMNS - 1) // COLUMNS * STRIDE
    i_key = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_seq, j = row // room, row % room
    mine = row < rows
    start = tl.load(starts + i_seq, mask=mine, other=0).to(tl.int64)
    length = tl.load(lengths + i_seq, mask=mine, other=0)
    mine = mine & (j < span) & (j + first < length)
    token = start + first + j

    # In the order of memory: `[rows, lane and step, vector]`.
    place = tl.arange(0, LANES * STEP)
    vector = tl.arange(0, 2 * PIECES)
    offset = (vector // COLUMNS * STRIDE + vector % COLUMNS)[None, :] + place[:, None] * COLUMNS
    base = by_channel + row.to(tl.int64)[:, None, None] * (value_heads * OWN * SIZE)
    total = tl.zeros((ROWS, LANES * STEP, 2 * PIECES), tl.float32)
    for group in range(RATIO * OWN):
        p = base + (i_key * (RATIO * OWN) + group) * SIZE + offset[None, :, :]
        total += tl.load(p, mask=mine[:, None, None], other=0.0)

    at = (place // STEP * RUN + place % STEP)[:, None] + (vector % PIECES * STEP)[None, :]
    query = (vector < PIECES)[None, None, :]
    inside = mine[:, None, None] & (at < K)[None, :, :]
    total = tl.where(query, total * scale, total)
    if NORM:
        p_q = q + (token * q_token + i_key * q_head)[:, None, None] + at[None, :, :] * q_channel
        p_k = k + (token * k_token + i_key * k_head)[:, None, None] + at[None, :, :] * k_channel
        x = tl.load(p_q, mask=inside & query, other=0.0).to(tl.float32)
        x += tl.load(p_k, mask=inside & (vector >= PIECES)[None, None, :], other=0.0).to(tl.float32)
        SPLIT: tl.constexpr = (ROWS, LANES * STEP, 2, PIECES)
        x = tl.reshape(x, SPLIT)
        y = tl.reshape(total, SPLIT)
        r = rstd(tl.sum(tl.sum(x * x, 3), 1))[:, None, :, None]
        x = x * r
        y = (y - x * tl.sum(tl.sum(x * y, 3), 1)[:, None, :, None]) * r
        total = tl.reshape(y, (ROWS, LANES * STEP, 2 * PIECES))
    p_dq = dq + (token * dq_token + i_key * dq_head)[:, None, None] + at[None, :, :]
    p_dk = dk + (token * dk_token + i_key * dk_head)[:, None, None] + at[None, :, :]
    tl.store(p_dq, total.to(dq.dtype.element_ty), mask=inside & query)
    tl.store(p_dk, total.to(dk.dtype.element_ty), mask=inside & (vector >= PIECES)[None, None, :])

    if DECAY == 2:
        vector = tl.arange(0, PIECES)
        offset = ((vector + 2 * PIECES) // COLUMNS * STRIDE + (vector + 2 * PIECES) % COLUMNS)[None, :]
        offset = offset + place[:, None] * COLUMNS
        at = (place // STEP * RUN + place % STEP)[:, None] + (vector * STEP)[None, :]
        for ratio in range(RATIO):
            i_head = i_key * RATIO + ratio
            gates = tl.zeros((ROWS, LANES * STEP, PIECES), tl.float32)
            for group in range(OWN):
                p = base + (i_head * OWN + group) * SIZE + offset[None, :, :]
                gates += tl.load(p, mask=mine[:, None, None], other=0.0)
            p_dg = dg + (token * dg_token + i_head * dg_head)[:, None, None] + at[None, :, :]
            tl.store(p_dg, gates.to(dg.dtype.element_ty), mask=mine[:, None, None] & (at < K)[None, :, :])
    if BETA or DECAY == 1:
        for ratio in range(RATIO):
            i_head = i_key * RATIO + ratio
            p = by_head + (row.to(tl.int64) * value_heads + i_head) * (OWN * 4)
            strength = tl.zeros((ROWS,), tl.float32)
            gate = tl.zeros((ROWS,), tl.float32)
            for group in range(OWN):
                if BETA:
                    strength += tl.load(p + group * 4, mask=mine, other=0.0)
                if DECAY == 1:
                    gate += tl.load(p + group * 4 + 1, mask=mine, other=0.0)
            if BETA:
                p_dbeta = dbeta + token * dbeta_token + i_head * dbeta_head
                tl.store(p_dbeta, strength.to(dbeta.dtype.element_ty), mask=mine)
            if DECAY == 1:
                p_dg = dg + token * dg_token + i_head * dg_head
                tl.store(p_dg, gate.to(dg.dtype.element_ty), mask=mine)

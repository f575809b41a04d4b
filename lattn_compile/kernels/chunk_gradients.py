"""Gradients of q, k, g and beta, from what `chunk_backward.py` left, for all blocks at once.

    dq_in = D S^T      dk_in = -beta dR S^T      dk_out = U dS'^T        dR the gradient of beta (v - k_in S)

`grad_keys` makes these for BS channels of a block and value head and takes the weights of the decay out of them; what
pairs of tokens add it adds too, or `chunk_levels.py` does where the decay is by channel. `deliver` sums over value
heads and slices, and goes back through the norms.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_backward import load_outputs, reads_inside
from lattn_compile.kernels.chunk_blocks import extent
from lattn_compile.kernels.chunk_math import (
    block_tokens,
    channel_weight,
    held,
    load_beta,
    load_rows,
    operand,
    product,
    row_weights,
)
from lattn_compile.kernels.common.inputs import rstd

__all__ = ["deliver", "grad_keys", "grad_lines"]


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def grad_keys(
    q, k, g, beta, grad_o, starts, lengths, offsets, owner, index, norms, states, cotangents, updates, drhs, dreads,
    doverlaps, whole, dkeys, dgates, rows, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, g_token, g_head, g_channel, beta_token, beta_head,
    o_token, o_head, o_column, H, HV,
    K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr, VS: tl.constexpr,
    BT: tl.constexpr, DELTA: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr,
    LOW: tl.constexpr, AFTER: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Args:
        norms: of the forward; whole: likewise, of a decay by channel.
        states, cotangents, updates, drhs, dreads, doverlaps: of the kernels before.
        dkeys: fp32 `[NB, HV, 2, BT, BK]`: of the normalised, scaled q and of the normalised k.
        dgates: fp32 `[NB, HV, BT, BK]`, of a decay by channel: of g, but for the pairs of tokens.
        rows: fp32 `[NB, HV, BK / BS, 4, BT]`, sums over these channels: gradients of the exponents from the start and
            to the end and of the whole, of a decay by head; and what erasing takes out of beta's gradient.

    Grid: (NB * HV * BK / BS,).
    """
    SLICES: tl.constexpr = BK // BS
    pid = tl.program_id(0) // SLICES
    slice = tl.program_id(0) % SLICES
    first = slice * BS
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    i_key = i_head // (HV // H)
    at = pid.to(tl.int64)
    slot, channel = tl.arange(0, BT), first + tl.arange(0, BS)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    read = reads_inside(owner, index, starts, lengths, offsets, block, skip, slot, inside, AFTER, CHUNK, TOKENS, PER)
    dq = tl.zeros([BT, BS], tl.float32)
    seen = tl.zeros([BT, BS], tl.float32)
    dout = tl.zeros([BT, BS], tl.float32)
    dwhole = tl.zeros([BS], tl.float32)
    # Gates' gradients are sums that cancel where keys repeat: 16 bits of a factor are too few.
    for begin in range(0, VP, VS):
        column = begin + tl.arange(0, VS)
        p_state = (at * VP + column[:, None]) * BK + channel[None, :]
        S, dS = tl.load(states + p_state), tl.load(cotangents + p_state)
        p_value = at * (BT * VP) + slot[:, None] * VP + column[None, :]
        o_S = operand(S, False)
        b_o = load_outputs(grad_o, token, read, o_token, i_head, o_head, begin, o_column, V, VS)
        dq += product(operand(b_o, LOW), o_S)
        if DELTA:
            seen += product(operand(tl.load(drhs + p_value), False), o_S)
        dout += product(operand(tl.load(updates + p_value), False), operand(dS, False))
        dwhole += tl.sum(S * dS, 0)

    p_norm = norms + (block.to(tl.int64) * H + i_key) * (2 * BT) + slot
    k_norm, q_norm = tl.load(p_norm), tl.load(p_norm + BT)
    b_q = load_rows(q, token * q_token + i_key * q_head, inside, first, q_channel, K, BS)
    b_k = load_rows(k, token * k_token + i_key * k_head, inside, first, k_channel, K, BS)
    wide_q = b_q.to(tl.float32) * q_norm[:, None]
    wide_k = b_k.to(tl.float32) * k_norm[:, None]
    b_beta = load_beta(beta, token, inside, beta_token, i_head, beta_head, BETA)
    p_keys = dkeys + at * (2 * BT * BK) + slot[:, None] * BK + channel[None, :]
    p_rows = rows + (at * SLICES + slice) * (4 * BT) + slot
    if DECAY == 2:
        b_g = held(load_rows(g, token * g_token + i_head * g_head, inside, first, g_channel, K, BS))
        from_start = channel_weight(b_g, BT, False, LOW)
        to_end = channel_weight(b_g, BT, True, LOW)
        dwhole *= tl.load(whole + at * BK + channel)
    else:
        row_start, row_end = row_weights(g, token, inside, g_token, i_head, g_head, BT, DECAY, LOW)
        from_start, to_end = row_start[:, None], row_end[:, None]
        dwhole *= tl.sum(tl.where(slot == BT - 1, row_start, 0.0), 0)
    dq = dq * from_start
    seen = seen * from_start
    dout = dout * to_end
    if BETA:
        tl.store(p_rows + 3 * BT, tl.sum(seen * wide_k, 1))
    seen = seen * b_beta[:, None]
    start = dq * wide_q - seen * wide_k
    end = dout * wide_k
    dk = dout - seen
    if DECAY == 2:
        # The gates behind a slot's exponent from the start are those up to it, of one to the end those after it.
        before = tl.cumsum(end, 0) - end
        total = tl.cumsum(start, 0, reverse=True) + before + dwhole[None, :]
        tl.store(dgates + (at * BT + slot[:, None]) * BK + channel[None, :], total)
    else:
        if DECAY == 1:
            tl.store(p_rows, tl.sum(start, 1))
            tl.store(p_rows + BT, tl.sum(end, 1))
            tl.store(p_rows + 2 * BT, tl.zeros([BT], tl.float32) + tl.sum(dwhole, 0))
        p_reads, p_overlaps = dreads + at * (BT * BT), doverlaps
        if DELTA:
            p_overlaps = doverlaps + at * (BT * BT)
        for early in range(0, BT, 16):  # all at once, they would leave the registers
            j = early + tl.arange(0, 16)
            at_j, in_j = block_tokens(owner, index, starts, lengths, offsets, block, skip, j, CHUNK, TOKENS, PER)
            o_q = operand(load_rows(q, at_j * q_token + i_key * q_head, in_j, first, q_channel, K, BS), LOW)
            o_k = operand(load_rows(k, at_j * k_token + i_key * k_head, in_j, first, k_channel, K, BS), LOW)
            p_other = norms + (block.to(tl.int64) * H + i_key) * (2 * BT) + j
            k_other, q_other = tl.load(p_other)[None, :], tl.load(p_other + BT)[None, :]
            there, back = slot[:, None] * BT + j[None, :], j[None, :] * BT + slot[:, None]
            dq += product(operand(tl.load(p_reads + there) * k_other, LOW), o_k)
            dk += product(operand(tl.load(p_reads + back) * q_other, LOW), o_q)
            if DELTA:
                D = tl.load(p_overlaps + there) + tl.load(p_overlaps + back)
                dk += product(operand(D * k_other, LOW), o_k)
    tl.store(p_keys, dq)
    tl.store(p_keys + BT * BK, dk)


@triton.jit(do_not_specialize=["skip", "blocks", "HV"])
def grad_lines(
    grad_o, starts, lengths, offsets, owner, index, states, final, dkeys, skip, o_token, o_head, o_column, HV,
    blocks, K: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BS: tl.constexpr,
    VS: tl.constexpr, BT: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Where a line's last token reads the written state: adds what that makes of its query to `dkeys`.

    The written state is the one before the sequence's next block, or behind its last one: final, fp32 `[N, HV, K, V]`.

    Grid: (NB * HV,).
    """
    pid = tl.program_id(0)
    block, i_head = pid // HV, pid % HV
    i_seq = tl.load(owner + block)
    if i_seq < 0:
        return
    lead = tl.load(offsets + i_seq) % CHUNK
    at = tl.load(index + block) + skip
    base, _, high, line = extent(at, lead, tl.load(lengths + i_seq), CHUNK, TOKENS, PER)
    if not line:
        return
    more = tl.load(owner + block + 1, mask=block + 1 < blocks, other=-1) == i_seq
    token = tl.load(starts + i_seq) + base + high - 1
    for first in range(0, BK, BS):
        channel = first + tl.arange(0, BS)
        p_dq = dkeys + pid.to(tl.int64) * (2 * BT * BK) + (high - 1) * BK + channel
        total = tl.load(p_dq)
        for begin in range(0, VP, VS):
            column = begin + tl.arange(0, VS)
            p_o = grad_o + token * o_token + i_head * o_head + column * o_column
            read = tl.load(p_o, mask=column < V, other=0.0).to(tl.float32)
            p_next = states + ((pid.to(tl.int64) + HV) * VP + column[:, None]) * BK + channel[None, :]
            p_last = final + (i_seq.to(tl.int64) * HV + i_head) * (K * V) + channel[None, :] * V + column[:, None]
            inside = (column < V)[:, None] & (channel < K)[None, :]
            S = tl.load(p_next, mask=inside & more, other=0.0) + tl.load(p_last, mask=inside & (not more), other=0.0)
            total += tl.sum(S * read[:, None], 0)
        tl.store(p_dq, total)


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def deliver(
    q, k, starts, lengths, offsets, owner, index, norms, dkeys, rows, strengths, gates, dq, dk, dg, dbeta, skip,
    q_token, q_head, q_channel, k_token, k_head, k_channel, dq_token, dq_head, dq_channel, dk_token, dk_head,
    dk_channel, dg_token, dg_head, dbeta_token, dbeta_head, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, TILE: tl.constexpr, SLICES: tl.constexpr,
    DELTA: tl.constexpr, DECAY: tl.constexpr, BETA: tl.constexpr, NORM: tl.constexpr,
    CHUNK: tl.constexpr, TOKENS: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of q, k, g (by head) and beta. SLICES: of `rows`, BS: channels at a time here.

    Grid: (NB * H,).
    """
    pid = tl.program_id(0)
    block, i_key = pid // H, pid % H
    if tl.load(owner + block) < 0:
        return
    R = HV // H
    slot = tl.arange(0, BT)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, slot, CHUNK, TOKENS, PER)
    at = block.to(tl.int64) * HV + i_key * R
    p_norm = norms + pid.to(tl.int64) * (2 * BT) + slot
    k_norm, q_norm = tl.load(p_norm), tl.load(p_norm + BT)
    q_row, k_row = token * q_token + i_key * q_head, token * k_token + i_key * k_head
    q_along = tl.zeros([BT], tl.float32)
    k_along = tl.zeros([BT], tl.float32)
    q_rstd = tl.zeros([BT], tl.float32)
    if NORM:
        for first in range(0, BK, BS):
            b_q = load_rows(q, q_row, inside, first, q_channel, K, BS).to(tl.float32)
            b_k = load_rows(k, k_row, inside, first, k_channel, K, BS).to(tl.float32)
            d_q, d_k = _over_heads(dkeys, at, R, first, BK, BS, BT)
            q_along += tl.sum(b_q * d_q, 1)
            k_along += tl.sum(b_k * d_k, 1)
            q_rstd += tl.sum(b_q * b_q, 1)
        # Along the vector itself nothing comes through: a normalised vector's length is what it is.
        q_rstd = rstd(q_rstd)
        q_along, k_along = q_along * q_rstd * q_rstd, k_along * k_norm * k_norm
    for first in range(0, BK, BS):
        d_q, d_k = _over_heads(dkeys, at, R, first, BK, BS, BT)
        if NORM:
            d_q -= load_rows(q, q_row, inside, first, q_channel, K, BS).to(tl.float32) * q_along[:, None]
            d_k -= load_rows(k, k_row, inside, first, k_channel, K, BS).to(tl.float32) * k_along[:, None]
        channel = first + tl.arange(0, BS)[None, :]
        mask = inside[:, None] & (channel < K)
        p_dq = dq + (token * dq_token + i_key * dq_head)[:, None] + channel * dq_channel
        p_dk = dk + (token * dk_token + i_key * dk_head)[:, None] + channel * dk_channel
        tl.store(p_dq, (d_q * q_norm[:, None]).to(dq.dtype.element_ty), mask=mask)
        tl.store(p_dk, (d_k * k_norm[:, None]).to(dk.dtype.element_ty), mask=mask)
    if BETA or DECAY == 1:
        for ratio in range(R):
            i_head = i_key * R + ratio
            part = (at + ratio) * (2 * BT) + slot
            p_rows = rows + (at + ratio) * (SLICES * 4 * BT) + slot
            start = tl.zeros([BT], tl.float32)
            end = tl.zeros([BT], tl.float32)
            total = tl.zeros([BT], tl.float32)
            erased = tl.zeros([BT], tl.float32)
            for i in range(SLICES):
                if DECAY == 1:
                    start += tl.load(p_rows + i * (4 * BT))
                    end += tl.load(p_rows + i * (4 * BT) + BT)
                    total += tl.load(p_rows + i * (4 * BT) + 2 * BT)
                if BETA and DELTA:
                    erased += tl.load(p_rows + i * (4 * BT) + 3 * BT)
            if DECAY == 1:
                total += tl.cumsum(start, 0, reverse=True) + (tl.cumsum(end, 0) - end)
                total += tl.load(gates + part)
                if BT > TILE:
                    total += tl.load(gates + part + BT)
                p_dg = dg + token * dg_token + i_head * dg_head
                tl.store(p_dg, total.to(dg.dtype.element_ty), mask=inside)
            if BETA:
                strength = tl.load(strengths + part) - erased
                if BT > TILE:
                    strength += tl.load(strengths + part + BT)
                p_dbeta = dbeta + token * dbeta_token + i_head * dbeta_head
                tl.store(p_dbeta, strength.to(dbeta.dtype.element_ty), mask=inside)


@triton.jit
def _over_heads(dkeys, at, R, first, BK: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr):
    """Some channels of `dkeys`, summed over the R value heads of a key head."""
    place = tl.arange(0, BT)[:, None] * BK + (first + tl.arange(0, BS))[None, :]
    d_q = tl.zeros([BT, BS], tl.float32)
    d_k = tl.zeros([BT, BS], tl.float32)
    for ratio in range(R):
        p_keys = dkeys + (at + ratio) * (2 * BT * BK) + place
        d_q += tl.load(p_keys)
        d_k += tl.load(p_keys + BT * BK)
    return d_q, d_k

"""The prefill's way back through the state (`reference/prefill.py`, whose rounding passes gradients on unchanged).

    dV' = reads^T dO + (K e^(G_C - G)) dS'
    dS  = e^G_C dS' + (Q e^G)^T dO - W^T dV'          every operand as the forward rounded it, dO times the query scale

Gradients keep 16 bits beside bf16
inputs, 24 beside others; codes are bf16 here, which holds them, so that a product is two parts times one.
"""

# Triton's language, not Python: conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import operand
from lattn_compile.kernels.prefill_codec import load_site, site_product

__all__ = ["walk_back"]


@triton.jit(do_not_specialize=["scale", "skip", "HV"])
def walk_back(
    grad_o, starts, lengths, query, query_scale, seen, seen_scale, erase, erase_scale, out, out_scale, whole, source,
    first, count, final, cotangents, dnews, scale, skip, o_token, o_head, o_column, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, VP: tl.constexpr, BT: tl.constexpr,
    DELTA: tl.constexpr, LOW: tl.constexpr,
    WS: tl.constexpr, KV: tl.constexpr, AV: tl.constexpr, QP: tl.constexpr,
):  # fmt: skip
    """Args:
        grad_o: `[M, HV, V]`. query, seen: of `prefill_pairs.py`; erase, out, whole: of `prefill_operands.py`.
        source: gradients of the states behind the span, fp32 `[N, HV, K, V]`; final of those before it, maybe the same.
        first, count: of `Schedule`.
        cotangents: fp32 `[NB, HV, VP, BK]`, of the state behind each chunk. dnews: fp32 `[NB, HV, VP, BT]`, of V'.

    Grid: (VP / BV * HV * N,).
    """
    NV: tl.constexpr = VP // BV
    PP: tl.constexpr = 3 if AV == "" else 1
    EP: tl.constexpr = 3 if WS == "" else 1
    OP: tl.constexpr = 3 if KV == "" else 1
    pid = tl.program_id(0)
    i_v, i_head, i_seq = pid % NV, pid // NV % HV, pid // (NV * HV)
    blocks, block = tl.load(count + i_seq), tl.load(first + i_seq)
    start, length = tl.load(starts + i_seq), tl.load(lengths + i_seq)
    channel, slot, column = tl.arange(0, BK), tl.arange(0, BT), i_v * BV + tl.arange(0, BV)
    p_state = (i_seq.to(tl.int64) * HV + i_head) * (K * V) + channel[None, :] * V + column[:, None]
    m_state = (channel < K)[None, :] & (column < V)[:, None]
    dS = tl.load(source + p_state, mask=m_state, other=0.0)
    p_o = grad_o + start * o_token + i_head * o_head + column[:, None] * o_column
    at = (block.to(tl.int64) + blocks - 1) * HV + i_head
    for back in range(blocks):
        row = (skip + blocks - 1 - back).to(tl.int64) * BT + slot
        mask = (row < length)[None, :] & (column < V)[:, None]
        D = tl.load(p_o + row[None, :] * o_token, mask=mask, other=0.0).to(tl.float32) * scale
        a = load_site(seen, at, slot[:, None] * BT + slot[None, :], BT * BT, PP)
        b = load_site(out, at, channel[:, None] * BT + slot[None, :], BT * BK, OP)
        c = load_site(query, at, slot[:, None] * BK + channel[None, :], BT * BK, QP)
        tl.store(cotangents + (at * VP + column[:, None]) * BK + channel[None, :], dS)
        dU = site_product(operand(D * tl.load(seen_scale + at * BT + slot)[None, :], LOW), a)
        dU += site_product(operand(dS * tl.load(out_scale + at * BK + channel)[None, :], LOW), b)
        tl.store(dnews + (at * VP + column[:, None]) * BT + slot[None, :], dU)
        dS = dS * tl.load(whole + at * BK + channel)[None, :]
        dS += site_product(operand(D * tl.load(query_scale + at * BT + slot)[None, :], LOW), c)
        if DELTA:
            w = load_site(erase, at, slot[:, None] * BK + channel[None, :], BT * BK, EP)
            dS -= site_product(operand(dU * tl.load(erase_scale + at * BT + slot)[None, :], LOW), w)
        at -= HV
    tl.store(final + p_state, dS, mask=m_state)

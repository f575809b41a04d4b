"""What queries have of their chunk, as operands of the products with the state and with V' (`reference/prefill.py`).

    Q e^G                      the left operand of qs
    reads                      that of av

Of a decay by channel; of others `prefill_heads.py` makes them.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from lattn_compile.kernels.chunk_math import block_tokens, load_rows
from lattn_compile.kernels.prefill_codec import lanes, site, store_site

__all__ = ["read_operands"]


@triton.jit(do_not_specialize=["skip", "H", "HV"])
def read_operands(
    q, starts, lengths, offsets, owner, index, norms, weights, reads, query, query_scale, seen, seen_scale, skip,
    q_token, q_head, q_channel, H, HV,
    K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr,
    QS: tl.constexpr, AV: tl.constexpr,
):  # fmt: skip
    """Args:
        q: `[M, H, K]`. norms, reads: of `prefill_pairs.py`; weights: from_start of its `weights`.
        query: `[NB, HV, parts, BT, BK]`, query_scale: fp32 `[NB, HV, BT]`, Q e^G.
        seen: `[NB, HV, parts, BT, BT]`, seen_scale likewise, reads.

    Grid: (NB * HV * BT / ROWS,).
    """
    TILES: tl.constexpr = BT // ROWS
    tile, pid = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    block, i_head = pid // HV, pid % HV
    if tl.load(owner + block) < 0:
        return
    at, i_key = pid.to(tl.int64), i_head // (HV // H)
    slot, row = tl.arange(0, BT), tile * ROWS + tl.arange(0, ROWS)
    token, inside = block_tokens(owner, index, starts, lengths, offsets, block, skip, row, BT, BT, 1)
    b_q = load_rows(q, token * q_token + i_key * q_head, inside, 0, q_channel, K, BK)
    place = row[:, None] * BT + slot[None, :]
    P = tl.load(reads + at * (BT * BT) + place)
    q_norm = tl.load(norms + (block.to(tl.int64) * H + i_key) * (2 * BT) + BT + row)
    p_query = row[:, None] * BK + tl.arange(0, BK)[None, :]
    weight = tl.load(weights + at * (BT * BK) + p_query)
    o_q, scale = site(b_q.to(tl.float32) * q_norm[:, None] * weight, 1, QS, LOW)
    store_site(query, at, p_query, lanes(o_q, query), BT * BK)
    tl.store(query_scale + at * BT + row, scale)
    o_P, scale = site(P, 1, AV, LOW)
    store_site(seen, at, place, lanes(o_P, seen), BT * BT)
    tl.store(seen_scale + at * BT + row, scale)

"""Attention of one new token over keys that several query heads share, in a decode step.

A library's call is made for many queries, of which a program takes 64 or 128 beside each other, and has few programs of
few sequences. Here a sequence's keys are cut into stretches, a program each, so that a few sequences keep the whole
device reading; what the stretches found is put together behind it, as a part of what follows.
"""

# Triton's language, not Python: no annotations but constants, conditions on constants stand alone.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lattn_compile.kernels.common.early import wait_for_before
from lattn_compile.kernels.common.launch import launched

__all__ = ["attend", "forward", "supports"]

_PROGRAMS = 264
"""Of a launch, about: two a multiprocessor."""

_BLOCK = 32
"""Keys of a product, and of the shortest stretch."""

_LOG2_E = tl.constexpr(1.4426950408889634)

_ROWS = 16
"""Query heads of a group at most: rows of a product."""


@triton.jit
def attend(
    q,
    keys,
    values,
    mask,
    out,
    tops,
    sums,
    scale,
    S,
    STRETCH,
    q_seq,
    q_head,
    k_seq,
    k_group,
    k_token,
    v_seq,
    v_group,
    v_token,
    mask_seq,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    MASK: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Over one stretch of a sequence's keys: `softmax(scale q keys^T + mask) values` of a group's query heads.

    Args:
        q: `[B, GROUPS * SHARE, D]`. keys: `[B, GROUPS, S, D]`. values: `[B, GROUPS, S, V]`. The last axes are
            neighbours. mask: `[B, S]`, added to scores, mask_seq apart.
        out: `[B, GROUPS * SHARE, stretches, V]`, contiguous: of the softmax over the stretch, in its own type with
            WHOLE, there being one; else fp32, and not divided by sums.
        tops, sums: `[B, GROUPS * SHARE, stretches]`, fp32: the largest score times log2 e, and the sum of
            2^(score - top).
        STRETCH: keys of one, a multiple of BLOCK_S.

    Grid: (B * GROUPS, stretches).
    """
    if EARLY:
        wait_for_before()
    i_seq, i_group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    i_stretch = tl.program_id(1)
    row = tl.arange(0, ROWS)
    is_row = row < SHARE
    head = i_group * SHARE + row
    d, c = tl.arange(0, D), tl.arange(0, V)
    b_q = tl.load(q + i_seq.to(tl.int64) * q_seq + head[:, None] * q_head + d[None, :], mask=is_row[:, None], other=0.0)
    p_keys = keys + i_seq.to(tl.int64) * k_seq + i_group.to(tl.int64) * k_group + d[None, :]
    p_values = values + i_seq.to(tl.int64) * v_seq + i_group.to(tl.int64) * v_group + c[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, V], tl.float32)
    first = i_stretch * STRETCH
    for at in range(first, tl.minimum(first + STRETCH, S), BLOCK_S):
        s = at + tl.arange(0, BLOCK_S)
        here = s < S
        place = s[:, None].to(tl.int64)
        b_k = tl.load(p_keys + place * k_token, mask=here[:, None], other=0.0)
        b_v = tl.load(p_values + place * v_token, mask=here[:, None], other=0.0)
        score = tl.dot(b_q, tl.trans(b_k)) * scale
        if MASK:
            score += tl.load(mask + i_seq.to(tl.int64) * mask_seq + s, mask=here, other=0.0).to(tl.float32)[None, :]
        # In powers of two, as cuDNN has it: what is less than fp32 holds then is shut like -inf.
        score = tl.where(here[None, :], score * _LOG2_E, float("-inf"))
        now = tl.maximum(top, tl.max(score, 1))
        # Where all keys so far are shut there is no largest score, and no difference to it.
        level = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp2(score - level[:, None])
        kept = tl.exp2(top - level)
        total = total * kept + tl.sum(weight, 1)
        acc = tl.dot(weight.to(b_v.dtype), b_v, acc * kept[:, None])
        top = now
    slot = (i_seq * GROUPS * SHARE + head) * tl.num_programs(1) + i_stretch
    p_out = out + slot[:, None].to(tl.int64) * V + c[None, :]
    if WHOLE:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    else:
        tl.store(tops + slot, top, mask=is_row)
        tl.store(sums + slot, total, mask=is_row)
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=is_row[:, None])


def supports(share: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether `forward` takes `share` query heads of a group, of these sizes and type."""
    sizes = all(16 <= n <= 256 and n & (n - 1) == 0 for n in (key_dim, value_dim))
    return sizes and 0 < share <= _ROWS and dtype in (torch.bfloat16, torch.float16)


def stretch(keys: int, programs: int) -> int:
    """Keys of a program, where each stretch of all of them has so many programs."""
    pieces = max(1, _PROGRAMS // max(1, programs))
    return max(_BLOCK, triton.next_power_of_2(triton.cdiv(keys, pieces)))


def forward(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`softmax(scale q keys^T + mask) values`, `[B, heads, V]` in q's type; scores and sums in fp32.

    Args:
        q: `[B, heads, D]`. keys: `[B, groups, S, D]`. values: `[B, groups, S, V]`. Head h reads those of group
            `h // (heads / groups)`. mask: `[B or 1, S]` or None, added to the scores. Where
            it shuts all keys the result is 0, by -inf or by a number that fp32 does not hold times log2 e, as bf16's
            least one: that is what cuDNN gives. By more than that (it writes -65504 for a false mask), and all keys
            are seen, by their scores, as those come out of the sum.
    """
    q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, keys, values))
    batch, heads, key_dim = q.shape
    groups, length = keys.shape[1:3]
    value_dim, each = values.shape[-1], stretch(length, batch * groups)
    pieces = triton.cdiv(length, each)
    if mask is not None and mask.stride(1) != 1:
        mask = mask.contiguous()
    whole = pieces == 1
    out = q.new_empty((batch, heads, pieces, value_dim), dtype=q.dtype if whole else torch.float32)
    tops, sums = (None if whole else q.new_empty((batch, heads, pieces), dtype=torch.float32) for _ in range(2))
    launched(attend)[(batch * groups, pieces)](
        q, keys, values, mask, out, tops, sums, float(scale), length, each, *q.stride()[:2], *keys.stride()[:3],
        *values.stride()[:3], 0 if mask is None or mask.shape[0] == 1 else mask.stride(0), GROUPS=groups,
        SHARE=heads // groups, D=key_dim, V=value_dim, MASK=mask is not None, WHOLE=whole, ROWS=_ROWS,
        BLOCK_S=_BLOCK, EARLY=False, num_warps=4, num_stages=2,
    )  # fmt: skip
    if tops is None or sums is None:
        return out.view(batch, heads, value_dim)
    top = tops.amax(-1, keepdim=True)
    share = (tops - top.masked_fill(top == -torch.inf, 0.0)).exp2()
    total = (sums * share).sum(-1, keepdim=True)
    return ((out * share[..., None]).sum(2) / total.masked_fill(total == 0.0, 1.0)).to(q.dtype)

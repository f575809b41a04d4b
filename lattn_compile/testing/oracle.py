"""The recurrence of semantics §2, §4 and §5 written out in float64, one token and one sequence at a time.

It shares nothing with the ops or the kernels but the codec of a format, and takes the arguments of the `lattn::` ops,
so that any implementation can be compared with it argument for argument. Gradients are plain autograd through the loop;
a rounding passes its cotangent on unchanged (semantics §7). It keeps every state of every token alive: for tests, never
for work. The write modes themselves are in `loops.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lattn_compile.errors import UnsupportedError
from lattn_compile.formats import parse
from lattn_compile.formats.quantizer import Quantizer
from lattn_compile.testing.loops import SUFFIXES, Given, Record, Rule, Suffix, Token, Writes, straight_through

__all__ = ["OracleResult", "oracle", "straight_through"]


class OracleResult(NamedTuple):
    """What a call returns, and what continues it, all in float64 (`dtype`). States are `[N, HV, K, V]`.

    Attributes:
        o: `[B, T, HV, V]`.
        final_state: raw, as the ops return it: the stored value, but the value before its last write if that write was
            made in this call and the quantizer is not idempotent; replay and two_precision: of the anchor.
        cursor: int32 `[N]`. -1: not handed over. Else token: 0; chunk: tokens into the grid, 0 <= c < chunk_size;
            replay and two_precision: records in the ring, 0 <= c < window.
        carry: what the next call starts from, `initial_state` of a call that continues this one (with `cursor`).
        dense: the state as a reader sees it; chunk off its grid: rounded; replay: rebuilt; two_precision: advanced.
        written: int64 `[N]`, position of the token after whose write `carry` is (chunk off its grid: the last token).
        read: two_precision's read copy, else None.
        ring: replay and two_precision: the records since the last flush, `[N, window - 1, ...]`, zero behind the
            cursor; else None. `ring_k` to `ring_beta` of a call that continues this one.
    """

    o: Tensor
    final_state: Tensor
    cursor: Tensor
    carry: Tensor
    dense: Tensor
    written: Tensor
    read: Tensor | None
    ring: Record | None


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    sequence_lengths: Tensor | None = None,
    cursor: Tensor | None = None,
    position: Tensor | int | None = None,
    sequence_ids: Tensor | None = None,
    *,
    read_state: Tensor | None = None,
    ring_k: Tensor | None = None,
    ring_u: Tensor | None = None,
    ring_g: Tensor | None = None,
    ring_v: Tensor | None = None,
    ring_beta: Tensor | None = None,
    rule: str = "delta",
    scale: float | None = None,
    qk_l2norm: bool = False,
    write: str = "exact",
    state_format: str = "fp32",
    readout: str = "before_write",
    chunk_size: int = 64,
    window: int = 8,
    factors: str | None = None,
    anchor: str = "fp32",
    rounding: str = "nearest",
    seed: int = 0,
    feedback: str | None = None,
    rotation: str | None = None,
    gate: str | None = None,
    site_id: int = 0,
    given: Given | None = None,
    dtype: torch.dtype = torch.float64,
    checkpoint_every: int = 0,
    keep_ring: bool = True,
    implementation: str = "auto",
    growth: bool = False,
) -> OracleResult:
    """What the `lattn::` ops compute, in float64 and differentiable.

    Args:
        q, k, v, g, beta, initial_state: as the ops take them, `[B, T, H, K]`, `[B, T, HV, V]`, `[B, T, HV(, K)]`,
            `[N, HV, K, V]`; any floating dtype, computed in `dtype` (codec divisions included). `initial_state` is
            what a cursor of 0 or more says is stored: decoded (of two_precision the anchor).
        cu_seqlens: `[N + 1]` with `B == 1`; None is one sequence a batch row.
        prefix_lengths, sequence_lengths: int `[]` or `[N]`; a prefix longer than its sequence is clamped to it.
        cursor: int `[N]`, None is -1 everywhere.
        position: int, `[]` or `[N]`, absolute position of each sequence's first token here, None is 0; sequence_ids:
            int `[N]`, None is 0. Both key random bits and nothing else.
        read_state, ring_k, ...: of a carried replay or two_precision state, as an `OracleResult` has them.
        rule: "delta" or "additive"; write: a name in `modes.MODES`; readout: "before_write" or "after_write".
        state_format: of the written state; two_precision: of the read copy.
        window, factors, anchor: of replay and two_precision. rounding, seed, site_id, feedback, rotation: of a write.
        gate: None, "bf16" or "fp16", what g is rounded to before use.
        given: may replace what a rounding gives, see `loops.Given`: with the states and factors that another
            implementation stored, gradients are compared at one point.
        dtype: of all arithmetic; float32 shows what fp32 itself costs.
        checkpoint_every, keep_ring, implementation, growth: accepted and ignored, they change nothing computed.

    Raises:
        UnsupportedError: for a rule, write mode, readout or gate that has no loop here.
    """
    for name, value, legal in (
        ("rule", rule, ("delta", "additive")),
        ("write", write, ("exact", *SUFFIXES)),
        ("readout", readout, ("before_write", "after_write")),
        ("gate", gate, (None, "bf16", "fp16")),
    ):
        if value not in legal:
            known = " | ".join(str(x) for x in legal)
            raise UnsupportedError(name, got=repr(value), want=known, remedy="The oracle has no loop for it.")
    batch, width, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    step = Rule(rule, key_dim**-0.5 if scale is None else scale, value_heads // key_heads)
    quantizer = Quantizer(parse(state_format), rounding, feedback, rotation, seed, site_id)

    if cu_seqlens is None:
        bounds = [(i * width, (i + 1) * width) for i in range(batch)]
    else:
        bounds = list(pairwise(int(edge) for edge in cu_seqlens))
    count = len(bounds)

    def per_sequence(numbers: Tensor | int | None, default: list[int]) -> list[int]:
        return default if numbers is None else [int(x) for x in torch.as_tensor(numbers).expand(count)]

    totals = per_sequence(sequence_lengths, [stop - start for start, stop in bounds])
    prefixes = per_sequence(prefix_lengths, [0] * count)
    cursors = per_sequence(cursor, [-1] * count)
    positions = per_sequence(position, [0] * count)
    names = per_sequence(sequence_ids, [0] * count)

    # One unbind per tensor: its backward is one stack, where T separate selects would each write a whole gradient.
    flat_q, flat_k, flat_v, flat_g, flat_beta = (
        x.to(dtype).flatten(0, 1).unbind(0) if x is not None else None for x in (q, k, v, g, beta)
    )
    assert flat_q is not None and flat_k is not None and flat_v is not None

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() if qk_l2norm else x

    def token(t: int, where: int) -> Token:
        decay = None if flat_g is None else flat_g[t]
        if decay is not None and gate is not None:
            decay = straight_through(decay[None], parse(gate))[0]
        strength = None if flat_beta is None else flat_beta[t]
        return Token(norm(flat_q[t]), norm(flat_k[t]), flat_v[t], decay, strength, where)

    shape = (value_heads, key_dim, value_dim)
    zero = torch.zeros(value_heads, value_dim, dtype=dtype, device=q.device)
    rows = [zero] * (batch * width)
    ends = []
    for i, (start, _) in enumerate(bounds):
        state = zero.new_zeros(shape) if initial_state is None else initial_state[i].to(dtype)
        stop = start + totals[i]
        split = start + min(prefixes[i], totals[i])
        first = positions[i] - start  # of flat token 0, were it of this sequence

        suffix: Suffix | None = None
        writes = Writes(quantizer, readout, i, names[i], chunk_size, window, factors, anchor, given)
        if write == "exact":
            split = stop
        elif cursors[i] >= 0:
            suffix = SUFFIXES[write](step, writes, positions[i] - 1)
            tensors = (ring_k, ring_u, ring_g, ring_v, ring_beta)
            pending = cursors[i] if write in ("replay", "two_precision") else 0
            records = [Record(*(None if x is None else x[i, j].to(dtype) for x in tensors)) for j in range(pending)]  # type: ignore[arg-type]
            suffix.resume(state, None if read_state is None else read_state[i].to(dtype), cursors[i], records)
        if split > start and suffix is not None:
            state, suffix = suffix.dense(), None  # a prefix starts from what a reader sees
        for t in range(start, split):
            x = token(t, first + t)
            state = step.step(state, x)
            rows[t] = step.read(state, x.q)
        if stop > split and suffix is None:
            suffix = SUFFIXES[write](step, writes, first + split - 1)
            suffix.hand_over(state)
        for t in range(split, stop):
            assert suffix is not None
            rows[t] = suffix.token(token(t, first + t))
        ends.append(_end(suffix, state, first + stop - 1))

    def stacked(name: str) -> Tensor:
        return torch.stack([end[name] for end in ends]) if ends else zero.new_zeros(0, *shape)

    def numbers(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([end[name] for end in ends], dtype=dtype, device=q.device)

    ring = None
    if write in ("replay", "two_precision"):
        raw = write == "two_precision"
        blank = [None if x is None else x.new_zeros(x.shape[2:], dtype=dtype) for x in (k, v, g, v, beta)]
        empty = Record(*(x if i < 3 or raw else None for i, x in enumerate(blank)))  # type: ignore[arg-type]
        ring = _ring([end["records"] for end in ends], window - 1, empty)
    return OracleResult(
        o=torch.stack(rows).reshape(batch, width, *zero.shape) if rows else zero.new_zeros(batch, width, *zero.shape),
        final_state=stacked("raw"),
        cursor=numbers("cursor", torch.int32),
        carry=stacked("carry"),
        dense=stacked("dense"),
        written=numbers("written", torch.int64),
        read=stacked("read") if write == "two_precision" else None,
        ring=ring,
    )


def _end(suffix: Suffix | None, state: Tensor, last: int) -> dict[str, Any]:
    """What one sequence leaves behind; `state` is the exact one of a sequence that was not handed over."""
    if suffix is None:
        exact = dict.fromkeys(("raw", "carry", "dense", "read"), state)
        return {**exact, "cursor": -1, "written": last, "records": []}
    return {
        "raw": suffix.raw,
        "carry": suffix.state,
        "dense": suffix.dense(),
        "read": suffix.read_copy(),
        "cursor": suffix.cursor,
        "written": suffix.written,
        "records": suffix.records,
    }


def _ring(sequences: list[list[Record]], slots: int, empty: Record) -> Record:
    """The records of all sequences, each padded with `empty` ones to `slots`."""

    def stack(name: str) -> Tensor | None:
        blank: Tensor | None = getattr(empty, name)
        if blank is None:
            return None
        if not sequences or not slots:
            return blank.new_zeros(len(sequences), slots, *blank.shape)
        padded = [[*(getattr(r, name) for r in records), *[blank] * (slots - len(records))] for records in sequences]
        return torch.stack([torch.stack(row) for row in padded])

    return Record(*(stack(name) for name in Record._fields))  # type: ignore[arg-type]

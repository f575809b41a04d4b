"""The recurrence of semantics §2, §4 and §5 written out in float64, one token and one sequence at a time.

It shares nothing with the ops or the kernels but the codec of a format, and takes the arguments of `lattn::decode` and
`lattn::chunk`, so that any implementation can be compared with it argument for argument. Gradients are plain autograd
through the loop; a rounding passes its cotangent on unchanged (semantics §7). It keeps every state of every token
alive: for tests, never for work.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lattn_compile.errors import UnsupportedError
from lattn_compile.formats import Format, parse

__all__ = ["OracleResult", "oracle", "straight_through"]


class OracleResult(NamedTuple):
    """`o` float64 `[B, T, HV, V]`, `final_state` float64 `[N, HV, K, V]` (raw, as the ops return it), and `cursor`
    int32 `[N]`: -1 not handed over, 0 encoded (token), 0 <= c < chunk_size tokens into the chunk grid (chunk)."""

    o: Tensor
    final_state: Tensor
    cursor: Tensor


class _StraightThrough(torch.autograd.Function):
    """Forward QDQ(x), backward the identity; not `x + (Q(x) - x)`, which is NaN for an infinity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format) -> Tensor:
        return fmt.qdq(x).clone()  # a plain format may hand its own input back

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, fmt: Format) -> Tensor:
    """`fmt.qdq(x)`, differentiated as the identity. `x [..., K, V]`."""
    return _StraightThrough.apply(x, fmt)  # type: ignore[no-any-return, no-untyped-call]


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
    *,
    rule: str = "delta",
    scale: float | None = None,
    qk_l2norm: bool = False,
    write: str = "exact",
    state_format: str = "fp32",
    readout: str = "before_write",
    chunk_size: int = 64,
    checkpoint_every: int = 0,
    implementation: str = "auto",
    site_id: int = 0,
    growth: bool = False,
) -> OracleResult:
    """What `lattn::decode` and `lattn::chunk` compute, in float64 and differentiable.

    Args:
        q, k, v, g, beta, initial_state: as the ops take them, `[B, T, H, K]`, `[B, T, HV, V]`, `[B, T, HV(, K)]`,
            `[N, HV, K, V]`; any floating dtype, computed in float64 (codec divisions included).
        cu_seqlens: `[N + 1]` with `B == 1`; None is one sequence a batch row.
        prefix_lengths, sequence_lengths: int `[]` or `[N]`; a prefix longer than its sequence is clamped to it.
        cursor: int `[N]`, None is -1 everywhere.
        rule: "delta" or "additive"; write: "exact", "token" or "chunk"; readout: "before_write" or "after_write".
        checkpoint_every, implementation, site_id, growth: accepted and ignored, they do not change what is computed.

    Raises:
        UnsupportedError: for a rule, write mode or readout that has no loop here.
    """
    for name, value, legal in (
        ("rule", rule, ("delta", "additive")),
        ("write", write, ("exact", "token", "chunk")),
        ("readout", readout, ("before_write", "after_write")),
    ):
        if value not in legal:
            raise UnsupportedError(name, got=value, want=" | ".join(legal), remedy="The oracle has no loop for it.")
    batch, width, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // key_heads
    scale = key_dim**-0.5 if scale is None else scale
    fmt = None if write == "exact" else parse(state_format)

    if cu_seqlens is None:
        bounds = [(i * width, (i + 1) * width) for i in range(batch)]
    else:
        edges = [int(edge) for edge in cu_seqlens]
        bounds = list(pairwise(edges))
    count = len(bounds)

    def per_sequence(lengths: Tensor | None, default: list[int]) -> list[int]:
        return default if lengths is None else [int(x) for x in torch.as_tensor(lengths).expand(count)]

    totals = per_sequence(sequence_lengths, [stop - start for start, stop in bounds])
    prefixes = [0] * count if write == "exact" else per_sequence(prefix_lengths, [0] * count)
    cursors = per_sequence(cursor, [-1] * count)

    # One unbind per tensor: its backward is one stack, where T separate selects would each write a whole gradient.
    tokens = [x.double().flatten(0, 1).unbind(0) if x is not None else None for x in (q, k, v, g, beta)]
    flat_q, flat_k, flat_v, flat_g, flat_beta = tokens
    assert flat_q is not None and flat_k is not None and flat_v is not None

    def key_vector(x: Tensor) -> Tensor:
        x = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() if qk_l2norm else x
        return x.repeat_interleave(group, dim=0)

    def step(state: Tensor, t: int) -> Tensor:
        key, value = key_vector(flat_k[t]), flat_v[t]
        if flat_g is not None:
            decay = flat_g[t].exp()
            state = state * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
        update = value - torch.einsum("hkv,hk->hv", state, key) if rule == "delta" else value
        if flat_beta is not None:
            update = flat_beta[t][:, None] * update
        return state + key[:, :, None] * update[:, None, :]

    def read(state: Tensor, t: int) -> Tensor:
        return scale * torch.einsum("hkv,hk->hv", state, key_vector(flat_q[t]))

    zero = torch.zeros(value_heads, value_dim, dtype=torch.float64, device=q.device)
    rows = [zero] * (batch * width)
    finals = []
    for i, (start, _) in enumerate(bounds):
        if initial_state is None:
            state = torch.zeros(value_heads, key_dim, value_dim, dtype=torch.float64, device=q.device)
        else:
            state = initial_state[i].double()
        split, stop = start + min(prefixes[i], totals[i]), start + totals[i]

        if split > start:
            if write == "chunk" and cursors[i] > 0 and fmt is not None:
                state = straight_through(state, fmt)  # a prefix starts from .dense(), and off its grid that rounds
            cursors[i] = -1
            for t in range(start, split):
                state = step(state, t)
                rows[t] = read(state, t)
        if fmt is None:
            for t in range(split, stop):
                state = step(state, t)
                rows[t] = read(state, t)
        elif stop > split:
            if cursors[i] == -1:
                state, cursors[i] = straight_through(state, fmt), 0
            for t in range(split, stop):
                exact = step(state, t)
                cursors[i] = (cursors[i] + 1) % chunk_size if write == "chunk" else 0
                state = straight_through(exact, fmt) if cursors[i] == 0 else exact
                rows[t] = read(exact if readout == "before_write" else state, t)
        finals.append(state)

    o = torch.stack(rows).reshape(batch, width, *zero.shape) if rows else zero.new_zeros(batch, width, *zero.shape)
    final_state = torch.stack(finals) if finals else zero.new_zeros(0, value_heads, key_dim, value_dim)
    return OracleResult(o, final_state, torch.tensor(cursors, dtype=torch.int32, device=q.device))

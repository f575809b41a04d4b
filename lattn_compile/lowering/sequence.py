"""Many tokens in ATen alone: `lattn::chunk` and `lattn::decode` for programs that run without this package.

As ops both call the vectorised kernels of `kernels/reference`, in eager and in compiled code. Those are Python: what is
compiled ahead of time (`to_aten`) cannot take them along. Here their equations stand once more for sequences of
one length, whose blocks are all alike: what needs no state for all blocks at once, then one loop of the graph
(`torch._higher_order_ops.scan`) that takes the state through them. T may be symbolic.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lattn_compile.kernels.reference.decay import ChannelDecay, HeadDecay
from lattn_compile.kernels.reference.padding import l2norm, split_heads
from lattn_compile.kernels.reference.span import by_group, fold, unfold, weighted
from lattn_compile.lowering._torch_export import loop
from lattn_compile.lowering._torch_private import without_mutation
from lattn_compile.lowering.step import first_state, is_plain_call, rounding, token
from lattn_compile.ops.call import PREFIX_CHUNK
from lattn_compile.ops.chunk import ChunkOptions
from lattn_compile.ops.decode import DecodeOptions, empty_checkpoints
from lattn_compile.ops.options import Options
from lattn_compile.ops.validate import Tensors

__all__ = ["chunk_sequence", "decode_sequence"]


def decode_sequence(*tensors: Any, **options: Any) -> Any:
    """Decomposition of `lattn::decode` for two and more tokens: one token at a time in a loop of the graph."""
    t, chosen = Tensors(*tensors), DecodeOptions(**options)
    if not is_plain_call(t, chosen) or _is_short(t.q.shape[1], 2) or chosen.checkpoint_every:
        return NotImplemented
    geometry, shared = chosen.checked(t)
    present = [x for x in (t.q, t.k, t.v, t.g, t.beta) if x is not None]
    tokens = [x.transpose(0, 1).to(geometry.dtype).contiguous() for x in present]
    has_g, has_beta = t.g is not None, t.beta is not None

    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> list[Tensor]:
        g, beta = (gates[0] if has_g else None), (gates[-1] if has_beta else None)
        o, final = token(state, q, k, v, g, beta, shared)
        return [final.contiguous(), o.contiguous()]

    first = rounding(shared.quantize)(first_state(t, geometry))
    final, o = loop(step, first.clone(memory_format=torch.contiguous_format), tokens, t.q.shape)
    kept = empty_checkpoints(t, geometry, shared.quantize, 0)
    return o.transpose(0, 1).to(t.q.dtype).contiguous(), final.contiguous(), kept


def chunk_sequence(*tensors: Any, **options: Any) -> Any:
    """Decomposition of an exact `lattn::chunk`: (o, final_state), or NotImplemented for what stays the op."""
    t, chosen = Tensors(*tensors), ChunkOptions(**options)
    ragged = t.cu_seqlens is not None or t.sequence_lengths is not None
    plain = (
        chosen.write == "exact"
        and chosen.implementation == "auto"
        and chosen.gate is None
        and not chosen.rounds_prefill
    )
    if t.q.device.type != "cpu" or ragged or not plain or _is_short(t.q.shape[1], 1):
        return NotImplemented
    geometry, shared = chosen.checked(t)

    def computed(*tensors: Any) -> tuple[Tensor, Tensor]:
        t = Tensors(*tensors)
        return _through_blocks(t, shared, first_state(t, geometry))

    # decay.py works in place on what it made itself.
    state, o = without_mutation(computed)(*tensors)
    return o.to(t.q.dtype), state


def _is_short(tokens: int | torch.SymInt, least: int) -> bool:
    """Of a symbolic number nothing is assumed: a loop that runs once or never is right as well."""
    return isinstance(tokens, int) and tokens < least


def _through_blocks(t: Tensors, options: Options, state: Tensor) -> tuple[Tensor, Tensor]:
    """(final state `[B, HV, K, V]`, o `[B, T, HV, V]`), both contiguous. The equations are those of
    `kernels/reference/chunk.py`; a token that fills up the last block has k, v, beta and g of 0, which changes nothing.
    """
    batch, tokens, key_heads, _ = t.q.shape
    value_heads, dtype = t.v.shape[2], state.dtype
    by_channel = t.g is not None and t.g.dim() == 4
    heads = value_heads if by_channel else key_heads
    groups = value_heads // heads
    size = PREFIX_CHUNK
    if isinstance(tokens, int) and tokens < size:
        size = 1 << (tokens - 1).bit_length()  # decay.py halves blocks
    count = (tokens + size - 1) // size
    if not isinstance(tokens, int):
        count += 1  # an empty block: torch asks of a symbolic size whether it is 1, and keeps to the answer

    def blocks(x: Tensor) -> Tensor:
        """`[B, T, ...]` to `[count * B, size, ...]`, block by block."""
        x = pad(x.to(dtype), [0, 0] * (x.dim() - 2) + [0, count * size - tokens])
        return x.unflatten(1, (count, size)).transpose(0, 1).flatten(0, 1)

    def gates(g: Tensor) -> Tensor:
        """`[count * B, HV, size, ...]`; what must not be positive is NaN, as in a step."""
        g = blocks(g).transpose(1, 2)
        return (g if options.growth else g.masked_fill(g > 0, math.nan)).contiguous()

    def values(x: Tensor) -> Tensor:
        """`[count * B, size, HV, ...]` to `[count * B, heads, groups, size, ...]`."""
        return split_heads(x, heads, 2).transpose(1, 2).transpose(2, 3).contiguous()

    q, k = (blocks(x).transpose(1, 2).contiguous() for x in (t.q, t.k))
    if options.qk_l2norm:
        q, k = l2norm(q)[0], l2norm(k)[0]
    beta = None if t.beta is None else values(blocks(t.beta)[..., None])
    known = weighted(values(blocks(t.v)), beta)
    decay: HeadDecay | ChannelDecay
    if by_channel:
        assert t.g is not None
        decay = ChannelDecay(q * options.scale, k, k, gates(t.g), apart=False)
    else:
        g = None if t.g is None else split_heads(gates(t.g), heads, 1)
        decay = HeadDecay(q * options.scale, k, k, g, groups, apart=False)

    per_block: dict[str, Tensor | None] = {"k_in": decay.k_in, "k_out": decay.k_out, "known": known, "beta": beta}
    per_block |= {"whole": decay.whole, "from_start": decay.from_start, "to_end": decay.to_end}
    if options.rule == "delta":
        # float64 for the reason in wy.py. The library's substitution, where the kernels have their own: it is one call.
        system = weighted(decay.overlaps(), beta)
        eye = torch.eye(size, dtype=system.dtype, device=system.device).expand_as(system)
        per_block["inverse"] = torch.linalg.solve_triangular(system + eye, eye, upper=False, unitriangular=True)
    present = {name: x for name, x in per_block.items() if x is not None}
    names = list(present)

    def step(state: Tensor, *rows: Tensor) -> list[Tensor]:
        x = dict(zip(names, rows, strict=True))
        updates = x["known"]
        if "inverse" in x:
            erased = weighted(weighted(unfold(x["k_in"] @ state, groups), x.get("from_start")), x.get("beta"))
            updates = (x["inverse"] @ (updates - erased).double()).to(dtype)
        after = state if "whole" not in x else (by_group(state, groups) * x["whole"]).flatten(-2)
        after = after + x["k_out"].mT @ fold(weighted(updates, x.get("to_end")))
        return [after, state.clone(), updates.clone(memory_format=torch.contiguous_format)]

    rows = [x.unflatten(0, (count, batch)).contiguous() for x in present.values()]
    first = fold(split_heads(state, heads, 1)).clone(memory_format=torch.contiguous_format)
    last, states, updates = loop(step, first, rows, t.q.shape)

    states, updates = states.flatten(0, 1), updates.flatten(0, 1)
    o = weighted(unfold(decay.q_in @ states, groups), decay.from_start) + decay.reads() @ updates
    o = o.transpose(2, 3).transpose(1, 2).flatten(2, 3).unflatten(0, (count, batch)).transpose(0, 1)
    return unfold(last, groups).flatten(1, 2).contiguous(), o.flatten(1, 2)[:, :tokens].contiguous()

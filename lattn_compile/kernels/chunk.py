"""`lattn::chunk` in Triton: the functions of `kernels.reference.chunk`, for CUDA and ROCm devices.

Nothing waits for lengths; grids follow from shapes. Per span of blocks, of bf16 inputs (launched by chunk_fine.py):

    place                              which program handles which tokens                        chunk_blocks.py
    head_rows                          keys and queries as products take them, and their factors chunk_rows.py
    pairs_rows                         what tokens of a block see of each other                  chunk_pairs.py
    block_fine                         both under a decay by channel                             chunk_channel*.py
    solve_fine                         the delta rule's inverse                                  chunk_solve.py
    carry                              the state from block to block, and the outputs            chunk_state*.py

and of others (chunk_call.py), in float32 and float64:

    pairs_*, solve                     pairs of tokens, and the inverse                          chunk_pairs.py, _solve
    key_operands, value_operands       what blocks need besides the state, in parallel           chunk_operands.py
    advance                            the state from block to block, and the outputs            chunk_forward.py

and the backward, from the last span to the first, each made again from the state before it:

    carry_back                         the way back through the state                            chunk_state_back.py
    retreat, grad_updates              the same of inputs that are not bf16                      chunk_backward.py
    grad_pairs                         what pairs of tokens get of it                            chunk_backward.py
    grad_keys, deliver                 gradients of keys, queries, gates and beta                chunk_gradients.py
    grad_levels                        what pairs add to them under a decay by channel           chunk_levels*.py

Hopper. Triton turns a product of 64 or more rows in a program of four or more warps into wgmma, whose operands are read
while the program runs on. The ptxas of CUDA 12.x, which Triton 3.4 to 3.7 bring for Hopper, uses registers again before
they were read, and its addresses go astray: wrong numbers, NaN, or an illegal access, in some shapes and not in others
(triton-lang/triton 9433, 11366, 11781; NVIDIA's release notes name the repair in CUDA 13.3). So no kernel here has such
a product: tiles of 32 rows, two warps, a batch of a warp each, or Gluon's `mma_v2`. Tests hold the compiled code to
that: there is no wgmma in it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels import chunk_call
from lattn_compile.kernels.chunk_call import Call
from lattn_compile.kernels.chunk_fine import FineCall
from lattn_compile.kernels.chunk_sizes import write
from lattn_compile.kernels.common.host import on, refused, refused_rounding

__all__ = ["WRITES", "backward", "forward", "supports"]

WRITES: frozenset[str] = frozenset({"bf16", "fp8_e4m3", "int8", "nvfp4"})
"""Formats whose rounding at grid lines was held to float64 on a GPU; others are refused."""

_MAX_STATE = 128 * 128
"""Places of the state in one program of `advance`: with more of them it spills."""


def supports(
    *, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, quantize: Quantizer | None
) -> str | None:
    """Why these kernels cannot compute such a call, in words, or None if they can.

    Args:
        dtype: of the arithmetic.
    """
    if (why := refused(device, dtype, key_dim, value_dim)) is not None:
        return why
    if quantize is None:
        return None
    if (why := refused_rounding("chunk", quantize, key_dim, value_dim)) is not None:
        return why
    if quantize.fmt.name not in WRITES:
        return f"unproven on a GPU: rounding of the state to {quantize.fmt.name} in the Triton chunk kernel"
    keys = max(16, triton.next_power_of_2(key_dim))
    if keys * max(32, write(quantize, key_dim, value_dim, keys)["BLOCK_V"]) > _MAX_STATE:
        return f"a tile of {quantize} with K = {key_dim}, V = {value_dim} does not fit into one program"
    return None


def _kind(*inputs: Tensor) -> type[Call]:
    return FineCall if all(x.dtype in chunk_call.LOW for x in inputs) else Call


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    offsets: Tensor | None,
    o: Tensor,
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None = None,
) -> Tensor:
    """As `kernels.reference.chunk.forward`, where `supports` has no objection."""
    if state.numel() == 0 or q.shape[0] == 0:
        return state.clone(memory_format=torch.contiguous_format)
    with on(q.device):
        call = _kind(q, k, v)(
            q, k, v, g, beta, starts, lengths, offsets, rule=rule, scale=scale, qk_l2norm=qk_l2norm,
            chunk_size=chunk_size, quantize=quantize, readout=readout,
        )  # fmt: skip
        source, final = state.contiguous(), torch.empty_like(state, memory_format=torch.contiguous_format)
        for skip in call.skips:
            call.advance(call.prepare(skip, read=True), source, final, o=o)
            source = final
    return final


@torch.no_grad()
def backward(
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    starts: Tensor,
    lengths: Tensor,
    offsets: Tensor | None,
    grads: dict[str, Tensor],
    *,
    rule: str,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
    quantize: Quantizer | None,
    readout: str,
    identity: Identity | None = None,
) -> Tensor:
    """As `kernels.reference.chunk.backward`, where `supports` has no objection."""
    dstate = torch.zeros_like(state, memory_format=torch.contiguous_format)
    if grad_final is not None:
        dstate.copy_(grad_final)
    if state.numel() == 0 or q.shape[0] == 0:
        return dstate
    given = {"dq": q, "dk": k, "dv": v, "dg": g, "dbeta": beta}
    # A name that nobody asks for is written all the same.
    out = {n: grads.get(n, torch.empty_like(x)) for n, x in given.items() if x is not None}
    grad_o = v.new_zeros(v.shape) if grad_o is None else grad_o
    with on(q.device):
        call = _kind(q, k, v)(
            q, k, v, g, beta, starts, lengths, offsets, rule=rule, scale=scale, qk_l2norm=qk_l2norm,
            chunk_size=chunk_size, quantize=quantize, readout=readout, backward=True,
        )  # fmt: skip
        # The state before every span.
        before = [state.contiguous()]
        for skip in call.skips[:-1]:
            before.append(torch.empty_like(before[0]))
            call.advance(call.prepare(skip, read=False), before[-2], before[-1])
        for skip in reversed(call.skips):
            span = call.prepare(skip, read=False, back=True)
            kept = call.new(span.schedule.blocks, call.value_heads, call.width, call.keys)
            behind = torch.empty_like(before[0])
            call.advance(span, before.pop(), behind, states=kept)
            passed = call.retreat(span, grad_o, dstate, kept, out["dv"])
            call.gradients(span, grad_o, (kept, behind), passed, out)
    return dstate

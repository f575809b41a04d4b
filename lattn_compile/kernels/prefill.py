"""Prefill with rounded operands or an approximate inverse in Triton: `kernels.reference.chunk` with `prefill`.

Rounding is that of `reference/prefill.py`, site by site and with its scales; products of codes are the device's own:
int8's in int32, fp8's and nvfp4's of fp16 numbers, which hold them (`prefill_codec.py`). Sites that are not rounded
keep the bits that `chunk_math.py` keeps. Per span of chunks:

    pairs_of_heads                  A without beta, and what queries have, of rows of q and k
                                    rounded once, under a decay by head                      prefill_heads.py
    rows, pairs_of_channels         norms; and the same, and decayed keys, under one by
                                    channel                                                  prefill_pairs.py
    solve                           T, by the policy's inverse, and how far off it is        prefill_solve.py
    state_operands                  W, keys to the chunk's end, and U                        prefill_operands.py
    walk                            the state from chunk to chunk, the only sequence, and O  prefill_walk.py

and the backward, from the last span to the first, each made again from the state before it:

    walk_back                       the way back through the state                           prefill_backward.py
    grad_reads, grad_system         of what tokens see of each other, of v and of T          prefill_gradients.py
    grad_keys                       of keys, queries, gates and beta                         prefill_gradients.py
    grad_channels                   what pairs add to them under a decay by channel          prefill_channels.py
    deliver                         sums over heads, and back through the norms              chunk_gradients.py

Launched by prefill_call.py and prefill_call_back.py. Nothing waits for lengths or residuals, which prefill_tally.py
counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lattn_compile.formats.quantizer import Identity, Quantizer
from lattn_compile.kernels.common.host import interpreted, on, refused
from lattn_compile.kernels.prefill_call import Call
from lattn_compile.kernels.prefill_call_back import BackwardCall
from lattn_compile.modes import Prefill

__all__ = ["backward", "forward", "lacking", "supports"]

INSTRUCTIONS = {
    "int8": ((8, 0), "int8 matrix products"),
    "fp8_e4m3": ((8, 9), "FP8 numbers"),
    "nvfp4": ((8, 0), "bf16 matrix products"),
}
"""Of a format: the first compute capability that has what its products are made of, and what that is."""


def supports(*, device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, prefill: Prefill) -> str | None:
    """Why these kernels cannot compute such a prefix, in words, or None if they can.

    Args:
        dtype: of the arithmetic.
    """
    if (why := refused(device, dtype, key_dim, value_dim)) is not None:
        return why
    if prefill.gradient == "series":
        return "the derivative of a series (gradient='series') is not in the Triton prefill kernels"
    if interpreted():
        return None
    return lacking(prefill, *_architecture(device))


def _architecture(device: torch.device) -> tuple[str, tuple[int, int]]:
    properties = torch.cuda.get_device_properties(device)
    name = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    return (name if torch.version.hip else ""), (properties.major, properties.minor)


def lacking(prefill: Prefill, amd: str, capability: tuple[int, int]) -> str | None:
    """What a device lacks for the formats of a policy, in words, or None.

    Args:
        amd: the architecture's name on AMD (`gfx942`), "" on NVIDIA. capability: on NVIDIA, (9, 0) on Hopper.
    """
    for site, name in prefill.formats.items():
        least, what = INSTRUCTIONS[name]
        if amd and name == "fp8_e4m3" and not amd.startswith(("gfx95", "gfx12")):
            return f"{amd} has no FP8 numbers of the kind E4M3 has elsewhere, which site {site} asks for"
        if not amd and capability < least:
            have, want = (f"sm_{major}{minor}" for major, minor in (capability, least))
            return f"{have} has no {what}, which {name} at site {site} is made of: they begin with {want}"
    return None


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
    prefill: Prefill,
    measured: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """As `kernels.reference.chunk.forward` with `prefill`, where `supports` has no objection.

    measured: gets the residuals of an approximate inverse, -1 where there is no chunk.
    """
    assert quantize is None and offsets is None, "a prefix has no grid"
    if state.numel() == 0 or q.shape[0] == 0:
        return state.clone(memory_format=torch.contiguous_format)
    with on(q.device):
        call = Call(
            q, k, v, g, beta, starts, lengths, rule=rule, scale=scale, qk_l2norm=qk_l2norm, prefill=prefill
        )  # fmt: skip
        source, final = state.contiguous(), torch.empty_like(state, memory_format=torch.contiguous_format)
        for skip in call.skips:
            span = call.prepare(skip)
            if measured is not None and span.residuals is not None:
                measured(span.residuals)
            call.advance(span, source, final, o=o)
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
    prefill: Prefill,
) -> Tensor:
    """As `kernels.reference.chunk.backward` with `prefill`, where `supports` has no objection."""
    assert quantize is None and offsets is None, "a prefix has no grid"
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
        call = BackwardCall(
            q, k, v, g, beta, starts, lengths, rule=rule, scale=scale, qk_l2norm=qk_l2norm, prefill=prefill
        )
        before = [state.contiguous()]  # every span
        for skip in call.skips[:-1]:
            before.append(torch.empty_like(before[0]))
            call.advance(call.prepare(skip), before[-2], before[-1])
        behind = torch.empty_like(before[0])
        for skip in reversed(call.skips):
            span = call.prepare(skip)
            kept = call.kept(span)
            call.advance(span, before.pop(), behind, kept=kept)
            call.gradients(span, grad_o, kept, call.retreat(span, grad_o, dstate), out)
    return dstate

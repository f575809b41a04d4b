"""`lattn::decode_packed`: one token of every slot, functionally, for a compiler that fuses it.

    decode_packed(q, k, v, g, beta, state, cursor, *, ...) -> (o, state, cursor)

What `lattn::decode_` does where each of its B sequences has the slot of its number and one token; what is stored anew
is returned instead of written. An op that writes in place is opaque to a compiler, which would call it. This one can be
taken apart (`lowering/packed.py`), and the copies behind it become stores to where the state lies. Where it is not
taken apart it is `lattn::decode_` on a copy, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lattn_compile.carry import Call
from lattn_compile.errors import surfacing
from lattn_compile.formats import parse
from lattn_compile.packed import ops

__all__ = ["FORMATS", "is_one_step"]

FORMATS = ("int8", "bf16", "fp32")
"""Stored formats that Inductor's C++ converts without changing a bit. It may drop what rounds to 8-bit floats."""

torch.library.define(
    "lattn::decode_packed",
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor[] state, Tensor cursor, *, "
    f"{ops.OPTIONS}) -> (Tensor, Tensor[], Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),
)


def is_one_step(call: Call, q: Tensor, numbers: Sequence[Tensor | None]) -> bool:
    """Whether a call is one that is worth taking apart: on a CPU, one token of every slot, written to nearest."""
    return (
        q.device.type == "cpu"
        and q.shape[1] == 1
        and all(x is None for x in numbers)
        and call.write in ("exact", "token")
        and (call.write == "exact" or call.idempotent)
        and parse(call.state_format).name in FORMATS
        and call.readout == "before_write"
        and call.implementation == "auto"
        and call.gate is None
    )


@torch.library.impl("lattn::decode_packed", "default")
def _step(*tensors: Any, **options: Any) -> tuple[Tensor, list[Tensor], Tensor]:
    *tokens, state, cursor = tensors
    state, cursor = [x.clone() for x in state], cursor.clone()
    o = torch.ops.lattn.decode_(*tokens, state, cursor, None, None, None, None, None, None, **options)
    return o, state, cursor


@torch.library.register_fake("lattn::decode_packed")
def _step_fake(*tensors: Any, **options: Any) -> tuple[Tensor, list[Tensor], Tensor]:
    q, k, v, g, beta, state, cursor = tensors
    with surfacing():
        ops.checked(q, k, v, g, beta, state, cursor, **options)
    return q.new_empty(v.shape), [torch.empty_like(x) for x in state], torch.empty_like(cursor)

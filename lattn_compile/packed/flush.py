"""`lattn::flush_`: pending records into the anchors (see `ops.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lattn_compile.errors import surfacing
from lattn_compile.packed import ops
from lattn_compile.packed.layout import Heads, compute_dtype, handed_over, unpack
from lattn_compile.packed.rows import Rows, check_rows, check_slots

__all__: list[str] = []


def _sizes(heads: Sequence[int], decay: str, has_beta: bool) -> Heads:
    key_heads, value_heads, key_dim, value_dim = heads
    return Heads(key_heads, value_heads, key_dim, value_dim, decay, has_beta)


def _flush(
    state: Sequence[Tensor],
    cursor: Tensor,
    state_indices: Tensor | None,
    position: Tensor | None,
    sequence_ids: Tensor | None,
    *,
    heads: Sequence[int],
    decay: str = "none",
    has_beta: bool = False,
    rule: str = "delta",
    **options: Any,
) -> None:
    call, sizes = ops.call_in(options), _sizes(heads, decay, has_beta)
    stored = ops.named(state, cursor, call, sizes)
    ops.check_position(position, cursor, call)
    sequences = cursor.shape[0] if state_indices is None else state_indices.shape[0]
    check_rows(cursor.device, cursor, state_indices, None, sequences)
    if ops.OPS[call.write] != "replay_" or call.window in (None, 1):
        return  # nothing is ever pending
    padding = options.get("padding_slot", -1)
    work = ops.work_of(call, cursor.device, compute_dtype(stored), sizes, torch.float32, options.get("site_id", 0))
    if (kernel := ops.kernel_of(call, work, stored)) is not None:
        check_slots(state_indices, cursor.shape[0], padding)
        own = {"heads": heads, "decay": decay, "has_beta": has_beta, "rule": rule, "padding_slot": padding}
        kernel.flush(stored, cursor, state_indices, **own, **ops.written(call, work))
        return
    rows = Rows.of(cursor, state_indices, None, sequences, padding)
    at = rows.read(cursor, -1)
    seen = None if position is None else rows.read(position)
    before = unpack({name: rows.read(y) for name, y in stored.items()}, call, at, sizes, rule=rule, position=seen)
    assert not isinstance(before, Tensor)
    made = handed_over(
        before.dense(),
        call,
        sizes,
        rule=rule,
        site_id=options.get("site_id", 0),
        position=seen,
        sequence_ids=sequence_ids,
    )
    writer = rows.writer(at > 0)
    for name, y in made.items():
        writer.write(stored[name], y)
    writer.write(cursor, torch.zeros_like(at))


def _flush_fake(state: Sequence[Tensor], cursor: Tensor, *rest: Any, **options: Any) -> None:
    with surfacing():
        sizes = _sizes(options["heads"], options.get("decay", "none"), options.get("has_beta", False))
        ops.named(state, cursor, ops.call_in(options), sizes)


ops.define("flush_", ops.FLUSH, _flush, _flush_fake)

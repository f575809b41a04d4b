"""What exported programs are taken apart with, in torch's private interfaces.

Tested on torch 2.13. When a torch release moves something, this file and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

__all__ = ["loop", "taken_apart"]


def loop(
    step: Callable[..., list[Tensor]], first: Tensor, rows: Sequence[Tensor], sizes: Sequence[int | torch.SymInt]
) -> tuple[Tensor, ...]:
    """One loop of the graph being traced, over the leading axis of `rows`. (`torch._higher_order_ops.scan.scan_op`)

    Args:
        step: `(carried, *one row of each)` to `[carried, *outputs]`, pure, its results new and contiguous; it reads no
            other tensor.
        first: what the first step carries.
        sizes: those of the call. Inductor makes the memory of the outputs from symbols that the loop is handed.

    Returns:
        What the last step carried, and the outputs of all steps, stacked.
    """
    from torch._higher_order_ops.scan import scan_op

    symbols = tuple(n for n in sizes if isinstance(n, torch.SymInt))
    count = 1 + len(rows)
    return tuple(scan_op(lambda *x: step(*x[:count]), [first], list(rows), additional_inputs=symbols))


def taken_apart(program: ExportedProgram, table: dict[Any, Callable[..., Any]]) -> ExportedProgram:
    """`program` in functional ATen, the ops of `table` spelled by it; what that declines, and all else, stays.

    A node made for an op keeps the op's metadata.
    """
    return program.run_decompositions(table)

"""Graphs of `gpu_graphs.py`, their launches interpreted, against the ops. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, device

from tests.kernels.triton_chunk_cases import _parts_in_float32  # noqa: F401 - a fixture: what the interpreter lacks
from tests.lowering.gpu_graphs import CASES, call

GRAPHS = Path(os.environ.get("LATTN_GRAPHS", "."))


class Launches:
    """A graph's `triton_kernel_wrapper_functional`: what a kernel writes to is a copy, and returned."""

    def __init__(self, kernels: dict[Any, Any]) -> None:
        self._kernels = kernels

    def __call__(
        self, *, kernel_idx: int, constant_args_idx: int, grid: Any, kwargs: Any, tensors_to_clone: Any, **_: Any
    ) -> dict[str, Tensor]:
        module, name, constants = self._kernels[kernel_idx, constant_args_idx]
        kernel = getattr(importlib.import_module(module), name)
        copies = {k: kwargs[k].clone() for k in tensors_to_clone}
        kernel[tuple(grid[0])](**{**kwargs, **constants, **copies})
        return copies


def poisoned(x: Any, *args: Any, **kwargs: Any) -> Tensor:
    made = torch.ops.aten.new_empty.default(x, *args, **kwargs)
    return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(77)


def run(name: str, arguments: list[Any]) -> tuple[Tensor, ...]:
    """What the graph of a case returns."""
    kept = torch.load(GRAPHS / f"{name}.pt", weights_only=False)
    code = kept["code"]
    for old, new in (
        ("torch.ops.higher_order.triton_kernel_wrapper_functional", "launches"),
        ("torch.ops.aten.new_empty.default", "poisoned"),
        ("device(type='cuda', index=0)", "device('cpu')"),
    ):
        code = code.replace(old, new)
    scope: dict[str, Any] = {
        "torch": torch,
        "device": device,
        "launches": Launches(kept["kernels"]),
        "poisoned": poisoned,
        "inf": torch.inf,
    }
    exec(code, scope)
    return scope["forward"](None, *(x for x in arguments if x is not None))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("_parts_in_float32")
@pytest.mark.parametrize("name", CASES)
def test_a_graph_of_launches_computes_the_op(name: str) -> None:
    op, arguments, keywords = call(name)
    before = [None if x is None else x.clone() for x in arguments]
    want = op(*arguments, **keywords, implementation="reference")
    got = run(name, arguments)
    assert all(x is None or torch.equal(x, y) for x, y in zip(arguments, before, strict=True)), "an input was written"
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), i
        if b.numel():
            error = (a.double() - b.double()).abs().max() / b.double().abs().max()
            assert error <= (1e-5 if b.dtype is torch.float32 else 2e-3), (i, error)

"""Graphs that `lowering/gpu.py` traces, in a form that another process can run: one with Triton's interpreter.

    python -m tests.lowering.gpu_graphs FOLDER      writes a file for each of CASES

A kernel is what its decorator made of it when it was imported, something to compile or something to interpret, and only
the first can be traced into a graph.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.ops.cases import inputs, options

__all__ = ["CASES", "call"]

CASES: dict[str, dict[str, Any]] = {
    "gdn": {"qk_l2norm": True},
    "kda": {"decay": "channel", "value_heads": 2, "key_dim": 20},
    "delta, no state": {"decay": None, "value_heads": 6, "value_dim": 5, "state": False},
    "additive": {"rule": "additive", "beta": False},
    "int8": {"write": "token", "state_format": "int8/*x8", "qk_l2norm": True},
    "fp16, read after": {"write": "token", "state_format": "fp16", "readout": "after_write"},
    "fp16 inputs": {"dtype": torch.float16, "qk_l2norm": True},
    "five tokens": {"tokens": 5},
    "ragged": {"tokens": 5, "lengths": True},
    "kept for a gradient": {"tokens": 9, "checkpoint_every": 4},
    "decode_backward": {"op": "decode_backward", "tokens": 5, "qk_l2norm": True, "write": "token"},
    "chunk": {"op": "chunk", "tokens": 20, "qk_l2norm": True},
    "chunk_backward": {"op": "chunk_backward", "tokens": 18, "decay": "channel", "value_heads": 2},
    "replay": {"op": "replay", "tokens": 11, "write": "replay", "window": 4, "qk_l2norm": True},
}


def call(name: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """The case's op, its arguments, on the CPU, and options."""
    case = {"op": "decode", "tokens": 1, **CASES[name]}
    shape = ("tokens", "decay", "value_heads", "key_dim", "value_dim", "state", "beta")
    given = {key: case.pop(key) for key in shape if key in case}
    op, dtype, ragged = case.pop("op"), case.pop("dtype", torch.float32), case.pop("lengths", False)
    tensors = inputs(batch=3, dtype=dtype, **given)
    tensors[5] = None if tensors[5] is None else tensors[5].float()
    arguments = [*tensors, None, None, torch.tensor([5, 0, 2]) if ragged else None, None]
    if op == "replay":
        arguments[6:6] = [None] * 6  # nothing is carried
    keywords = options(op, case.pop("write", "exact"), **case)
    if op.endswith("backward"):
        rng = torch.Generator().manual_seed(1)
        grads = [torch.randn(x.shape, generator=rng) for x in (tensors[2], tensors[5])]
        checkpoints = [torch.empty(0)] if op == "decode_backward" else []
        arguments = [*grads, *arguments, None, None, *checkpoints]
    return getattr(torch.ops.lattn, op).default, arguments, keywords


def traced(name: str) -> dict[str, Any]:
    """The code of the graph, and what its launches stand for."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch.fx.experimental.proxy_tensor import make_fx

    from lattn_compile.lowering import gpu
    from tests.lowering.cuda_codegen import fake_cuda

    op, arguments, keywords = call(name)
    keywords["implementation"] = "triton"
    spelled = next(x[1] for x in gpu.LOWERINGS if x[0] is op)
    # What the interpreter cannot do is a matter of options.
    with (
        fake_cuda(),
        mock.patch("lattn_compile.kernels.replay_run.interpreted", lambda: True),
        mock.patch("lattn_compile.kernels.chunk_call.PART", torch.float32),
    ):
        there = [None if x is None else torch.empty_like(x, device="cuda") for x in arguments]
        present = [x for x in there if x is not None]

        def run(*given: Any) -> Any:
            rest = iter(given)
            result = spelled(*(None if x is None else next(rest) for x in there), **keywords)
            assert result is not NotImplemented
            return result

        graph = make_fx(run, tracing_mode="real")(*present)
        graph.graph.eliminate_dead_code()
        graph.recompile()
    assert not [x for x in graph.graph.nodes if getattr(x.target, "namespace", "") == "lattn" and "qdq" not in x.name]
    kernels = {}
    for node in graph.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.triton_kernel_wrapper_functional
    ):
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        kernel = getattr(kernel, "fn", kernel) if type(kernel).__name__ == "Autotuner" else kernel
        constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
        kernels[node.kwargs["kernel_idx"], node.kwargs["constant_args_idx"]] = (
            kernel.fn.__module__,
            kernel.fn.__name__,
            dict(constants),
        )
    return {"code": graph.code, "kernels": kernels}


if __name__ == "__main__":
    for case in CASES:
        torch.save(traced(case), Path(sys.argv[1]) / f"{case}.pt")

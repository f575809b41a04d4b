"""`to_aten`: an exported program without this package's ops, to be compiled ahead of time and run without Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from lattn_compile.errors import LattnError, UnsupportedError
from lattn_compile.lowering import gpu, gpu_conv
from lattn_compile.lowering._torch_export import taken_apart
from lattn_compile.lowering.decompositions import LOWERINGS, Lowering, in_turn
from lattn_compile.lowering.sequence import chunk_sequence, decode_sequence

__all__ = ["to_aten"]

_SEQUENCES = (
    Lowering(torch.ops.lattn.decode.default, decode_sequence),
    Lowering(torch.ops.lattn.chunk.default, chunk_sequence),
)

_LAUNCHED = (
    gpu.chunk,
    gpu.chunk_backward,
    gpu.decode_backward,
    gpu.replay,
    gpu_conv.convolution,
    gpu_conv.convolution_backward,
)
"""Spelled as launches of kernels, which in a graph are places in a table of this process: not for a program, of which
only one token of `lattn::decode` on a GPU is so, to be compiled where it was made."""

_KEPT = {
    "decode": "one length for all sequences, all of them suffix, on a CPU or, of one token, on a GPU; rounding to "
    "nearest without feedback, rotation or gate; a policy's kernel='auto'",
    "chunk": "one length for all sequences, on a CPU; nothing rounded: neither the state on a grid nor operands of the "
    "prefill, gates or inverse; a policy's kernel='auto'",
}


def to_aten(program: ExportedProgram) -> ExportedProgram:
    """`program` with every `lattn::` op written out in ATen, in the same numbers up to the order of sums.

    What `torch._inductor.aoti_compile_and_package` makes of the result needs neither this package nor Python. A decode
    step is a few fused loops; a prefill and other long calls are one loop of the graph over blocks or tokens. Such a
    program computes only: it has no gradients, and a positive log decay makes NaN instead of an error.

    Args:
        program: of `torch.export`, usually the `.module` of `lc.rewrite`. Not changed.

    Raises:
        LattnError: something else than a program.
        UnsupportedError: an op, or a call of one, that only the op itself computes. Compile `program` as it is: its
            package then calls the ops, and whoever loads it has to `import lattn_compile` first.
    """
    if not isinstance(program, ExportedProgram):
        raise LattnError(
            "program",
            got=type(program).__name__,
            want="an ExportedProgram",
            remedy="torch.export.export makes one, and lc.rewrite(program, policy).module is one.",
        )
    spelled = taken_apart(program, in_turn((*(x for x in LOWERINGS if x.spelled not in _LAUNCHED), *_SEQUENCES)))
    for node in _nodes(spelled.graph_module):
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "lattn":
            continue
        name = target._opname
        raise UnsupportedError(
            "program",
            got=f"{target} at node {node.name}, options {dict(node.kwargs)}",
            want=_KEPT.get(name, "an op that is written out, as lattn::decode and lattn::chunk are"),
            remedy="Compile the program as it is, without to_aten, and `import lattn_compile` where the package is "
            "loaded: it calls the op there.",
        )
    return spelled


def _nodes(root: fx.GraphModule) -> Iterator[fx.Node]:
    """Of the graph and of the bodies of its regions."""
    for module in root.modules():
        if isinstance(module, fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")

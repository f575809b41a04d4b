"""Look at what the backend hands to Inductor, and run it without Inductor.

Most promises about a rewrite are about the graph; compiling it to C++ or Triton takes a hundred times longer than
running it node by node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from lattn_compile.lowering import _torch_private as private
from lattn_compile.passes.context import nodes_of
from lattn_compile.passes.recognize import overload_of
from lattn_compile.report import Report


@dataclass(frozen=True)
class OpCall:
    """One `lattn::` op as it ran: its schema name, arguments by schema name, and outputs."""

    op: str
    arguments: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]


@dataclass
class Record:
    """Graphs that came out of the passes while `recorded()` was active, newest last, and the ops that ran in them."""

    graphs: list[fx.GraphModule] = field(default_factory=list)
    calls: list[OpCall] = field(default_factory=list)

    @property
    def lattn_ops(self) -> int:
        """`lattn::` ops in the newest graph, those in its regions included."""
        return sum(str(n.target).startswith("lattn.") for n in nodes_of(self.graphs[-1]))

    @property
    def text(self) -> str:
        return str(self.graphs[-1].graph) if self.graphs else "no graph"

    @property
    def report(self) -> Report:
        from lattn_compile.backend import last_report

        report = last_report()
        assert report is not None
        return report


class _Recorder(fx.Interpreter):
    """Runs a graph node by node and keeps what went into and out of the `lattn::` ops."""

    def __init__(self, gm: fx.GraphModule, record: Record) -> None:
        super().__init__(gm)
        self.record = record

    def run_node(self, n: fx.Node) -> Any:
        overload = overload_of(n)
        if overload is None:
            return super().run_node(n)
        # Copies: a cache that was read here is written to by a later node.
        copied = tree_map_only(torch.Tensor, torch.clone, self.fetch_args_kwargs_from_env(n))
        result = super().run_node(n)
        names = [a.name for a in overload._schema.arguments]
        arguments = {**dict(zip(names, copied[0], strict=False)), **copied[1]}
        outputs = tree_map_only(torch.Tensor, torch.clone, result if isinstance(result, tuple) else (result,))
        self.record.calls.append(OpCall(overload._schema.name, arguments, outputs))
        return result


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """While active, `backend="lattn_compile"` runs its rewritten graphs eagerly, and they and their ops are kept."""
    record = Record()

    def compile_eagerly(gm: fx.GraphModule, inputs: Sequence[Any], *_: Any) -> Any:
        record.graphs.append(gm)
        return torch.compiler.disable(_Recorder(gm, record).run)

    with mock.patch.object(private, "compile_with_inductor", compile_eagerly):
        yield record

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

from torch import fx

from lattn_compile.lowering import _torch_private as private
from lattn_compile.report import Report


@dataclass
class Record:
    """Graphs that came out of the passes while `recorded()` was active, newest last."""

    graphs: list[fx.GraphModule] = field(default_factory=list)

    @property
    def lattn_ops(self) -> int:
        """`lattn::` ops in the newest graph."""
        return sum(str(n.target).startswith("lattn.") for n in self.graphs[-1].graph.nodes)

    @property
    def text(self) -> str:
        return str(self.graphs[-1].graph) if self.graphs else "no graph"

    @property
    def report(self) -> Report:
        from lattn_compile.backend import last_report

        report = last_report()
        assert report is not None
        return report


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    """While active, `backend="lattn_compile"` runs its rewritten graphs eagerly and keeps them."""
    record = Record()

    def run(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Any:
        record.graphs.append(gm)
        return gm.forward

    with mock.patch.object(private, "compile_with_inductor", run):
        yield record

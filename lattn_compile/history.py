"""What became of each compiled callable: `lc.last_report` and `lc.reports`.

A callable is what one call of torch.compile returned. It may be compiled into several graphs, frame by frame where its
graph breaks and again for other shapes, and Dynamo may give frames of it up. What it counts is its own; a reset of
Dynamo forgets all of it, as it forgets the code.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from lattn_compile.lowering import _torch_frames as frames
from lattn_compile.report import Report

__all__ = ["Compiled", "current", "last_report", "note", "reports", "watch"]

log = logging.getLogger("lattn_compile")


@dataclass(eq=False)
class Compiled:
    """One callable.

    Attributes:
        reports: of its graphs, oldest first.
        breaks, skipped: as in a report.
        idle_rules: by number, rules of the recipe that none of its graphs has a site for, in words; None before the
            first graph.
    """

    reports: list[Report] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    idle_rules: dict[int, str] | None = None

    @property
    def in_pieces(self) -> bool:
        """Whether one graph need not be all of it."""
        return bool(self.breaks or self.skipped)

    @property
    def has_sites(self) -> bool:
        return any(report.sites or report.unmatched for report in self.reports)

    def whole(self, report: Report) -> Report:
        """`report` with what is to be said of the callable."""
        return dataclasses.replace(report, graph_breaks=list(self.breaks), skipped_frames=list(self.skipped))


_callables: WeakKeyDictionary[object, Compiled] = WeakKeyDictionary()
_reports: deque[tuple[Compiled, Report]] = deque(maxlen=256)
_latest: Compiled | None = None


def current() -> Compiled:
    """The callable that is being compiled; a new one for a graph that comes from elsewhere."""
    frame = frames.current_frame()
    return Compiled() if frame is None else _callables.setdefault(frame.owner, Compiled())


def note(compiled: Compiled, report: Report) -> None:
    """A graph of `compiled` has reached the backend."""
    global _latest
    compiled.reports.append(report)
    _reports.append((compiled, report))
    _latest = compiled


def watch(backend: object, say: Callable[[str], None]) -> None:
    """Called once: from now on frames of callables that compile with `backend` are followed; `say` warns of those that
    Dynamo gives up."""
    frames.watch_frames(backend, functools.partial(_frame_done, say))
    frames.at_reset(_forget)


def _frame_done(say: Callable[[str], None], frame: frames.Frame) -> None:
    global _latest
    if not frame.breaks and frame.skipped is None:
        return
    compiled = _callables.setdefault(frame.owner, Compiled())
    compiled.breaks += frame.breaks
    if frame.skipped is not None:
        compiled.skipped.append(f"{frame.name}: {frame.skipped}")
        _latest = compiled
        say(f"Dynamo gave up on {frame.name}, which runs uncompiled: {frame.skipped}")


def _forget() -> None:
    global _latest
    _callables.clear()
    _reports.clear()
    _latest = None


def reports() -> list[Report]:
    """Reports of the graphs compiled in this process since the last `torch.compiler.reset()`, oldest first (256 at
    most). Graph breaks and skipped frames stand in the last one of their callable, so that
    `Report.merge(lc.reports())` is one table of them all: what regional compiles and graph breaks cut into pieces."""
    found = [compiled.whole(report) if report is compiled.reports[-1] else report for compiled, report in _reports]
    return found + [c.whole(Report()) for c in _callables.values() if c.skipped and not c.reports]


def last_report() -> Report | None:
    """Report of the most recent compile in this process: of its last graph, with the compiles, seconds, graph breaks
    and skipped frames of the callable that it belongs to.

    None if no graph of that callable has reached the backend (or of none, since the last `torch.compiler.reset()`); the
    log then says what Dynamo skipped.
    """
    if _latest is None or not _latest.reports:
        skipped = [] if _latest is None else _latest.skipped
        log.warning(
            "no graph has gone through the lattn_compile backend: Dynamo skipped %d frame(s) of the most recent "
            "compile%s; an error of the call says why, or compile with fullgraph=True",
            len(skipped),
            "".join(f"; {text}" for text in skipped),
        )
        return None
    graphs = _latest.reports
    seconds = sum(report.seconds for report in graphs)
    return dataclasses.replace(_latest.whole(graphs[-1]), compiles=len(graphs), seconds=seconds)

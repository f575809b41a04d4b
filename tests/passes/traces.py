"""Functional copies with and without what the tracer knows of calls, held against each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx

import lattn_compile.backend  # noqa: F401  (sets the tracer)
from lattn_compile.passes import normalize


@contextmanager
def counted(*, trace_all: bool = False) -> Iterator[list[int]]:
    """How many calls the graphs that are copied meanwhile trace. `trace_all`: those of `known` too."""
    traced: list[int] = []
    trace = normalize.HOOKS.trace

    def counting(*args: Any) -> Any:
        made = trace(*args[:-1], None if trace_all else args[-1])
        traced.append(made.calls)
        return made

    normalize.HOOKS.trace = counting
    try:
        yield traced
    finally:
        normalize.HOOKS.trace = trace


def same(a: fx.GraphModule, b: fx.GraphModule) -> None:
    """Equal code, equal values as far as a graph knows them, equal origin."""
    assert a.code == b.code
    for x, y in zip(a.graph.nodes, b.graph.nodes, strict=True):
        assert set(x.meta) == set(y.meta), x.name
        for key in ("stack_trace", "nn_module_stack", "custom", "original_aten", "source_fn_stack"):
            assert str(x.meta.get(key)) == str(y.meta.get(key)), (x.name, key)
        one, other = described(x.meta.get("val")), described(y.meta.get("val"))
        assert one == other, f"{x.name}: {one} is not {other}"
    for (name, x), (_, y) in zip(bodies(a), bodies(b), strict=True):
        if name:
            same(x, y)


def bodies(gm: fx.GraphModule) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in gm.named_children() if isinstance(m, fx.GraphModule)]


def described(value: Any) -> Any:
    """What matters of a fake value. Where torch knows an op's fake result, its offset is another than when it ran."""
    if isinstance(value, (list, tuple)):
        return [described(x) for x in value]
    if not isinstance(value, Tensor):
        return str(value)
    return str((value.dtype, value.device, value.shape, value.stride(), value.requires_grad))

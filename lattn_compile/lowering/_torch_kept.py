"""What a graph of Dynamo leaves behind in objects, and what it writes to: CUDA graphs lose the one and need the other.

A recorded graph's outputs lie in its own memory, and torch takes them back when the next one runs. That is right for
what a call returns, and wrong for what it stores in a cache. And a recorded graph may write only to inputs that are
known to stay where they are. Private interfaces of torch, tested on torch 2.11 to 2.13.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from lattn_compile.lowering._torch_private import _translator
from lattn_compile.mutation import written_by

__all__ = ["fix_address", "fix_written_attributes", "kept_outputs", "records"]

_STATIC = "_dynamo_static_input_type"


def records(patches: dict[str, Any]) -> bool:
    """Whether Inductor is to record CUDA graphs under these options."""
    from torch._inductor import config

    return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))


def fix_address(x: Tensor) -> None:
    """`x` stays where it is, as long as it is used: a CUDA graph may write to it. (`mark_static_address`)"""
    import torch._dynamo

    torch._dynamo.mark_static_address(x, guard=False)


def kept_outputs(graph: fx.Graph) -> list[fx.Node]:
    """Outputs of the graph that Dynamo stores in objects which outlive the call, or in objects of a class of their own
    that it makes and returns (a cache). Not those that the graph was given: storing them anew keeps nothing.

    Without a trace none is known. (`torch._dynamo.side_effects.SideEffects`)
    """
    tx = _translator()
    outputs = next(iter(graph.find_nodes(op="output")), None)
    if tx is None or outputs is None:
        return []
    reached = set(_reached(tx.output.side_effects))
    return [x for x in outputs.all_input_nodes if x in reached and x.op not in ("placeholder", "get_attr")]


def _reached(effects: Any) -> Iterator[fx.Node]:
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker

    found: list[fx.Node] = []
    seen: dict[int, Any] = {}

    def visit(variable: VariableTracker) -> None:
        if isinstance(variable, TensorVariable):
            found.append(variable.proxy.node)
        if variable in effects.store_attr_mutations:
            VariableTracker.visit(visit, dict(effects.store_attr_mutations[variable]), seen)

    for variable in list(effects.id_to_variable.values()):
        new = isinstance(variable.mutation_type, AttributeMutationNew | ValueMutationNew)
        if _is_own_object(variable) if new else effects.is_modified(variable):
            VariableTracker.visit(visit, variable, seen)
    yield from found


def _is_own_object(variable: Any) -> bool:
    """Whether a new object is more than a way to return several values, as dataclasses, tuples and dicts are."""
    from torch._dynamo.variables import UserDefinedObjectVariable

    if not isinstance(variable, UserDefinedObjectVariable):
        return False
    kind = variable.python_type()
    return not dataclasses.is_dataclass(kind) and not issubclass(kind, dict | tuple | list | BaseException)


def fix_written_attributes(graph: fx.Graph) -> list[fx.Node]:
    """Tells torch that attributes of objects which the graph writes to stay where they are, and returns their inputs.

    torch skips CUDA graphs for a graph that writes to any other input than those. Where one is elsewhere after all, the
    graph is recorded anew. Arguments of the compiled function are left alone: another call brings another tensor.
    """
    inputs = {}
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(x := node.meta.get("example_value"), Tensor) and _is_attribute(node):
            inputs[x.untyped_storage()._cdata] = node
    written: dict[fx.Node, None] = {}
    for node in graph.nodes:
        for target in written_by(node) or ():
            x = target.meta.get("example_value")
            if isinstance(x, Tensor) and (place := inputs.get(x.untyped_storage()._cdata)) is not None:
                written[place] = None
    for node in written:
        node.meta.setdefault("tensor_dict", {}).setdefault(_STATIC, "unguarded")
    return list(written)


def _is_attribute(node: fx.Node) -> bool:
    """Of an object, or a global: not an argument of the compiled function, nor in a list or dict that is one."""
    from torch._dynamo.source import AttrSource, LocalSource

    source = getattr(node.meta.get("grapharg"), "source", None)
    known = source is not None
    while source is not None and not isinstance(source, AttrSource):
        if isinstance(source, LocalSource):
            return False
        source = getattr(source, "base", None)
    return known

"""Reading a functional ATen graph: arguments by name, order, and which nodes are the same value."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.labels import is_one
from lattn_compile.passes.spelled.writer import value

__all__ = [
    "CASTS",
    "SHAPE_ONLY",
    "Index",
    "arguments",
    "given_arguments",
    "is_snapshot",
    "is_tensor",
    "name_of",
    "short_name",
    "widens",
]


def name_of(node: fx.Node) -> str:
    """`aten::mul` of a node that calls an overload, `getitem`, or the name of anything else that is called."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if target is operator.getitem:
        return "getitem"
    return str(getattr(target, "__name__", target)) if node.op == "call_function" else node.op


def short_name(node: fx.Node) -> str:
    """`mul` for `aten.mul.Tensor` and for `prims.mul`; other namespaces keep theirs (`lattn::decode`)."""
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else f"{namespace}::{name}"
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"higher_order::{node.target.name()}"
    return str(node.target)


def given_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names in the schema; those left to their defaults are missing."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    return {**{a.name: x for a, x in zip(node.target._schema.arguments, node.args, strict=False)}, **node.kwargs}


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an overload by schema name, defaults filled in."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    out: dict[str, Any] = {}
    for i, a in enumerate(target._schema.arguments):
        out[a.name] = node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
    return out


def is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(value(node), torch.Tensor)


def is_snapshot(node: fx.Node) -> bool:
    """A clone of an input that the graph writes to at its end: not the input's own memory, which changes."""
    source = node.args[0] if node.args else None
    return (
        name_of(node) == "aten::clone"
        and isinstance(source, fx.Node)
        and source.op in ("placeholder", "get_attr")
        and any(name_of(u) == "aten::copy_" and u.args[0] is source for u in source.users)
    )


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast keeps every value: it is no rounding."""
    if source == target:
        return True
    if not (source.is_floating_point and target.is_floating_point):
        return not source.is_floating_point and not source.is_complex and target.is_floating_point
    return torch.finfo(target).bits > torch.finfo(source).bits


CASTS = frozenset(["aten::_to_copy", "aten::to", "prims::convert_element_type", "aten::type_as"])

# These take the shape of a tensor, or nothing, and none of its values.
SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in [
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "rand_like",
        "randn_like",
        "sym_size",
    ]
)

_POINTWISE = frozenset(
    f"aten::{name}"
    for name in [
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "neg",
        "exp",
        "exp2",
        "log",
        "sigmoid",
        "tanh",
        "softplus",
        "pow",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "square",
        "log_sigmoid",
        "where",
        "minimum",
        "maximum",
        "clamp",
        "relu",
        "silu",
        "abs",
        "expm1",
        "log1p",
    ]
)


class Index:
    """Order of the nodes of one graph, the sections that switches of the grad mode cut it into, and one representative
    for nodes that compute the same value."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.ones = False  # whether axes of size 1 have a label of their own (`labels.py`)
        self.hidden: set[fx.Node] = set()  # what stands in the graph and is read by nothing (`stacked_reads.py`)
        self.order: dict[fx.Node, int] = {}
        self.section: dict[fx.Node, int] = {}
        self.same: dict[fx.Node, fx.Node] = {}
        self._repeated: dict[fx.Node, frozenset[int]] = {}
        known: dict[Any, fx.Node] = {}
        switches = 0
        for i, node in enumerate(graph.nodes):
            self.order[node] = i
            switches += name_of(node) == "_set_grad_enabled"
            self.section[node] = switches
            key = self._key(node)
            self.same[node] = node if key is None else known.setdefault(key, node)

    def _key(self, node: fx.Node) -> Any:
        target = node.target
        pure = target is operator.getitem or (
            isinstance(target, torch._ops.OpOverload)
            and target.namespace == "aten"
            and not target._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in target.tags
            # `empty` is a new unknown value each time.
            and "empty" not in target._schema.name
        )
        if node.op != "call_function" or not pure:
            return None
        try:
            key = (self.section[node], target, self._plain(node.args), self._plain(tuple(sorted(node.kwargs.items()))))
            hash(key)
        except TypeError:
            return None
        return key

    def _plain(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            return self.same[x]
        if isinstance(x, (list, tuple)):
            return tuple(self._plain(y) for y in x)
        # 1, 1.0 and True are equal keys, and not equal arguments.
        return (type(x), x)

    def repeated(self, node: fx.Node) -> frozenset[int]:
        """Axes along which a tensor holds the same values again and again, as far as expands tell."""
        if node not in self._repeated:
            self._repeated[node] = frozenset()  # until known: bounds the recursion
            found = self._find_repeated(node)
            shape = value(node).shape if found else ()
            self._repeated[node] = frozenset(i for i in found if not is_one(shape[i]))
        return self._repeated[node]

    def _find_repeated(self, node: fx.Node) -> frozenset[int]:
        name = name_of(node)
        if node.op != "call_function" or not is_tensor(node):
            return frozenset()
        rank = len(value(node).shape)
        inputs = [x for x in node.all_input_nodes if is_tensor(x)]
        if name in ("aten::expand", "aten::broadcast_to", "aten::expand_as"):
            source = node.args[0]
            new = rank - len(value(source).shape)
            was = self.repeated(source)  # type: ignore[arg-type]
            ones = [i for i, n in enumerate(value(source).shape) if is_one(n)]
            return frozenset([*range(new), *(i + new for i in was), *(i + new for i in ones)])
        if name in ("aten::clone", "aten::contiguous", "aten::_to_copy", "aten::to", "aten::alias"):
            return self.repeated(node.args[0])  # type: ignore[arg-type]
        if name == "aten::unsqueeze":
            dim = int(node.args[1]) % rank  # type: ignore[arg-type]
            return frozenset(i if i < dim else i + 1 for i in self.repeated(node.args[0]))  # type: ignore[arg-type]
        if name == "aten::transpose":
            a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
            return frozenset({a: b, b: a}.get(i, i) for i in self.repeated(node.args[0]))  # type: ignore[arg-type]
        if name == "aten::select":
            dim = int(node.args[1]) % (rank + 1)  # type: ignore[arg-type]
            return frozenset(i if i < dim else i - 1 for i in self.repeated(node.args[0]) if i != dim)  # type: ignore[arg-type]
        if name in _POINTWISE and inputs:
            out = set(range(rank))
            for x in inputs:
                shift = rank - len(value(x).shape)
                kept = self.repeated(x)
                out -= {i + shift for i, n in enumerate(value(x).shape) if i not in kept and not is_one(n)}
            return frozenset(out)
        return frozenset()

    def users(self, node: fx.Node) -> Iterator[fx.Node]:
        yield from sorted((u for u in node.users if u not in self.hidden), key=self.order.__getitem__)

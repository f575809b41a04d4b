"""One node a value: duplicates are merged, and what was written to a buffer is read from where it came from.

A loop that keeps its states in one tensor (`states[:, t + 1] = step(states[:, t])`) reads each from a buffer that was
just written; functionalised, that is a select of a scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from lattn_compile.passes.spelled.aten import Index, arguments, name_of
from lattn_compile.passes.spelled.identities import restore_identities
from lattn_compile.passes.spelled.labels import constant_size, is_one
from lattn_compile.passes.spelled.views import is_view
from lattn_compile.passes.spelled.writer import Writer, keep_gradient, value

__all__ = ["canonicalize"]

aten = torch.ops.aten

# What makes new memory stays apart: two outputs may not become one tensor.
_NEW = frozenset(
    f"aten::{name}"
    for name in [
        "clone",
        "contiguous",
        "_to_copy",
        "to",
        "zeros",
        "ones",
        "full",
        "empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "scalar_tensor",
        "arange",
        "eye",
        "rand",
        "randn",
        "lift_fresh_copy",
        "detach",
        "copy",
    ]
)


def canonicalize(gm: fx.GraphModule) -> None:
    """Merge equal nodes of a functional graph, call each op by one name, and read scattered values at their source."""
    _rename(gm.graph)
    _forget_likes(gm.graph)
    _drop_identities(gm.graph)
    _pick_by_select(gm.graph)
    restore_identities(gm.graph)
    for _ in range(2):
        changed = _forward_writes(gm.graph)
        _drop_overwritten(gm.graph)
        _merge(gm.graph)
        if not changed:
            break


def _renamings() -> dict[Any, Any]:
    """Overloads by which torch calls another op of the same arguments."""
    names = {
        "multiply": "mul",
        "subtract": "sub",
        "divide": "div",
        "true_divide": "div",
        "negative": "neg",
        "absolute": "abs",
        "clip": "clamp",
        "greater": "gt",
        "greater_equal": "ge",
        "less": "lt",
        "less_equal": "le",
        "not_equal": "ne",
        "ger": "outer",
        "concat": "cat",
        "moveaxis": "movedim",
        "swapaxes": "transpose",
        "swapdims": "transpose",
        **{f"special_{name}": name for name in ("exp2", "expm1", "erf", "erfc", "log1p", "softmax", "log_softmax")},
        "special_expit": "sigmoid",
    }
    found: dict[Any, Any] = {}
    for other, name in names.items():
        packet = getattr(aten, name)
        for overload in getattr(aten, other).overloads():
            to = {"swapaxes": "int", "swapdims": "int", "special_softmax": "int", "special_log_softmax": "int"}.get(
                other, overload
            )
            if "out" not in overload and to in packet.overloads():
                found[getattr(getattr(aten, other), overload)] = getattr(packet, to)
    return found


_RENAMED = _renamings()


def _rename(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is aten.type_as.default and len(node.args) == 2:
            # Its second argument is a dtype and no value, which would lie on a state's path.
            x, like = (value(a) for a in node.args)
            if x.device == like.device:
                node.target, node.args = aten.to.dtype, (node.args[0], like.dtype)
        elif node.op == "call_function" and not node.kwargs and node.target in _RENAMED:
            node.target = _RENAMED[node.target]


_LIKES = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}


def _forget_likes(graph: fx.Graph) -> None:
    """A `new_zeros` has its sizes in its arguments, and takes but a dtype and a device of the tensor it is called on,
    which need not be run to compare the two spellings."""
    for node in graph.nodes:
        made = value(node)
        if node.target in _LIKES and type(made) in (torch.Tensor, FakeTensor):
            node.target, node.args = _LIKES[node.target], node.args[1:]
            node.kwargs = {"dtype": made.dtype, "device": made.device}


def _drop_identities(graph: fx.Graph) -> None:
    """x * 1, x / 1, x + 0, x - 0 of the same shape and dtype are x."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    neutral = {"aten::mul": 1, "aten::div": 1, "aten::add": 0, "aten::sub": 0}
    for node in list(graph.nodes):
        name = name_of(node)
        if name not in neutral or len(node.args) != 2 or node.kwargs:
            continue
        x, other = node.args
        if isinstance(x, fx.Node) and type(other) in (int, float) and other == neutral[name]:
            a, b = value(x), value(node)
            if isinstance(a, torch.Tensor) and a.dtype == b.dtype and _fresh(x) and output not in node.users:
                node.replace_all_uses_with(x)
                graph.erase_node(node)


def _pick_by_select(graph: fx.Graph) -> None:
    """A slice of length 1 without its axis, as a decomposed `unbind` has them, is a select."""
    for node in list(graph.nodes):
        if node.target not in (aten.squeeze.dim, aten.squeeze.dims) or name_of(part := node.args[0]) != "aten::slice":
            continue
        dims, place = node.args[1], _place(part)
        if place is not None and (list(dims) if isinstance(dims, (list, tuple)) else [dims]) == [place[0]]:
            node.replace_all_uses_with(Writer(node, node).call(aten.select.int, part.args[0], *place))
            graph.erase_node(node)


def _fresh(x: fx.Node) -> bool:
    """Whether a value has memory of its own: a product with 1 of an input is a copy of it, which may matter."""
    while x.op == "call_function" and (is_view(x) or name_of(x) in ("aten::select", "aten::slice", "getitem")):
        if not isinstance(x.args[0], fx.Node):
            break
        x = x.args[0]
    return x.op == "call_function"


def _merge(graph: fx.Graph) -> None:
    index = Index(graph)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    for node, same in index.same.items():
        if node is same or name_of(node) in _NEW:
            continue
        if output in node.users and isinstance(value(node), torch.Tensor):
            # Outputs that were two tensors stay two.
            clone = Writer(node, node).call(aten.clone.default, same)
            keep_gradient(clone, node)
            output.replace_input_with(node, clone)
        node.replace_all_uses_with(same)
        graph.erase_node(node)


def _forward_writes(graph: fx.Graph) -> bool:
    changed = False
    for node in list(graph.nodes):
        if name_of(node) not in ("aten::select", "aten::slice"):
            continue
        source = _source(node)
        if source is None:
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        changed = True
    for node in reversed(graph.nodes):
        if name_of(node) in _SCATTERS and not node.users:  # a buffer that nothing reads keeps no state
            graph.erase_node(node)
    return changed


def _drop_overwritten(graph: fx.Graph) -> None:
    """Entries of a buffer that are written again before anything reads them are not written."""
    for top in reversed(list(graph.nodes)):
        if name_of(top) not in _SCATTERS or (any(_continues(top, user) for user in top.users) and len(top.users) == 1):
            continue
        covered: set[tuple[int, int]] = set()
        above: fx.Node | None = None
        for write in list(_writes(top)):
            place = _place(write)
            if place is None or (covered and place[0] != next(iter(covered))[0]) or (above and len(write.users) != 1):
                break
            if place in covered and above is not None:
                above.replace_input_with(write, write.args[0])  # type: ignore[arg-type]
                graph.erase_node(write)
            else:
                covered.add(place)
                above = write


def _continues(write: fx.Node, user: fx.Node) -> bool:
    return name_of(user) in _SCATTERS and user.args[0] is write


_SCATTERS = frozenset(["aten::select_scatter", "aten::slice_scatter"])


def _place(node: fx.Node) -> tuple[int, int] | None:
    """(dim, position) of a select, a slice of length 1, or the write of one."""
    a = arguments(node)
    name = name_of(node)
    whole = value(a["self"])
    if not isinstance(whole, torch.Tensor):
        return None
    dim = a["dim"] % whole.dim()
    size = constant_size(whole.shape[dim])
    at: Any = a["index"] if name in ("aten::select", "aten::select_scatter") else a.get("start") or 0
    if not isinstance(at, int) or size is None:
        return None
    if name in ("aten::slice", "aten::slice_scatter"):
        part = value(node) if name == "aten::slice" else value(a["src"])
        if not is_one(part.shape[dim]):
            return None
        at = max(at + size, 0) if at < 0 else at
    return dim, at % size if at < 0 else at


def _source(node: fx.Node) -> fx.Node | None:
    """What a select reads from a buffer that was written entry by entry: the value, or the buffer further back."""
    place = _place(node)
    if place is None:
        return None
    base: Any = node.args[0]
    for write in _writes(base):
        written = _place(write)
        if written is None or written[0] != place[0]:
            break
        if written[1] == place[1]:
            return _as(node, write)
        base = write.args[0]
    if base is node.args[0]:
        return None
    return Writer(node, node).call(node.target, base, *node.args[1:], **node.kwargs)


def _writes(node: Any) -> Iterator[fx.Node]:
    while isinstance(node, fx.Node) and name_of(node) in _SCATTERS:
        yield node
        node = node.args[0]


def _as(node: fx.Node, write: fx.Node) -> fx.Node:
    """The written value in the shape and dtype that the select has."""
    a = arguments(write)
    x, dim = a["src"], a["dim"] % value(node.args[0]).dim()
    w = Writer(node, node)
    if name_of(write) == "aten::slice_scatter" and name_of(node) == "aten::select":
        x = w.call(aten.squeeze.dim, x, dim)
    elif name_of(write) == "aten::select_scatter" and name_of(node) == "aten::slice":
        x = w.unsqueeze(x, dim)
    return w.expand(w.to(x, value(node).dtype), value(node).shape)

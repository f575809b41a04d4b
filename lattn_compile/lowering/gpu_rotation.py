"""Norm and rotation of a token's queries and keys in a decode step on a GPU: one kernel (`kernels/rotate_step.py`).

A pass over a graph of a decode step that is about to be lowered. Taken is, where the graph says exactly that: of each
head `x * rsqrt(mean(x * x) + eps) * (weight + 1)` in fp32, cast back; of the first R channels of that
`x * cos + cat(-x[R / 2 :], x[: R / 2]) * sin`, joined with the others. Of one input, queries and keys are one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lattn_compile.lowering import _torch_triton as private
from lattn_compile.lowering.gpu_fold import Placed, erase, memory_of, origin, placed

__all__ = ["fold_rotations"]

_aten, _prims = torch.ops.aten, torch.ops.prims


class _Rotated(NamedTuple):
    """A node `[N, heads, 1, D]` that is heads normed and turned."""

    node: fx.Node
    at: Placed
    weight: fx.Node
    cos: fx.Node
    sin: fx.Node
    eps: float
    heads: int


def fold_rotations(graph: fx.Graph) -> int:
    """Puts one kernel in the place of norms and rotations of queries and keys in `graph`; returns how many it has."""
    found = [x for node in graph.find_nodes(op="call_function", target=_aten.cat.default) if (x := _rotated(node))]
    for pair in _pairs(found):
        _replace(graph, pair)
    if found:
        private.sorted_again(graph)
    return len(found)


def _pairs(found: list[_Rotated]) -> Iterator[list[_Rotated]]:
    """Neighbours that are made of products of one input by one rotation."""
    while found:
        first, *found = found
        pair = [first]
        if found and _of_one_input(first, found[0]):
            pair.append(found.pop(0))
        yield pair


def _of_one_input(a: _Rotated, b: _Rotated) -> bool:
    turns = [(origin(x.cos), origin(x.sin), _shape(x.cos), x.eps, *_shape(x.node)[::3]) for x in (a, b)]
    if turns[0] != turns[1]:
        return False
    products = [memory_of(x.at.node) for x in (a, b)]
    if not all(_is(x, _aten.mm.default) for x in products):
        return False
    x, y = (origin(product.args[0]) for product in products)  # type: ignore[arg-type]
    return x is y


def _replace(graph: fx.Graph, pair: list[_Rotated]) -> None:
    from lattn_compile.kernels import rotate_step

    first = pair[0]
    dim, turned = _shape(first.node)[-1], _shape(first.cos)[-1]

    def call(cos: Tensor, sin: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        heads = [rotate_step.Heads(next(given), next(given), x.heads, x.at.row, x.at.group, x.at.run) for x in pair]
        cos, sin = (x.reshape(-1, turned) for x in (cos, sin))
        outs = rotate_step.forward(heads[0], heads[1] if len(heads) > 1 else None, cos, sin, dim, first.eps)
        return tuple(o.unsqueeze(2) for o in outs)

    nodes = [first.cos, first.sin, *(node for x in pair for node in (x.at.node, x.weight))]
    results = private.inserted(graph, pair[-1].node, call, nodes)
    for x, result in zip(pair, results, strict=True):
        x.node.replace_all_uses_with(result)
    erase(graph, [x.node for x in pair])


def _rotated(node: fx.Node) -> _Rotated | None:
    from lattn_compile.kernels import rotate_step

    given: Any = node.args
    parts, dim = given[0], given[1] if len(given) > 1 else 0
    shape = _shape(node)
    if len(shape) != 4 or shape[2] != 1 or dim not in (-1, 3) or not isinstance(parts, (list, tuple)):
        return None
    if len(parts) != 2 or not all(isinstance(n, int) for n in shape):
        return None
    added, rest = parts
    turned = _shape(added)[-1]
    normed = _sliced(rest, turned, shape[3])
    if normed is None or not rotate_step.supports(shape[3], turned, _value(normed).dtype):
        return None
    if any(_value(x).dtype is not _value(normed).dtype for x in (node, added)):
        return None
    turns = _turns(added, normed, turned, shape[0])
    norm = _norm(normed, shape)
    if turns is None or norm is None:
        return None
    raw, weight, eps = norm
    at = placed(raw, shape[0], shape[1] * shape[3])
    if at is None or at.step != 1:
        return None
    return _Rotated(node, at, weight, *turns, eps, shape[1])


def _turns(added: Any, normed: Any, turned: int, batch: int) -> tuple[fx.Node, fx.Node] | None:
    """cos and sin of `x * cos + halves(x) * sin`, x the first channels of `normed`."""
    for along, across in _either(added, _aten.add.Tensor):
        for x, cos in _either(along, _aten.mul.Tensor):
            for halves, sin in _either(across, _aten.mul.Tensor):
                if not (_sliced(x, 0, turned) is normed and _exchanged(halves, x, turned)):
                    continue
                sizes = [(n, 1, 1, turned) for n in (1, batch)]
                given = [_value(y) for y in (cos, sin)]
                if all(tuple(y.shape) in sizes and y.dtype is _value(normed).dtype for y in given) and (
                    given[0].shape == given[1].shape
                ):
                    return cos, sin
    return None


def _exchanged(node: Any, x: Any, turned: int) -> bool:
    """Whether it is `cat(-x[R / 2 :], x[: R / 2])`."""
    if not _is(node, _aten.cat.default) or len(node.args[0]) != 2 or tuple(node.args[1:]) not in ((-1,), (3,)):
        return False
    negative, first = node.args[0]
    half = turned // 2
    if not _is(negative, _aten.neg.default) or _shape(x)[-1] != turned:
        return False
    return _sliced(negative.args[0], half, turned) is x and _sliced(first, 0, half) is x


def _norm(normed: Any, shape: tuple[int, ...]) -> tuple[fx.Node, fx.Node, float] | None:
    """x, weight and eps, of `[N, 1, heads, D]` with the middle axes exchanged."""
    if not _is(normed, _aten.permute.default) or normed.args[1] != [0, 2, 1, 3]:
        return None
    cast = normed.args[0]
    if not _is(cast, _prims.convert_element_type.default):
        return None
    for scaled, more in _either(cast.args[0], _aten.mul.Tensor):
        if not _is(more, _aten.add.Tensor) or more.args[1] != 1 or not isinstance(more.args[0], fx.Node):
            continue
        if _value(more).dtype is not torch.float32:  # rounded to the type of the weights
            continue
        weight = _uncast(more.args[0])
        value = _value(weight)
        if tuple(value.shape) != (shape[3],) or value.stride() != (1,) or weight.op not in ("placeholder", "get_attr"):
            continue
        for wide, root in _either(scaled, _aten.mul.Tensor):
            eps = _root_of_mean_square(root, wide)
            if eps is None or _value(wide).dtype is not torch.float32:
                continue
            raw = _uncast(wide)
            if _value(raw).dtype is _value(cast).dtype and raw is not wide:
                return raw, weight, eps
    return None


def _root_of_mean_square(node: Any, x: Any) -> float | None:
    """eps of `rsqrt(mean(x ** 2, -1, keepdim) + eps)`."""
    if not _is(node, _aten.rsqrt.default) or not _is(node.args[0], _aten.add.Tensor):
        return None
    mean, eps = node.args[0].args
    if not _is(mean, _aten.mean.dim) or not isinstance(eps, float) or len(mean.args) != 3:
        return None
    square, dims, kept = mean.args
    if list(dims) not in ([-1], [3]) or not kept or not _is(square, _aten.pow.Tensor_Scalar):
        return None
    return eps if square.args == (x, 2) else None


def _sliced(node: Any, start: int, end: int) -> Any:
    """x, of which `node` is channels from start up to end."""
    if not _is(node, _aten.slice.Tensor) or len(node.args) != 4 or node.args[1] not in (-1, 3):
        return None
    x, _, first, last = node.args
    size = _shape(x)[-1]
    return x if first == start and min(last, size) == end else None


def _either(node: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    if _is(node, target) and len(node.args) == 2:
        a, b = node.args
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            yield a, b
            yield b, a


def _uncast(node: Any) -> Any:
    wide = _is(node, _prims.convert_element_type.default) and node.args[1] is torch.float32
    return node.args[0] if wide else node


def _is(node: Any, target: Any) -> bool:
    """Whether it is a call of `target` with nothing but arguments in order: no alpha, no dtype."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target and not node.kwargs


def _value(node: Any) -> Any:
    return node.meta["val"]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(_value(node).shape)

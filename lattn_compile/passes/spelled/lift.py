"""One call for all tokens: what an ATen op does to `x_t`, token by token, done once to `x` with a leading token axis.

A rule takes one token's call and returns how to write the call for all of them, or None where there is no such call.
Rules decide before anything is written. Everything here is an identity of values; strides may differ, so what was a
view is written as a reshape.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.labels import constant_size, same_size
from lattn_compile.passes.spelled.writer import Writer, aten, value

Write = Callable[[], fx.Node]
Rule = Callable[["Call"], "Write | None"]


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


class Operand:
    """One tensor of every token: the same one (`constant`), known how to write for all (`write`), or neither (opaque).

    Attributes:
        value: the fake value of the first token's.
        sources: the nodes whose pieces or values it is written from.
    """

    def __init__(
        self,
        writer: Writer,
        length: Any,
        value: torch.Tensor,
        *,
        constant: fx.Node | None = None,
        write: Write | None = None,
        column: Sequence[fx.Node] = (),
        sources: frozenset[fx.Node] = frozenset(),
    ) -> None:
        self.writer, self.length, self.value = writer, length, value
        self.constant, self.write, self.column, self.sources = constant, write, column, sources
        self._stacked: fx.Node | None = None

    @property
    def opaque(self) -> bool:
        return self.constant is None and self.write is None

    @property
    def rank(self) -> int:
        return self.value.dim()

    def stacked(self) -> fx.Node:
        """`[T, *shape]`, written once."""
        if self._stacked is None:
            if self.constant is not None:
                x = self.writer.unsqueeze(self.constant, 0)
                if same_size(self.length, 1):
                    self._stacked = x
                else:
                    sizes = [self.writer.size(n) for n in (self.length, *self.value.shape)]
                    self._stacked = self.writer.call(aten.expand.default, x, sizes)
            elif self.write is not None:
                self._stacked = self.write()
            else:
                self._stacked = self.writer.call(aten.stack.default, list(self.column), 0)
        return self._stacked

    def aligned(self, rank: int) -> fx.Node:
        """Broadcasts as one of `rank` axes, and the token axis before them, does: a constant stays as it is."""
        return self.constant if self.constant is not None else widen(self.writer, self.stacked(), rank + 1)


def widen(writer: Writer, x: fx.Node, rank: int) -> fx.Node:
    """`[T, *s]` to `[T, 1, .., 1, *s]`."""
    for _ in range(rank - value(x).dim()):
        x = writer.unsqueeze(x, 1)
    return x


class Tensors(tuple[fx.Node, ...]):
    """A tensor argument as it stands in the tokens' calls: one node each."""


class Call:
    """One token's call. `args` holds the arguments that were given, by their names in the schema.

    Tensor arguments become `Operand`s when a rule asks for them, so that what a rule ignores is never looked at.
    """

    def __init__(
        self, writer: Writer, length: Any, node: fx.Node, args: Mapping[str, Any], resolve: Callable[[Any], Operand]
    ) -> None:
        self.writer, self.length, self.node, self.args, self._resolve = writer, length, node, args, resolve
        self.value: torch.Tensor = value(node)
        self.asked: list[Operand] = []

    def __getitem__(self, name: str) -> Any:
        """An argument or its default, tensors as operands."""
        if name not in self.args:
            return next(a.default_value for a in self.node.target._schema.arguments if a.name == name)  # type: ignore[union-attr]
        return self._operands(self.args[name])

    def _operands(self, arg: Any) -> Any:
        if isinstance(arg, list | tuple) and any(isinstance(x, Tensors) for x in arg):
            return [self._operands(x) for x in arg]
        if not isinstance(arg, Tensors):
            return arg
        operand = self._resolve(arg)
        self.asked.append(operand)
        return operand

    def tensors(self) -> dict[str, Operand]:
        """Every tensor argument; lists of tensors are not among them."""
        return {name: self[name] for name, arg in self.args.items() if isinstance(arg, Tensors)}

    def write(self, target: Any = None, /, **changed: Any) -> fx.Node:
        """The call with some arguments changed. Strides are not kept, so a memory format is not asked for."""
        target = self.node.target if target is None else target
        given = {**self.args, **changed}
        given.pop("memory_format", None)
        schema = target._schema.arguments
        positional = [a for a in schema if not a.kwarg_only]
        while positional and positional[-1].name not in given:
            positional.pop()
        return self.writer.call(
            target,
            *(given.get(a.name, a.default_value) for a in positional),
            **{a.name: given[a.name] for a in schema if a.kwarg_only and a.name in given},
        )


def bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the schema of an overload."""
    names = [a.name for a in target._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


# --- rules ---------------------------------------------------------------------------------------------------------


def _pointwise(call: Call) -> Write | None:
    operands = call.tensors()
    kinds = {(x.value.dtype, x.value.device) for x in operands.values()}
    if len(kinds) > 1 and any(x.rank == 0 and x.constant is None for x in operands.values()):
        return None  # a tensor without axes is a number to type promotion; with a token axis it is not
    rank = call.value.dim()
    return lambda: call.write(**{name: x.aligned(rank) for name, x in operands.items()})


def _identity(call: Call) -> Write | None:
    x: Operand = call["self"]
    return x.stacked


def _copy(call: Call) -> Write | None:
    """`copy(self, src)`: src in self's dtype and shape."""
    src: Operand = call["src"]
    if src.value.device != call.value.device:
        return None

    def write() -> fx.Node:
        x = widen(call.writer, src.stacked(), call.value.dim() + 1)
        return _expand_to(call, call.writer.to(x, call.value.dtype))

    return write


def _expand_to(call: Call, x: fx.Node) -> fx.Node:
    shape = [call.length, *call.value.shape]
    if same_sizes(value(x).shape, shape):
        return x
    return call.writer.call(aten.expand.default, x, [call.writer.size(n) for n in shape])


def _expand(call: Call) -> Write | None:
    x: Operand = call["self"]
    return lambda: _expand_to(call, widen(call.writer, x.stacked(), call.value.dim() + 1))


_ORDERED = (
    *(aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
"""Views that keep elements in their order: of a chain of them the last says it all."""


def reshaped(writer: Writer, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
    """As `writer.reshape`, of what `x` was made of. What the writer did not write is left to be given."""
    while not same_sizes(value(x).shape, shape) and x.target in _ORDERED and x in writer.inserted:
        x = x.args[0]  # type: ignore[assignment]
    return writer.reshape(x, shape)


def _reshape(call: Call) -> Write | None:
    x: Operand = call["self"]

    def write() -> fx.Node:
        return reshaped(call.writer, x.stacked(), [call.length, *call.value.shape])

    return write


def permutation(node: fx.Node) -> list[int] | None:
    """The axes a node permutes, if that is all it does: output axis i is input axis `[i]`."""
    rank = value(node).dim()
    dims = list(range(rank))
    if node.target is aten.permute.default:
        return [d % rank for d in node.args[1]]  # type: ignore[union-attr, operator, misc]
    if node.target is aten.transpose.int and rank:
        a, b = node.args[1] % rank, node.args[2] % rank  # type: ignore[operator]
        dims[a], dims[b] = dims[b], dims[a]
        return dims
    if node.target in (aten.t.default, aten.numpy_T.default):
        return dims[::-1]
    if node.target is aten.mT.default:
        return [*dims[:-2], dims[-1], dims[-2]]
    return None


def _permute(call: Call) -> Write | None:
    dims = permutation(call.node)
    x: Operand = call["self"]
    return None if dims is None else lambda: call.writer.permute(x.stacked(), [0, *(d + 1 for d in dims)])


_DIMS = ("dim", "dims", "dim0", "dim1")


def _shift(call: Call) -> Write | None:
    """Axes are named by number: each is one further on."""
    operands = call.tensors()
    rank = operands["self"].rank + (call.node.target is aten.unsqueeze.default)
    schema = [a.name for a in call.node.target._schema.arguments]  # type: ignore[union-attr]
    changed: dict[str, Any] = {}
    for name in _DIMS:
        if name in schema:
            dims = call[name]
            if dims is None or dims == [] or rank == 0:
                return None
            changed[name] = dims % rank + 1 if isinstance(dims, int) else [d % rank + 1 for d in dims]
    return lambda: call.write(**changed, **{name: x.stacked() for name, x in operands.items()})


def _reduce(call: Call) -> Write | None:
    """As `_shift`; no axis means all of them."""
    x: Operand = call["self"]
    if x.rank == 0:
        return None
    if not call["dim"] and call["dim"] != 0:
        return lambda: call.write(self=x.stacked(), dim=list(range(1, x.rank + 1)))
    return _shift(call)


def _reduce_all(overload: Any) -> Rule:
    def rule(call: Call) -> Write | None:
        x: Operand = call["self"]
        if x.rank == 0:
            return None
        return lambda: call.write(overload, self=x.stacked(), dim=list(range(1, x.rank + 1)))

    return rule


def _squeeze_all(call: Call) -> Write | None:
    x: Operand = call["self"]
    ones = [d for d, n in enumerate(x.value.shape) if constant_size(n) == 1]
    if x.rank - len(ones) != call.value.dim():
        return None
    return lambda: call.writer.call(aten.squeeze.dims, x.stacked(), [d + 1 for d in ones])


def _repeat(call: Call) -> Write | None:
    x: Operand = call["self"]
    repeats = call["repeats"]
    return lambda: call.write(self=widen(call.writer, x.stacked(), len(repeats) + 1), repeats=[1, *repeats])


def _join(call: Call) -> Write | None:
    """cat and stack."""
    parts: list[Operand] = call["tensors"]
    rank = call.value.dim()
    if any(p.rank != parts[0].rank for p in parts):
        return None
    return lambda: call.write(tensors=[p.stacked() for p in parts], dim=call["dim"] % rank + 1)


def _last_axes(call: Call) -> Write | None:
    """Ops that act on the last axes and batch over the others, their parameters the same for every token."""
    first, *others = call.tensors().items()
    if any(x.constant is None for _, x in others) or first[1].constant is not None:
        return None
    if call.node.target in (aten.tril.default, aten.triu.default) and first[1].rank < 2:
        return None
    return lambda: call.write(**{first[0]: first[1].stacked()}, **{name: x.constant for name, x in others})


def _linear(call: Call) -> Write | None:
    weight: Operand = call["weight"]
    return _last_axes(call) if weight.rank == 2 else None


def _product(call: Call, a: Operand, b: Operand) -> Write | None:
    writer = call.writer
    if b.constant is not None and b.rank == 2 and a.rank >= 1:
        return lambda: writer.call(aten.matmul.default, a.stacked(), b.constant)
    if a.rank == 0 or b.rank == 0:
        return None
    rank = max(a.rank, b.rank, 2)

    def matrix(x: Operand, axis: int) -> fx.Node:
        node = x.constant if x.constant is not None else x.stacked()
        if x.rank == 1:
            node = writer.unsqueeze(node, axis)
        return node if x.constant is not None else widen(writer, node, rank + 1)

    def write() -> fx.Node:
        y = writer.call(aten.matmul.default, matrix(a, -2), matrix(b, -1))
        gone = ([-2] if a.rank == 1 else []) + ([-1] if b.rank == 1 else [])
        return writer.call(aten.squeeze.dims, y, gone) if gone else y

    return write


def _matmul(call: Call) -> Write | None:
    return _product(call, *call.tensors().values())


def _added_product(call: Call) -> Write | None:
    """addmm and baddbmm."""
    a, b = ("mat1", "mat2") if call.node.target is aten.addmm.default else ("batch1", "batch2")
    if call["beta"] != 1 or call["alpha"] != 1:
        return None
    bias: Operand = call["self"]
    product = _product(call, call[a], call[b])
    if product is None or bias.value.dtype != call.value.dtype:
        return None
    return lambda: call.writer.call(aten.add.Tensor, bias.aligned(call.value.dim()), product())


def _einsum(call: Call) -> Write | None:
    equation = call["equation"].replace(" ", "")
    operands: list[Operand] = call["tensors"]
    if "->" not in equation:
        return None
    left, right = equation.split("->")
    token = next((c for c in "tTzZyYxXwWuUsSrRpP" if c not in equation), None)
    terms = left.split(",")
    if token is None or len(terms) != len(operands):
        return None

    def write() -> fx.Node:
        varying = [x.constant is None for x in operands]
        inputs = ",".join(token + term if v else term for term, v in zip(terms, varying, strict=True))
        tensors = [x.stacked() if x.constant is None else x.constant for x in operands]
        return call.write(equation=f"{inputs}->{token}{right}", tensors=tensors)

    return write


VIEWS: dict[Any, Rule] = {
    aten.unsqueeze.default: _shift,
    aten.squeeze.dim: _shift,
    aten.squeeze.dims: _shift,
    aten.squeeze.default: _squeeze_all,
    aten.select.int: _shift,
    aten.slice.Tensor: _shift,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.numpy_T.default: _permute,
    aten.mT.default: _permute,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.flatten.using_ints: _reshape,
    aten.unflatten.int: _reshape,
    aten.expand.default: _expand,
    aten.expand_as.default: _expand,
    aten.clone.default: _identity,
    aten.contiguous.default: _identity,
    aten.alias.default: _identity,
    aten.lift_fresh_copy.default: _identity,
}
"""Same values, placed anew."""


def reshapes(target: Any) -> bool:
    """Whether a view keeps elements in their order: its shape says all about it."""
    return VIEWS.get(target) in (_reshape, _identity)


def copies(target: Any) -> bool:
    return VIEWS.get(target) is _identity


RULES: dict[Any, Rule] = {
    **VIEWS,
    aten.copy.default: _copy,
    aten.sum.default: _reduce_all(aten.sum.dim_IntList),
    aten.mean.default: _reduce_all(aten.mean.dim),
    aten.repeat.default: _repeat,
    aten.cat.default: _join,
    aten.stack.default: _join,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mv.default: _matmul,
    aten.addmm.default: _added_product,
    aten.baddbmm.default: _added_product,
    aten.einsum.default: _einsum,
    **dict.fromkeys((aten.rms_norm.default, aten.layer_norm.default, aten.tril.default, aten.triu.default), _last_axes),
    **dict.fromkeys(
        (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default),
        _reduce,
    ),
    **dict.fromkeys(
        (
            aten.norm.ScalarOpt_dim,
            aten.prod.dim_int,
            aten.logsumexp.default,
            aten.softmax.int,
            aten._softmax.default,
            aten.log_softmax.int,
            aten._log_softmax.default,
            aten.cumsum.default,
            aten.cumprod.default,
            aten.flip.default,
            aten.glu.default,
            aten.repeat_interleave.self_int,
            aten.select_scatter.default,
            aten.slice_scatter.default,
        ),
        _shift,
    ),
    **dict.fromkeys(
        (
            aten._to_copy.default,
            aten.to.dtype,
            aten.to.dtype_layout,
            aten.to.device,
            aten.detach.default,
            aten.log_sigmoid.default,
            aten.masked_fill.Tensor,
            aten.rsub.Tensor,
            aten.fill.Scalar,
            aten.where.ScalarOther,
        ),
        _pointwise,
    ),
}

CREATIONS = (
    *(aten.zeros.default, aten.ones.default, aten.full.default, aten.scalar_tensor.default, aten.eye.default),
    *(aten.arange.default, aten.arange.start, aten.arange.start_step),
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)
"""Constants; a tensor argument gives only its shape, dtype and device."""

PARTS = (
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.unsafe_split.Tensor),
    *(aten.chunk.default, aten.unbind.int, aten.tensor_split.sections),
)
"""Ops that return pieces of a tensor along one axis, in order and without gaps."""


def rule_of(target: Any) -> Rule | None:
    if (rule := RULES.get(target)) is not None:
        return rule
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return None
    if len(target._schema.returns) != 1 or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    return _pointwise if torch.Tag.pointwise in target.tags else None


def is_function(node: fx.Node) -> bool:
    """Whether a node's value follows from its arguments alone, as far as this module knows the op."""
    if node.op != "call_function":
        return False
    known = node.target is operator.getitem or node.target in PARTS or node.target in CREATIONS
    return known or rule_of(node.target) is not None


def as_before(writer: Writer, new: fx.Node, old: fx.Node) -> fx.Node | None:
    """`new` with the dtype and strides of `old`, and not a view of a graph input; None if the shapes differ."""
    new = writer.to(new, value(old).dtype)
    x, y = value(new), value(old)
    if not same_sizes(x.shape, y.shape):
        return None
    root = new
    while root.target in VIEWS:
        root = root.args[0]  # type: ignore[assignment]
    if not same_sizes(x.stride(), y.stride()) or root.op != "call_function":
        return writer.call(aten.clone.default, new, memory_format=torch.contiguous_format)
    return new

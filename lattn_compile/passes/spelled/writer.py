"""Insert ATen nodes with their fake values and metadata, so that what a pass writes looks like what was traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lattn_compile.passes.spelled.labels import same_size

aten = torch.ops.aten

_METADATA = ("nn_module_stack", "stack_trace", "source_fn_stack")


def value(node: Any) -> Any:
    """The fake value of a node; anything else is itself."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, fx.Node) else node


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    for node in graph.nodes:
        for leaf in tree_leaves(value(node)):
            if isinstance(leaf, torch._subclasses.FakeTensor):
                return leaf.fake_mode
    return None


def keep_gradient(new: fx.Node, old: fx.Node) -> None:
    """`new` takes the place of `old`: the region that a body belongs to asks its outputs whether they need a gradient,
    which fake values that were computed here do not know."""
    before, after = value(old), value(new)
    if before.requires_grad and not after.requires_grad:
        after.requires_grad_(True)


def default_permutation(dims: Sequence[int]) -> bool:
    return list(dims) == list(range(len(dims)))


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether shapes are equal for certain. Comparing symbolic sizes would put a guard on them."""
    return len(a) == len(b) and all(same_size(value(m), value(n)) for m, n in zip(a, b, strict=True))


class Writer:
    """Inserts nodes before `before`, with `like`'s module path and source line.

    Views that do nothing are not written. `inserted` lists what was, in order.
    """

    def __init__(self, before: fx.Node, like: fx.Node) -> None:
        self.graph, self.before, self.like = before.graph, before, like
        self.inserted: list[fx.Node] = []
        self._mode = fake_mode_of(self.graph)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One node that calls an ATen (or `lattn`) overload, its fake value computed."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: self.like.meta[k] for k in _METADATA if k in self.like.meta}
        self.inserted.append(node)
        node.meta["val"] = self._fake(target, args, kwargs)
        return node

    def _fake(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(
            fx.Node, lambda n: tree_map_only(FakeTensor, self._of_mode, value(n)), (args, kwargs)
        )
        if self._mode is None:
            with torch.no_grad():
                return target(*args, **kwargs)
        with self._mode, torch.no_grad():
            return target(*args, **kwargs)

    def _of_mode(self, x: FakeTensor) -> torch.Tensor:
        """The fake value itself, or one like it: tracers give a constant that they lift a mode of its own."""
        if x.fake_mode is self._mode or self._mode is None:
            return x
        with self._mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        dims = [d % len(dims) for d in dims]
        if x.target is aten.permute.default and x in self.inserted:
            inner = x.args[1]
            x, dims = x.args[0], [inner[d] for d in dims]  # type: ignore[index, assignment, misc]
        return x if default_permutation(dims) else self.call(aten.permute.default, x, list(dims))

    def reshape(self, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """`shape` holds ints, SymInts or nodes of SymInts. SymInts are written as nodes."""
        if _same(value(x).shape, shape):
            return x
        return self.call(aten.reshape.default, x, [self.size(n) for n in shape])

    def unsqueeze(self, x: fx.Node, dim: int) -> fx.Node:
        return self.call(aten.unsqueeze.default, x, dim)

    def select(self, x: fx.Node, dim: int, index: int) -> fx.Node:
        return self.call(aten.select.int, x, dim, index)

    def expand(self, x: fx.Node, shape: Sequence[Any]) -> fx.Node:
        if _same(value(x).shape, shape):
            return x
        return self.call(aten.expand.default, x, [self.size(n) for n in shape])

    def to(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if value(x).dtype == dtype else self.call(aten.to.dtype, x, dtype)

    def getitem(self, x: fx.Node, index: int) -> fx.Node:
        import operator

        return self.call(operator.getitem, x, index)

    def size(self, n: Any) -> Any:
        """A size as a graph argument: an int, or a node that holds the SymInt (read off an earlier tensor)."""
        if not isinstance(n, torch.SymInt):
            return n
        if (constant := n.node.maybe_as_int()) is not None:
            return constant
        for node in self.graph.nodes:
            if node is self.before:
                break
            v = value(node)
            if isinstance(v, torch.SymInt) and same_size(v, n):
                return node
        for node in self.graph.nodes:
            if node is self.before:
                break
            v = value(node)
            if isinstance(v, torch.Tensor):
                for dim, m in enumerate(v.shape):
                    if isinstance(m, torch.SymInt) and same_size(m, n):
                        return self.call(aten.sym_size.int, node, dim)
        raise LookupError(f"no node before {self.before} has the size {n}")

    def undo(self, mark: int = 0) -> None:
        """Take away what was inserted after the first `mark` nodes."""
        for node in reversed(self.inserted[mark:]):
            self.graph.erase_node(node)
        del self.inserted[mark:]

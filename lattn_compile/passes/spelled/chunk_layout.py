"""Between a graph's layout and the op's: one piece of code for eager tensors (a trial) and graph nodes (a rewrite)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lattn_compile.passes.spelled.chunk_decay import FixedDecay
from lattn_compile.passes.spelled.chunk_tables import TINY, Powers
from lattn_compile.passes.spelled.chunk_views import Sizes, View
from lattn_compile.passes.spelled.writer import Writer, value

__all__ = ["EAGER", "Nodes", "from_output", "output_of", "state_of", "to_op", "to_state"]

aten = torch.ops.aten


class _Eager:
    """Runs at once what `Nodes` writes."""

    def shape(self, x: Tensor) -> list[Any]:
        return list(x.shape)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.reshape(list(shape))

    def permute(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.permute(list(dims))

    def expand(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        return x.expand(list(shape))

    def ones(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return like.new_ones(list(shape))

    def pad(self, x: Tensor, pad: list[int]) -> Tensor:
        return torch.nn.functional.pad(x, pad)

    def log(self, x: Tensor) -> Tensor:
        return x.log()

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def fixed(self, decay: FixedDecay, like: Tensor, heads: int) -> Tensor:
        return decay.log.expand(*like.shape[:2], heads)

    def chunk(self, q: Tensor, *tensors: Tensor | None, rule: str, scale: float) -> tuple[Tensor, Tensor]:
        rest = (None,) * 4
        out: tuple[Tensor, Tensor] = torch.ops.lattn.chunk.default(q, *tensors, *rest, rule=rule, scale=scale)
        return out


EAGER = _Eager()


class Nodes(Writer):
    """A Writer with the same methods."""

    op: fx.Node

    def shape(self, x: fx.Node) -> list[Any]:
        return list(value(x).shape)

    def ones(self, shape: Sequence[Any], like: fx.Node) -> fx.Node:
        v = value(like)
        one = self.call(aten.full.default, [1] * len(shape), 1.0, dtype=v.dtype, device=v.device)
        return self.expand(one, shape)

    def pad(self, x: fx.Node, pad: list[int]) -> fx.Node:
        return self.call(aten.constant_pad_nd.default, x, pad)

    def log(self, x: fx.Node) -> fx.Node:
        return self.call(aten.log.default, x)

    def exp(self, x: fx.Node) -> fx.Node:
        return self.call(aten.exp.default, x)

    def fixed(self, decay: FixedDecay, like: fx.Node, heads: int) -> fx.Node:
        """`[B, T, heads]`."""
        x = self.log_decay(decay, value(like))
        b, t = self.shape(like)[:2]
        return self.expand(self.reshape(x, [1, 1, -1 if value(x).dim() else 1]), [b, t, heads])

    def log_decay(self, decay: FixedDecay, beside: torch.Tensor) -> fx.Node:
        """`[heads]`, or one number for all, from where the graph has the decay, or from numbers: in float64 if what it
        stands `beside` is, else in float32."""
        if decay.node is None:
            x = self._numbers(decay.log.tolist(), beside)
        else:
            x = decay.node
            for axis in reversed(range(len(decay.index))):
                at = decay.index[axis]
                if at is not None:
                    x = self.select(x, axis, at)
            if decay.form == "slope":
                x = self.call(aten.neg.default, x)
            if decay.form in ("decay", "power"):
                x = self.call(aten.log.default, x)
            if decay.exponent != 1:
                x = self.call(aten.div.Tensor, x, decay.exponent)
        return x

    def check_powers(self, table: fx.Node, powers: Powers, log: fx.Node) -> None:
        """Asserts, whenever the graph runs, that a table holds the powers it was taken for, to its last digits."""
        x = value(table)
        options = {"dtype": x.dtype, "device": x.device}
        n = None
        for axis, step in enumerate(powers.steps):
            if step:
                at = self.call(aten.arange.default, x.shape[axis], **options)
                at = self.reshape(at, [-1 if i == axis else 1 for i in range(x.dim())])
                at = at if step == 1 else self.call(aten.mul.Tensor, at, step)
                n = at if n is None else self.call(aten.add.Tensor, n, at)
        n = self.call(aten.full.default, [], powers.start, **options) if n is None else n
        n = self.call(aten.add.Tensor, n, powers.start) if any(powers.steps) and powers.start else n
        g = self.reshape(self.to(log, x.dtype), [-1 if i == powers.head else 1 for i in range(x.dim())])
        if powers.masked:
            inside = self.call(aten.ge.Scalar, n, 0)
            n = self.call(aten.clamp_min.default, n, 0)
        exponent = self.call(aten.mul.Tensor, g, n)
        want = self.call(aten.exp.default, exponent)
        if powers.masked:
            want = self.call(aten.mul.Tensor, want, inside)
        # Twice what `find_tables` allows, as this runs in the table's own precision.
        digits = self.call(aten.add.Tensor, self.call(aten.abs.default, exponent), self.call(aten.abs.default, n))
        digits = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, digits, 4.0), 16.0)
        allowed = self.call(aten.mul.Tensor, self.call(aten.mul.Tensor, want, digits), torch.finfo(x.dtype).eps)
        off = self.call(aten.abs.default, self.call(aten.sub.Tensor, table, want))
        ok = self.call(aten.le.Tensor, off, self.call(aten.add.Tensor, allowed, TINY))
        message = (
            f"lattn_compile: {table.name} does not hold the powers of one decay a head that it held when this graph "
            "was rewritten. Compile or rewrite again with the tables of now, or compute them in the forward pass."
        )
        self.call(aten._assert_async.msg, self.call(aten.all.default, ok), message)

    def _numbers(self, numbers: list[float], beside: torch.Tensor) -> fx.Node:
        options = {"dtype": torch.promote_types(beside.dtype, torch.float32), "device": beside.device}
        if len(set(numbers)) == 1:
            return self.call(aten.full.default, [1], numbers[0], **options)
        return self.call(aten.cat.default, [self.call(aten.full.default, [1], n, **options) for n in numbers])

    def chunk(self, q: fx.Node, *tensors: fx.Node | None, rule: str, scale: float) -> tuple[fx.Node, fx.Node]:
        rest = (None,) * 4
        self.op = self.call(torch.ops.lattn.chunk.default, q, *tensors, *rest, rule=rule, scale=scale)
        return self.getitem(self.op, 0), self.getitem(self.op, 1)


def _arranged(w: Any, x: Any, labels: str, order: str) -> Any:
    """`x` with one axis per letter of `order`, in that order; axes of size one are put in or dropped."""
    absent = [label for label in order if label not in labels]
    if labels.count("1") == len(absent):
        names = list(labels)
        for label in absent:
            names[names.index("1")] = label
        return w.permute(x, [names.index(label) for label in order])
    shape = w.shape(x)
    kept = [i for i, label in enumerate(labels) if label != "1"]
    size = {labels[i]: shape[i] for i in kept}
    x = w.reshape(x, [shape[i] for i in kept])
    present = [label for label in order if label in size]
    left = [labels[i] for i in kept]
    x = w.permute(x, [left.index(label) for label in present])
    return w.reshape(x, [size.get(label, 1) for label in order])


def _restored(w: Any, x: Any, labels: str, order: str, shape: Sequence[Any]) -> Any:
    """The inverse of `_arranged`."""
    absent = [label for label in order if label not in labels]
    if labels.count("1") == len(absent):
        names = list(labels)
        for label in absent:
            names[names.index("1")] = label
        return w.permute(x, [order.index(label) for label in names])
    size = dict(zip(order, w.shape(x), strict=True))
    present = [label for label in order if label in labels]
    left = [label for label in labels if label != "1"]
    x = w.reshape(x, [size[label] for label in present])
    x = w.permute(x, [present.index(label) for label in left])
    return w.reshape(x, list(shape))


def to_op(w: Any, x: Any, view: View, heads: int, *, features: bool) -> Any:
    """`[B, T, heads, F]`, or `[B, T, heads]`: fewer heads than asked for are repeated, each next to itself."""
    order = "bthf" if features else "bth"
    if "c" in view.labels:
        x = _arranged(w, x, view.labels, order.replace("t", "mc"))
        batch, _, _, *rest = w.shape(x)
        x = w.reshape(x, [batch, -1, *rest])
    else:
        x = _arranged(w, x, view.labels, order)
    b, t, h, *f = w.shape(x)
    if h == heads:
        return x
    x = w.reshape(x, [b, t, h, 1, *f])
    x = w.expand(x, [b, t, h, heads // h, *f])
    return w.reshape(x, [b, t, heads, *f])


def to_state(w: Any, x: Any, view: View, batch: Any, heads: int) -> Any:
    """`[B, HV, K, V]`."""
    if "n" not in view.labels:
        return _arranged(w, x, view.labels, "bhkv")
    x = _arranged(w, x, view.labels, "nkv")
    return w.reshape(x, [batch, heads, *w.shape(x)[1:]])


def output_of(w: Any, o: Any, view: View, shape: Sequence[Any], sizes: Sizes) -> Any:
    """The op's o in the layout (and at the padded length) of the graph's."""
    if sizes.padded is not None:
        o = w.pad(o, [0, 0, 0, 0, 0, sizes.padded - sizes.tokens])
    return _restored(w, o, view.labels, "bthf", shape)


def from_output(x: Tensor, view: View) -> Tensor:
    """A graph's o as the op's `[B, T, HV, V]` (at its padded length)."""
    out: Tensor = _arranged(EAGER, x, view.labels, "bthf")
    return out


def state_of(w: Any, state: Any, view: View, shape: Sequence[Any]) -> Any:
    """The op's state in the layout of the graph's, whose shape is `shape`."""
    if "n" not in view.labels:
        return _restored(w, state, view.labels, "bhkv", shape)
    state = w.reshape(state, [shape[view.labels.index("n")], *w.shape(state)[2:]])
    return _restored(w, state, view.labels, "nkv", shape)

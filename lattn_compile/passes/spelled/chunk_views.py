"""What the axes of a tensor may be: batch, tokens, heads, features, or a state's keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from lattn_compile.passes.spelled.chunk_ops import ones_dropped, sizes_of

__all__ = ["Sizes", "View", "is_cut", "output_sizes", "state_views", "views"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a candidate: of o, and of what it is made from.

    `padded`: o has so many tokens instead. `chunk`: tokens may be cut into chunks of so many in what it is made from.
    """

    batch: int
    tokens: int
    heads: int
    width: int
    padded: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class View:
    """What each axis of a tensor is: `b`, `t`, `h`, `f` (features), `k` and `v` (of a state), `1` for size one; `m` and
    `c` in place of `t` where tokens are cut into chunks: which chunk, and where in it.

    `cost` is 0 for the usual orders: batch before heads, features last.
    """

    labels: str
    cost: int

    def size(self, label: str, sizes: Sequence[int]) -> int:
        at = self.labels.find(label)
        return 1 if at < 0 else sizes[at]


def views(node: fx.Node, sizes: Sizes) -> list[View]:
    """What the axes of a node may be if it holds every token once, the usual orders first."""
    shape = sizes_of(node)
    return [] if shape is None else sorted(_views(shape, sizes), key=lambda v: v.cost)


def is_cut(node: fx.Node, sizes: Sizes) -> bool:
    """Whether a node holds every token once, cut into chunks, and cannot be read otherwise."""
    usual = [v for v in views(node, sizes) if v.cost <= 1]
    return bool(usual) and all("c" in v.labels for v in usual)


def _views(shape: Sequence[int], sizes: Sizes) -> Iterator[View]:
    free = ones_dropped(shape)
    cut = sizes.chunk is not None
    if len(free) > 4 + cut:
        return
    lengths = {"b": sizes.batch, "t": sizes.tokens}
    if sizes.chunk is not None:
        lengths |= {"m": sizes.tokens // sizes.chunk, "c": sizes.chunk}

    def fits(label: str, n: int) -> bool:
        if label == "h":
            return n > 0 and sizes.heads % n == 0  # a part of nothing is no tensor of tokens
        return n == lengths.get(label, n)

    def assign(i: int, labels: str) -> Iterator[str]:
        if i == len(free):
            yield labels
            return
        for label in "bmcthf" if cut else "bthf":
            if label not in labels and fits(label, shape[free[i]]):
                yield from assign(i + 1, labels + label)

    for order in assign(0, ""):
        tokens = [label for label in order if label in "tmc"]
        if (sizes.batch > 1) != ("b" in order) or tokens not in ([["t"], ["m", "c"]] if sizes.tokens > 1 else [[]]):
            continue
        if "c" in order and "b" in order and order.index("b") > order.index("m"):
            continue
        cost = 2 * ("f" in order and order[-1] != "f")
        cost += "b" in order and "h" in order and order.index("b") > order.index("h")
        if sizes.heads > 1 and "h" not in order:
            # One head for all: usual where an axis of size one stands for it.
            cost += 1 if len(shape) - len(free) > (sizes.batch == 1) + (sizes.tokens == 1) else 2
        labels = ["1"] * len(shape)
        for i, label in zip(free, order, strict=True):
            labels[i] = label
        yield View("".join(labels), cost)


def state_views(shape: Sequence[int], sizes: Sizes, keys: int | None) -> Iterator[View]:
    """What the axes of a state may be: batch, heads (or `n`, both in one), then keys and values in either order.

    `keys`: K if it is known.
    """
    free = ones_dropped(shape)
    numbers = [shape[i] for i in free]
    heads = [[(label, n) for label, n in (("b", sizes.batch), ("h", sizes.heads)) if n > 1]]
    if len(heads[0]) == 2:
        heads.append([("n", sizes.batch * sizes.heads)])
    for head in heads:
        if numbers[: len(head)] != [n for _, n in head]:
            continue
        tail = numbers[len(head) :]
        for order in ("kv", "vk"):
            long = [label for label in order if (sizes.width if label == "v" else keys) != 1]
            if keys is None and len(tail) == len(long) - 1:
                long.remove("k")
            if len(tail) != len(long):
                continue
            if any(n != {"v": sizes.width, "k": keys or n}[label] for label, n in zip(long, tail, strict=True)):
                continue
            labels = ["1"] * len(shape)
            for i, label in zip(free, [*(label for label, _ in head), *long], strict=True):
                labels[i] = label
            yield View("".join(labels), 0)


def output_sizes(o: fx.Node) -> Iterator[Sizes]:
    """What B, T, HV, V of an output may be, by the position of its token axis."""
    shape = sizes_of(o)
    if shape is None or not 2 <= len(shape) <= 5:
        return
    free = ones_dropped(shape)
    width, others = (shape[free[-1]], free[:-1]) if free and free[-1] == len(shape) - 1 else (1, free)
    if len(others) > 3:
        return
    for t in sorted(others, key=lambda i: -shape[i]):
        b, h = _batch_and_heads([i for i in others if i != t], shape)
        yield Sizes(b, shape[t], h, width)
    if len(others) <= 2:
        b, h = _batch_and_heads(others, shape)
        yield Sizes(b, 1, h, width)


def _batch_and_heads(axes: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    if len(axes) == 2:
        return shape[axes[0]], shape[axes[1]]
    if not axes:
        return 1, 1
    # One axis of size one before it: that was the batch, or the heads are folded into it.
    return (1, shape[axes[0]]) if axes[0] > 0 or len(shape) == 3 else (shape[axes[0]], 1)

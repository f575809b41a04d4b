"""Axis labels: which index of which factor an axis of a tensor is.

A tensor of shape [B*H, K] has the axes ((b, h), (k,)): an axis is a tuple of labels, most significant first, and one of
size 1 is (). Reshapes and transposes then only regroup labels. A label that turns out to be a product is split, and two
labels that turn out to be one are unified, where they are: everything that mentions them sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lattn_compile.passes.spelled.proposal import NoMatch

__all__ = ["Axis", "Label", "constant_size", "flat", "is_one", "regroup", "same_size", "size_of", "unify"]


class Label:
    """One index. `parts` are what it turned out to be: two or more factors, or the one label it equals."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Any) -> None:
        self.size = size
        self.parts: tuple[Label, ...] | None = None

    def __repr__(self) -> str:
        return f"<{self.size}@{id(self) % 9973}>" if self.parts is None else repr(self.parts)


Axis = tuple[Label, ...]


def constant_size(n: Any) -> int | None:
    """The int that a size is known to be, without specialising a symbolic one."""
    if isinstance(n, torch.SymInt):
        known = n.node.maybe_as_int()
        return None if known is None else int(known)
    return int(n)


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for certain."""
    x, y = constant_size(a), constant_size(b)
    if x is not None or y is not None:
        return x == y
    return bool(a.node.expr == b.node.expr)


def is_one(n: Any) -> bool:
    return constant_size(n) == 1


def flat(axis: Iterable[Label]) -> list[Label]:
    """The labels that an axis consists of now."""
    out: list[Label] = []
    for label in axis:
        if label.parts is None:
            out.append(label)
        else:
            out.extend(flat(label.parts))
    return out


def size_of(axis: Iterable[Label]) -> Any:
    size: Any = 1
    for label in flat(axis):
        size = label.size if constant_size(size) == 1 else size * label.size
    return size


def _quotient(n: Any, m: Any) -> Any | None:
    """n / m if it is whole for certain and neither is 1."""
    a, b = constant_size(n), constant_size(m)
    if a is not None and b is not None:
        return a // b if b > 1 and a > b and a % b == 0 else None
    if a is not None:  # a known size is no multiple of an unknown one
        return None
    quotient = n // m
    return quotient if same_size(quotient * m, n) and not is_one(quotient) else None


def unify(a: Iterable[Label], b: Iterable[Label]) -> None:
    """Make two axes of equal size one and the same. Raises NoMatch where their factors do not line up."""
    xs, ys = flat(a), flat(b)
    while xs and ys:
        x, y = xs.pop(), ys.pop()
        if x is y:
            continue
        if same_size(x.size, y.size):
            x.parts = (y,)
        elif (rest := _quotient(x.size, y.size)) is not None:
            head = Label(rest)
            x.parts = (head, y)
            xs.append(head)
        elif (rest := _quotient(y.size, x.size)) is not None:
            head = Label(rest)
            y.parts = (head, x)
            ys.append(head)
        else:
            raise NoMatch("AXES", f"axes of {x.size} and {y.size} do not line up")
    if xs or ys:
        raise NoMatch("AXES", f"axes of {size_of(a)} and {size_of(b)} do not line up")


def regroup(axes: Sequence[Axis], shape: Sequence[Any]) -> list[Axis]:
    """The axes after a reshape to `shape`."""
    waiting = [label for axis in axes for label in flat(axis)]
    waiting.reverse()
    out: list[Axis] = []
    for size in shape:
        taken: list[Label] = []
        left = size
        while not is_one(left):
            if not waiting:
                raise NoMatch("AXES", f"a reshape to {list(shape)} cuts across axes")
            label = waiting.pop()
            if same_size(label.size, left):
                taken.append(label)
                left = 1
            elif (rest := _quotient(left, label.size)) is not None:
                taken.append(label)
                left = rest
            elif (rest := _quotient(label.size, left)) is not None:
                head, tail = Label(left), Label(rest)
                label.parts = (head, tail)
                taken.append(head)
                waiting.append(tail)
                left = 1
            else:
                raise NoMatch("AXES", f"a reshape to {list(shape)} cuts across axes")
        out.append(tuple(taken))
    if waiting:
        raise NoMatch("AXES", f"a reshape to {list(shape)} cuts across axes")
    return out

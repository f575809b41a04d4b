"""Axis labels: which index of which factor an axis of a tensor is.

A tensor of shape [B*H, K] has the axes ((b, h), (k,)): an axis is a tuple of labels, most significant first, and one of
size 1 is (), unless a recurrence is looked for whose K or V is 1 (`Index.ones`). Reshapes and transposes then only
regroup labels. A label that turns out to be a product is split, and two labels that turn out to be one are unified,
where they are: everything that mentions them sees it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lattn_compile.passes.spelled.proposal import NoMatch

__all__ = [
    "Axis",
    "Label",
    "constant_size",
    "equal_but_for_order",
    "flat",
    "is_one",
    "regroup",
    "same_size",
    "simple",
    "size_of",
    "unify",
]


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
    if x is not None and y is not None:
        return x == y
    first, second = (n.node.expr if size is None else size for n, size in ((a, x), (b, y)))
    if _simple(first) == _simple(second):
        return True
    (env, *others) = {id(n.node.shape_env): n.node.shape_env for n, size in ((a, x), (b, y)) if size is None}.values()
    known, pair = _equal.setdefault(env, {}), frozenset((first, second))
    if pair not in known:
        known[pair] = not others and (_guarded(env, first, second) or statically_known_true(a == b))
    return known[pair]


def _simple(expr: Any) -> Any:
    return expr if isinstance(expr, int) else simple(expr)


def _guarded(env: Any, a: Any, b: Any) -> bool:
    """Whether the trace put a guard on it that two sizes are equal, as a broadcast of one with the other does."""
    difference = (_simple(a) - _simple(b)).expand()
    for guard in env.guards:
        if type(guard.expr).__name__ == "Equality":
            left, right = (simple(x) for x in guard.expr.args)
            if (left - right).expand() in (difference, -difference):
                return True
    return False


_equal: weakref.WeakKeyDictionary[Any, dict[frozenset[Any], bool]] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=4096)
def simple(expr: Any) -> Any:
    """A symbolic size without divisions that come out whole: (n * n) // n is n. Tracers leave them, where an axis of
    one size is merged with another of the same size and taken apart again."""
    if not expr.args:
        return expr
    args = [simple(x) for x in expr.args]
    if type(expr).__name__ == "FloorDiv":
        quotient = (args[0] / args[1]).cancel()
        return quotient if quotient.as_numer_denom()[1] == 1 else expr.func(*args)
    return expr.func(*args).expand()


def equal_but_for_order(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether these are the same sizes in some order, those of 1 aside."""
    left = [n for n in b if not is_one(n)]
    for m in a:
        if is_one(m):
            continue
        at = next((i for i, n in enumerate(left) if same_size(m, n)), None)
        if at is None:
            return False
        del left[at]
    return not left


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
    """Make two axes of equal size one and the same. Raises NoMatch where their factors do not line up.

    An index of size 1 that meets another size was broadcast, and is none.
    """
    xs, ys = flat(a), flat(b)
    while xs and ys:
        x, y = xs.pop(), ys.pop()
        if x is y:
            continue
        if same_size(x.size, y.size):
            x.parts = (y,)
        elif is_one(x.size):
            x.parts = ()
            ys.append(y)
        elif is_one(y.size):
            y.parts = ()
            xs.append(x)
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
    for label in xs + ys:
        if not is_one(label.size):
            raise NoMatch("AXES", f"axes of {size_of(a)} and {size_of(b)} do not line up")
        label.parts = ()


def regroup(axes: Sequence[Axis], shape: Sequence[Any]) -> list[Axis]:
    """The axes after a reshape to `shape`."""
    waiting = [label for axis in axes for label in flat(axis)]
    waiting.reverse()
    out: list[Axis] = []
    for size in shape:
        taken: list[Label] = []
        left = size
        if is_one(size) and waiting and is_one(waiting[-1].size):
            taken.append(waiting.pop())
        while not is_one(left):
            if not waiting:
                raise NoMatch("AXES", f"a reshape to {list(shape)} cuts across axes")
            label = waiting.pop()
            if is_one(label.size):
                label.parts = ()
            elif same_size(label.size, left):
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
    for label in waiting:
        if not is_one(label.size):
            raise NoMatch("AXES", f"a reshape to {list(shape)} cuts across axes")
        label.parts = ()
    return out

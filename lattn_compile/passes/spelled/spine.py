"""Where a state update may be: additions that an outer product flows into, and what the previous state may be.

Nothing is proved here. `step.py` does that for every pair of an update and a root.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, SHAPE_ONLY, Index, is_tensor, name_of, widens
from lattn_compile.passes.spelled.expand import VIEWS, Expander
from lattn_compile.passes.spelled.labels import Axis, equal_but_for_order, flat, is_one
from lattn_compile.passes.spelled.literals import is_mask_node, is_zero
from lattn_compile.passes.spelled.views import is_view
from lattn_compile.passes.spelled.writer import value

__all__ = ["candidates", "full_size", "is_outer", "is_view", "path_between", "roots_of", "stored_origin"]

_ADDITIONS = frozenset(
    f"aten::{name}"
    for name in ("add", "sub", "rsub", "addcmul", "addcdiv", "baddbmm", "addbmm", "addmm", "addr", "lerp")
)
_FUSED = frozenset(["aten::addcmul", "aten::baddbmm", "aten::addbmm", "aten::addmm", "aten::addr"])
_SCALINGS = frozenset(["aten::mul", "aten::div", "aten::neg"])
_MATRIX_PRODUCTS = frozenset(["aten::matmul", "aten::bmm", "aten::mm", "aten::baddbmm", "aten::addbmm", "aten::addmm"])
_CHOICES = {"aten::where": (1, 2), "aten::masked_fill": (0,)}
"""Operands that a mask chooses from."""
_MASKINGS = _SCALINGS | _CHOICES.keys()
_TOKENS = frozenset(["aten::select", "aten::unbind", "aten::split", "aten::split_with_sizes", "aten::chunk", "getitem"])
"""One of the outer products that were made for all tokens at once."""


def _shape(node: fx.Node) -> Sequence[object]:
    return value(node).shape  # type: ignore[no-any-return]


def full_size(x: object, like: fx.Node) -> bool:
    """Whether operand `x` of `like` has all its elements, apart from axes of size 1."""
    return is_tensor(x) and equal_but_for_order(_shape(x), _shape(like))  # type: ignore[arg-type]


def is_outer(index: Index, node: fx.Node) -> bool:
    """Whether a node makes an outer product: every operand lacks an axis that the result has."""
    name = name_of(node)
    if name in ("aten::outer", "aten::addr"):
        return True
    if name == "aten::tensordot":
        return len(node.args[2]) == 0  # type: ignore[arg-type]
    if name == "aten::kron":
        return all(is_tensor(x) and any(_lacks(_shape(x), _shape(node)) for x in node.args) for x in node.args)  # type: ignore[arg-type]
    if index.ones and name != "aten::einsum":
        return _is_outer_with_ones(index, node)
    if name in ("aten::mul", "aten::addcmul"):
        pair = node.args[1:3] if name == "aten::addcmul" else node.args[:2]
        if not all(is_tensor(x) for x in pair) or len(pair) < 2:
            return False
        out = _varying(index, node)
        return all(_lacks(_varying(index, x), out) for x in pair)  # type: ignore[arg-type]
    if name in _MATRIX_PRODUCTS:
        pair = node.args[1:3] if name in _FUSED else node.args[:2]
        if not all(is_tensor(x) for x in pair):
            return False
        x, y = (_shape(p) for p in pair)  # type: ignore[arg-type]
        return len(x) > 1 and len(y) > 1 and is_one(x[-1]) and not is_one(x[-2]) and not is_one(y[-1])
    if name == "aten::einsum":
        left, _, right = node.args[0].replace(" ", "").replace("...", "").partition("->")  # type: ignore[union-attr]
        subscripts = left.split(",")
        # A letter that is summed over has to be of size 1 to be none; that is left to the expansion.
        return len(subscripts) > 1 and all(set(right) - set(s) for s in subscripts)
    return False


def _is_outer_with_ones(index: Index, node: fx.Node) -> bool:
    """The same where K or V is 1: sizes do not tell an axis that an operand lacks from one that it has, labels do."""
    name = name_of(node)
    if not any(is_one(n) for n in _shape(node)):
        return False
    pair = node.args[1:3] if name in _FUSED else node.args[:2]
    if len(pair) < 2 or not all(is_tensor(x) for x in pair):
        return False
    x, y = (_axes_with_ones(index, p) for p in pair)  # type: ignore[arg-type]
    if name in ("aten::mul", "aten::addcmul"):
        rank = max(len(x), len(y))
        axes = list(zip([()] * (rank - len(x)) + x, [()] * (rank - len(y)) + y, strict=True))
        return all(any(flat(a) and not flat(b) for a, b in side) for side in (axes, [(b, a) for a, b in axes]))
    if name in _MATRIX_PRODUCTS and min(len(x), len(y)) > 1:
        return bool(flat(x[-2]) and flat(y[-1])) and not flat(x[-1]) and not flat(y[-2])
    return False


def _axes_with_ones(index: Index, x: fx.Node) -> list[Axis]:
    """The axes of an operand, without labels along which its values are repeated."""
    axes, repeated = Expander(index, None, (), VIEWS).expand(x).axes, index.repeated(x)
    return [() if i in repeated else axis for i, axis in enumerate(axes)]


def _varying(index: Index, node: fx.Node) -> list[object]:
    """The shape with 1 for axes along which the same values are repeated."""
    repeated = index.repeated(node)
    return [1 if i in repeated else n for i, n in enumerate(_shape(node))]


def _lacks(shape: Sequence[object], out: Sequence[object]) -> bool:
    padded = [1] * (len(out) - len(shape)) + list(shape)
    return any(is_one(n) and not is_one(m) for n, m in zip(padded, out, strict=True))


def candidates(index: Index) -> Iterator[list[fx.Node]]:
    """For each outer product that is added to something of its own size, the additions it may end in, largest first."""
    seen: set[fx.Node] = set()
    for node in index.graph.nodes:
        if node.op != "call_function" or not is_tensor(node) or not is_outer(index, node):
            continue
        # Earlier tokens first: of a later one, the state before it is known by then.
        for addition in [node] if name_of(node) in _FUSED else sorted(_additions(node), key=index.order.__getitem__):
            if addition in seen or not is_tensor(addition):
                continue
            if index.ones and not any(is_one(n) for n in _shape(addition)):
                continue
            seen.add(addition)
            ladder = [addition]
            while len(ladder) < 4 and (above := _only_addition(ladder[-1])) is not None:
                ladder.append(above)
            yield ladder[::-1]


def _additions(seed: fx.Node) -> list[fx.Node]:
    """The additions that `seed` flows into through views and scalings, whole or token by token."""
    found: list[fx.Node] = []
    waiting = [(seed, 0)]
    while waiting:
        node, steps = waiting.pop()
        for user in node.users:
            if name_of(user) in _ADDITIONS and full_size(node, user):
                found.append(user)
            elif steps < 8 and (
                is_view(user)
                or name_of(user) in CASTS
                or name_of(user) in _TOKENS
                or (name_of(user) in _MASKINGS and full_size(node, user))
            ):
                waiting.append((user, steps + 1))
    return found


def _only_addition(node: fx.Node) -> fx.Node | None:
    """The one addition that a sum flows into, through views and masks. What is read as well, before a mask picks
    between it and the state before, flows into that choice."""
    while (users := list(node.users)) and (len(users) == 1 or len(users := _picked_by_mask(node)) == 1):
        (user,) = users
        name = name_of(user)
        if not is_tensor(user):
            return None
        if full_size(node, user) and (name in _ADDITIONS or name == "aten::where"):
            return user
        masks = name in ("aten::mul", "aten::masked_fill")
        if not is_view(user) and not (masks and full_size(node, user)):
            return None
        node = user
    return None


def _picked_by_mask(node: fx.Node) -> list[fx.Node]:
    """Users where a mask picks between a node and another state, if it is but read otherwise: a state that goes on is
    one itself."""
    picked, waiting = [], list(node.users)
    while waiting:
        user = waiting.pop()
        if is_view(user):
            waiting += user.users
        elif is_tensor(user) and full_size(node, user) and not all(name_of(u) == "aten::sum" for u in user.users):
            if not _picks(user):
                return []
            picked.append(user)
    return picked


def _picks(node: fx.Node) -> bool:
    """Whether a mask picks from two states here, or lets one of them through to a sum with the other."""
    if not any(map(is_mask_node, node.args)):
        return False
    if name_of(node) == "aten::where":
        return all(full_size(x, node) and not is_zero(x) for x in node.args[1:])  # type: ignore[arg-type]
    return name_of(node) == "aten::mul" and all(name_of(u) in _ADDITIONS for u in node.users)


# Roots.

_CONSTANTS = frozenset(
    f"aten::{name}" for name in ["full", "new_full", "full_like", "ones", "new_ones", "ones_like", "eye", "arange"]
)


def roots_of(index: Index, update: fx.Node, states: Mapping[fx.Node, object]) -> list[fx.Node]:
    """What the previous state may be: where the operands of full size lead to, earlier states first."""
    found: list[fx.Node] = []
    waiting, seen = [update], {update}
    while waiting:
        node = waiting.pop()
        operands = [] if node in states and node is not update else _carriers(index, node)
        if not operands:
            if node is not update and name_of(node) != "aten::eye":  # I - beta k k^T is a matrix, no state
                found.append(node)
            continue
        for x in operands:
            if x not in seen:
                seen.add(x)
                waiting.append(x)

    def rank(node: fx.Node) -> int:
        origin = stored_origin(node)
        if origin in states:
            return 0
        if origin.op in ("placeholder", "get_attr") or is_zero(origin):
            return 1
        if name_of(origin) in _CONSTANTS:
            return 4
        return 3 if is_outer(index, origin) else 2

    return sorted(dict.fromkeys(found), key=lambda node: (rank(node), index.order[node]))


def _carriers(index: Index, node: fx.Node) -> list[fx.Node]:
    """Operands that a state may have come through."""
    name = name_of(node)
    if is_view(node):
        return [node.args[0]]  # type: ignore[list-item]
    if name in CASTS:
        source = node.args[0]
        exact = is_tensor(source) and widens(value(source).dtype, value(node).dtype)
        return [source] if exact else []  # type: ignore[list-item]
    if name == "aten::einsum":
        return [x for x in node.args[1] if full_size(x, node)]  # type: ignore[misc, union-attr]
    if name in _CHOICES:
        return [x for x in (node.args[i] for i in _CHOICES[name]) if full_size(x, node)]  # type: ignore[misc]
    carrying = _ADDITIONS | _SCALINGS | {"aten::matmul", "aten::bmm", "aten::mm"}
    if name not in carrying or (is_outer(index, node) and name not in _FUSED):
        return []
    return [x for x in node.args[:2] if isinstance(x, fx.Node) and full_size(x, node)]


_PAIRS = frozenset(["aten::view_as_complex", "aten::view_as_real"])


def stored_origin(node: fx.Node) -> fx.Node:
    """The value that a state was stored from: views and casts, roundings included, are gone back through."""
    while is_view(node) or name_of(node) in CASTS or name_of(node) in _PAIRS:
        if not is_tensor(node.args[0]):
            break
        node = node.args[0]  # type: ignore[assignment]
    return node


def path_between(index: Index, root: fx.Node, update: fx.Node, states: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Nodes that depend on `root` and that `update` depends on, `update` included.

    Dependence through one of `states` does not count: layers that begin with the same zeros depend on them through the
    states of the layers before.
    """
    last = index.order[update]
    below, waiting = {root}, [root]
    while waiting:
        for user in waiting.pop().users:
            if name_of(user) in SHAPE_ONLY or (user in states and user is not update):
                continue
            if user not in below and index.order[user] <= last:
                below.add(user)
                waiting.append(user)
    path, waiting = set(), [update]
    while waiting:
        node = waiting.pop()
        if node in below and node not in path and node is not root:
            path.add(node)
            waiting.extend(node.all_input_nodes)
    return path

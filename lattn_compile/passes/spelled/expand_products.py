"""Products and sums of expanded tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from lattn_compile.passes.spelled.aten import name_of
from lattn_compile.passes.spelled.labels import (
    Axis,
    Label,
    constant_size,
    flat,
    is_one,
    same_size,
)
from lattn_compile.passes.spelled.literals import number
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.terms import (
    EYE,
    Expr,
    Factor,
    Term,
    add,
    contract,
    inverse,
    multiply,
    negated_mask,
    sum_over,
)
from lattn_compile.passes.spelled.writer import value

if TYPE_CHECKING:
    from lattn_compile.passes.spelled.expand import Expander

from lattn_compile.passes.spelled.expand_views import dims_of

__all__ = ["PRODUCT_RULES", "SUM_RULES"]

# Products.


def _mul(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    return multiply([e.operand(a["self"]), e.operand(a["other"])])


def _div(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    if a.get("rounding_mode") is not None or a["other"] in e.path or a["other"] is e.root:
        raise NoMatch("STATE_OP", "a division by the state", node)
    return multiply([e.operand(a["self"]), inverse(e.operand(a["other"]))])


def _neg(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    return e.expand(a["self"]).scaled(-1.0)


def _einsum(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    operands = [e.expand(x) for x in a["tensors"]]
    equation = a["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    subscripts = [_letters(s, len(x.axes)) for s, x in zip(left.split(","), operands, strict=True)]
    if arrow:
        rank = max((sum(isinstance(c, int) for c in s) for s in subscripts), default=0)
        output = _letters(right, len(right.replace("...", "")) + rank)
    else:
        letters = [c for s in subscripts for c in s]
        output = sorted((c for c in set(letters) if isinstance(c, int)), reverse=True)
        output += sorted(c for c in set(letters) if isinstance(c, str) and letters.count(c) == 1)
    for s in subscripts:
        if len(set(s)) != len(s):
            raise NoMatch("AXES", "a diagonal in an einsum", node)
    return contract(operands, subscripts, output)


def _letters(subscript: str, rank: int) -> list[Any]:
    """One name an axis; the axes of `...` are counted from the last, so that they line up."""
    head, dots, tail = subscript.partition("...")
    hidden = rank - len(head) - len(tail) if dots else 0
    return [*head, *range(hidden - 1, -1, -1), *tail]


def _matmul(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    names = list(a)
    return _product(e.operand(a[names[0]]), e.operand(a[names[1]]))


def _product(x: Expr, y: Expr) -> Expr:
    """torch.matmul: vectors are rows on the left and columns on the right, batch axes broadcast."""
    m, n = len(x.axes), len(y.axes)
    rows = [*range(m - 3, -1, -1), "i", "j"] if m > 1 else ["j"]
    columns = [*range(n - 3, -1, -1), "j", "l"] if n > 1 else ["j"]
    batch = list(range(max(m, n) - 3, -1, -1))
    return contract([x, y], [rows, columns], [*batch, *(["i"] if m > 1 else []), *(["l"] if n > 1 else [])])


def _outer(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    names = list(a)
    return contract([e.operand(a[names[0]]), e.operand(a[names[1]])], [["i"], ["j"]], ["i", "j"])


def _vecdot(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["x"]), e.operand(a["y"])
    product = multiply([x, y])
    return _summed(product, [a["dim"] % len(product.axes)], keep=False)


def _inner(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["self"]), e.operand(a["other"])
    left = [("x", i) for i in range(len(x.axes) - 1)]
    right = [("y", i) for i in range(len(y.axes) - 1)]
    return contract([x, y], [[*left, "j"], [*right, "j"]], [*left, *right])


def _tensordot(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["self"]), e.operand(a["other"])
    left: list[Any] = [("x", i) for i in range(len(x.axes))]
    right: list[Any] = [("y", i) for i in range(len(y.axes))]
    for n, (i, j) in enumerate(zip(a["dims_self"], a["dims_other"], strict=True)):
        left[i % len(left)] = right[j % len(right)] = n
    return contract([x, y], [left, right], [n for n in left + right if not isinstance(n, int)])


def _kron(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["self"]), e.operand(a["other"])
    rank = max(len(x.axes), len(y.axes))
    left, right = ([()] * (rank - len(z.axes)) + z.axes for z in (x, y))
    return Expr(
        [(*i, *j) for i, j in zip(left, right, strict=True)], multiply([Expr([], x.terms), Expr([], y.terms)]).terms
    )


def _chain(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    """linalg.multi_dot and chain_matmul."""
    first, *rest = (e.operand(x) for x in next(iter(a.values())))
    for y in rest:
        first = _product(first, y)
    return first


def _linear(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    if a.get("bias") is not None:
        raise NoMatch("STATE_OP", "a linear layer with a bias", node)
    x, w = e.operand(a["input"]), e.operand(a["weight"])
    batch = list(range(len(x.axes) - 1))
    return contract([x, w], [[*batch, "j"], ["i", "j"]], [*batch, "i"])


def _sum(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x = e.expand(a["self"])
    dims = dims_of(a.get("dim"), len(x.axes))
    out = _summed(x, dims, keep=bool(a.get("keepdim", False)))
    if name_of(node) == "aten::mean":
        count = math.prod(constant_size(value(a["self"]).shape[d]) or 0 for d in dims)
        if not count:
            raise NoMatch("AXES", "a mean over a symbolic axis", node)
        out = out.scaled(1.0 / count)
    return out


def _summed(x: Expr, dims: Sequence[int], *, keep: bool) -> Expr:
    labels = [label for d in dims for label in flat(x.axes[d])]
    axes = [() if i in dims else axis for i, axis in enumerate(x.axes) if keep or i not in dims]
    return Expr(axes, sum_over(x.terms, labels))


def _diag_embed(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x = e.expand(a["self"])
    rank = len(value(node).shape)
    if a.get("offset", 0) != 0 or {a.get("dim1", -2) % rank, a.get("dim2", -1) % rank} != {rank - 2, rank - 1}:
        raise NoMatch("STATE_OP", "a diagonal beside the main one", node)
    column: Axis = tuple(Label(label.size) for label in flat(x.axes[-1]))
    eye = Factor(EYE, (x.axes[-1], column))
    return Expr([*x.axes, column], [Term(t.coefficient, (*t.factors, eye)) for t in x.terms])


def _eye(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    rows, columns = value(node).shape
    if not same_size(rows, columns):
        raise NoMatch("STATE_OP", "an identity matrix that is not square", node)
    if is_one(rows):
        return Expr([(), ()], [Term(1.0, ())])
    axes: list[Axis] = [(Label(rows),), (Label(columns),)]
    return Expr(axes, [Term(1.0, (Factor(EYE, tuple(axes)),))])


# Sums: expanded on the state path, and in matrices that act on it.


def _add(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    x, y = e.operand(a["self"]), e.operand(a["other"])
    alpha = number(a.get("alpha", 1))
    name = name_of(node)
    if name == "aten::sub":
        return add([x, y.scaled(-alpha)])
    if name == "aten::rsub":
        return add([y, x.scaled(-alpha)])
    return add([x, y.scaled(alpha)])


def _addcmul(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    product = multiply([e.operand(a["tensor1"]), e.operand(a["tensor2"])])
    return add([e.operand(a["self"]), product.scaled(number(a.get("value", 1)))])


def _addcdiv(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    if a["tensor2"] in e.path or a["tensor2"] is e.root:
        raise NoMatch("STATE_OP", "a division by the state", node)
    quotient = multiply([e.operand(a["tensor1"]), inverse(e.operand(a["tensor2"]))])
    return add([e.operand(a["self"]), quotient.scaled(number(a.get("value", 1)))])


def _addmm(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    """baddbmm, addbmm, addmm, addmv, addr: beta * input + alpha * (first @ second)."""
    names, name = list(a), name_of(node)
    x, y = e.operand(a[names[1]]), e.operand(a[names[2]])
    if name == "aten::addr":
        product = contract([x, y], [["i"], ["j"]], ["i", "j"])
    elif name == "aten::addbmm":
        product = contract([x, y], [["n", "i", "j"], ["n", "j", "l"]], ["i", "l"])
    else:
        product = _product(x, y)
    beta, alpha = number(a.get("beta", 1)), number(a.get("alpha", 1))
    return add([e.operand(a[names[0]]).scaled(beta), product.scaled(alpha)])


def _lerp(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    """start + weight * (end - start)"""
    start, end, weight = e.operand(a["self"]), e.operand(a["end"]), e.operand(a["weight"])
    again, other = e.operand(a["self"]), e.operand(a["weight"])
    return add([start, multiply([weight, end]), multiply([other, again]).scaled(-1.0)])


def _choice(e: Expander, node: fx.Node, mask: Any, x: Expr, y: Expr) -> Expr:
    """x where the mask is set, else y."""
    if not isinstance(mask, fx.Node) or mask in e.path or mask is e.root:
        raise NoMatch("STATE_OP", f"what {name_of(node)} keeps of the state depends on the state", node)
    chosen, other = e.expand(mask), negated_mask(e.expand(mask))
    if other is None:
        chosen, other = e.opaque(mask), negated_mask(e.opaque(mask))
    assert other is not None
    return add([multiply([chosen, x]), multiply([other, y])])


def _where(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    return _choice(e, node, a["condition"], e.operand(a["self"]), e.operand(a["other"]))


def _masked_fill(e: Expander, node: fx.Node, a: dict[str, Any]) -> Expr:
    return _choice(e, node, a["mask"], e.operand(a["value"]), e.operand(a["self"]))


Handler = Callable[["Expander", fx.Node, dict[str, Any]], Expr]

PRODUCT_RULES: dict[str, Handler] = {
    "aten::mul": _mul,
    "aten::div": _div,
    "aten::neg": _neg,
    "aten::einsum": _einsum,
    "aten::matmul": _matmul,
    "aten::bmm": _matmul,
    "aten::mm": _matmul,
    "aten::mv": _matmul,
    "aten::dot": _matmul,
    "aten::vdot": _matmul,
    "aten::outer": _outer,
    "aten::linalg_vecdot": _vecdot,
    "aten::inner": _inner,
    "aten::tensordot": _tensordot,
    "aten::kron": _kron,
    "aten::linalg_multi_dot": _chain,
    "aten::chain_matmul": _chain,
    "aten::linear": _linear,
    "aten::sum": _sum,
    "aten::mean": _sum,
    "aten::diag_embed": _diag_embed,
    "aten::eye": _eye,
}

SUM_RULES: dict[str, Handler] = {
    "aten::add": _add,
    "aten::sub": _add,
    "aten::rsub": _add,
    "aten::addcmul": _addcmul,
    "aten::addcdiv": _addcdiv,
    "aten::baddbmm": _addmm,
    "aten::addbmm": _addmm,
    "aten::addmm": _addmm,
    "aten::addmv": _addmm,
    "aten::addr": _addmm,
    "aten::lerp": _lerp,
    "aten::where": _where,
    "aten::masked_fill": _masked_fill,
}

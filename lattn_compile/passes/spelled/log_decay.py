"""The logarithm of a step's decay, written from where the graph has it.

That is an exp's argument, or the log of a value that is certain to lie in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, name_of
from lattn_compile.passes.spelled.chunk_tables import known_buffer, known_value
from lattn_compile.passes.spelled.labels import Label
from lattn_compile.passes.spelled.products import again, device_of, filled, narrow, placed
from lattn_compile.passes.spelled.proposal import OUTER, NoMatch
from lattn_compile.passes.spelled.ranges import interval, is_decay
from lattn_compile.passes.spelled.terms import Factor, is_mask
from lattn_compile.passes.spelled.token import Product, Step
from lattn_compile.passes.spelled.views import PICKS, is_view
from lattn_compile.passes.spelled.writer import Writer, value

__all__ = ["CHECKED", "NEXT_TO_NOTHING", "log_decay"]

aten = torch.ops.aten


def log_decay(w: Writer, step: Step, groups: list[list[Label]], dtype: torch.dtype) -> fx.Node:
    """log D. Raises NoMatch where D is not certain to lie in [0, 1]."""
    if (mask := _mask_of(step.decay_terms)) is not None:
        return _log_where(w, step, mask, groups, dtype)
    if (taken := _one_plus_expm1(step)) is not None:
        return filled(w, _log_factor(w, taken, groups, dtype, "aten::expm1"), groups)
    if len(step.decay_terms) > 1:
        wanted = [label for group in groups for label in group]
        total: fx.Node | None = None
        for p in step.decay_terms:
            x = narrow(w, p, groups, dtype)
            total = x if total is None else w.call(aten.add.Tensor, total, x)
        assert total is not None and len(value(total).shape) == len(wanted)
        if not is_decay(total):
            raise NoMatch("DECAY_RANGE", f"the decay lies in {_range(total)}", step.update)
        return filled(w, _log_of_values(w, total), groups)
    (product,) = step.decay_terms
    if product.coefficient < 0.0:
        raise NoMatch("DECAY_RANGE", f"the decay has the factor {product.coefficient:g}", step.update)
    mark = len(w.inserted)
    try:
        return filled(w, _log_product(w, product, groups, dtype, step), groups)
    except NoMatch:
        w.undo(mark)
        # One factor is no decay, all of them may be: (1 + tanh(x)) / 2.
        total = narrow(w, product, groups, dtype)
        if not is_decay(total):
            w.undo(mark)
            raise
        return filled(w, _log_of_values(w, total), groups)


def _log_product(w: Writer, product: Product, groups: list[list[Label]], dtype: torch.dtype, step: Step) -> fx.Node:
    """The sum of the logs of the factors, one axis a label."""
    out: fx.Node | None = None
    for f in product.factors:
        x = _log_factor(w, f, groups, dtype)
        out = x if out is None else w.call(aten.add.Tensor, out, x)
    constant = math.log(product.coefficient) if product.coefficient > 0.0 else -math.inf
    if out is None:
        if constant > 0.0:
            raise NoMatch("DECAY_RANGE", f"the decay is {product.coefficient:g}", step.update)
        size = [1] * sum(len(group) for group in groups)
        return w.call(aten.full.default, size, constant, dtype=dtype, device=device_of(w))
    if constant != 0.0:
        out = w.call(aten.add.Scalar, out, constant)
        if interval(out)[0] > 0.0:
            raise NoMatch("DECAY_RANGE", "the decay is greater than 1", step.update)
    return out


def _mask_of(terms: list[Product]) -> Factor | None:
    """A mask that chooses between the terms of a decay, each of which holds where it is set, or where it is not."""
    for f in terms[0].factors if terms else ():
        if is_mask(f):
            plain = {replace(f, negated=n).key() for n in (False, True)}
            if all(any(g.key() in plain for g in p.factors) for p in terms):
                return f
    return None


def _log_where(w: Writer, step: Step, mask: Factor, groups: list[list[Label]], dtype: torch.dtype) -> fx.Node:
    """log D of a decay that a mask chooses. Where nothing is left of the state, that is -inf."""
    wanted = [label for group in groups for label in group]
    plain, logs = replace(mask, negated=False), []
    for side in (plain, replace(plain, negated=True)):
        terms = [
            Product(p.coefficient, tuple(f for f in p.factors if f.key() != side.key()))
            for p in step.decay_terms
            if any(f.key() == side.key() for f in p.factors)
        ]
        if terms:
            logs.append(log_decay(w, replace(step, decay_terms=terms), groups, dtype))
        else:
            logs.append(w.call(aten.full.default, [1] * len(groups), -math.inf, dtype=dtype, device=device_of(w)))
    return w.call(aten.where.self, filled(w, placed(w, plain, wanted), groups), *logs)


def _one_plus_expm1(step: Step) -> Factor | None:
    """The expm1(x) of a decay 1 + expm1(x)."""
    if len(step.decay_terms) != 2 or any(p.coefficient != 1.0 for p in step.decay_terms):
        return None
    factors = [f for p in step.decay_terms for f in p.factors]
    if len(factors) != 1 or factors[0].inverse or _source(factors[0].node) != "aten::expm1":
        return None
    return factors[0]


def _source(node: fx.Node, *, casts: bool = False) -> str:
    """What a node's values come from, through views and selects, and from outside a loop's body; and through casts,
    which round an exp to an exp of nearly the same."""
    while is_view(node) or name_of(node) in PICKS or OUTER in node.meta or (casts and _floats(node)):
        node = node.meta.get(OUTER) or node.args[0]  # type: ignore[assignment]
    return name_of(node)


def _floats(node: fx.Node) -> bool:
    """Whether a node casts floats to others."""
    return name_of(node) in CASTS and all(value(n).dtype.is_floating_point for n in (node, node.args[0]))


def _log_factor(w: Writer, f: Factor, groups: list[list[Label]], dtype: torch.dtype, function: str = "") -> fx.Node:
    """log of one factor of the decay, or the argument of `function` in it."""
    if function:
        log = _argument(w, f.node, function, dtype)
    elif f.inverse:
        log = _log_of_inverse(w, f.node, dtype)
    else:
        log = _log(w, f.node, dtype)
    return w.to(placed(w, Factor(log, f.index), [label for group in groups for label in group]), dtype)


def _log(w: Writer, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """log of a decay, in its shape: the argument where the decay is an exp, through views, selects and products.

    Raises NoMatch where it is not certain to be the log of something in [0, 1].
    """
    name = name_of(node)
    x = node.args[0] if node.args else None
    if name == "aten::pow" and type(x) in (int, float) and x > 0 and value(node.args[1]).dtype == dtype:  # type: ignore[operator]
        log = w.call(aten.mul.Scalar, node.args[1], math.log(x))  # type: ignore[arg-type]
        if interval(log)[0] > 0.0:
            raise NoMatch("DECAY_RANGE", "the decay is greater than 1", node)
        return log
    if value(node).dtype == dtype and isinstance(x, fx.Node) and isinstance(value(x), torch.Tensor):
        rest = node.args[1:]
        if value(x).dtype == dtype and name in ("aten::exp", "aten::exp2", "aten::sigmoid"):
            if name == "aten::sigmoid":
                return w.call(aten.log_sigmoid.default, x)
            if interval(x)[0] > 0.0:
                raise NoMatch("DECAY_RANGE", "the decay is greater than 1", node)
            return x if name == "aten::exp" else w.call(aten.mul.Scalar, x, math.log(2.0))
        # What is picked by a tensor is not followed, where it need not be: no run could tell what it picks.
        if is_view(node) or (name in PICKS and not (name == "aten::index_select" and is_decay(node))):
            return again(w, node, _log(w, x, dtype))
        if name == "aten::mul" and rest and isinstance(rest[0], fx.Node):
            both = [y for y in (x, rest[0]) if isinstance(value(y), torch.Tensor)]
            if len(both) == 2 and all(interval(y)[0] >= 0.0 for y in both):
                return w.call(aten.add.Tensor, _log(w, both[0], dtype), _log(w, both[1], dtype))
        if name == "aten::add" and rest and rest[0] == 1 and name_of(x) == "aten::expm1":
            return x.args[0]  # type: ignore[return-value]
        if name == "aten::rsub" and rest and rest[0] == 1 and name_of(x) == "aten::sigmoid":
            return w.call(aten.log_sigmoid.default, w.call(aten.neg.default, x.args[0]))
        if name == "aten::reciprocal":
            return _log_of_inverse(w, x, dtype)
        if name == "aten::pow" and rest and isinstance(rest[0], (int, float)) and rest[0] > 0 and interval(x)[0] >= 0.0:
            return w.call(aten.mul.Scalar, _log(w, x, dtype), rest[0])
    if name == "getitem" and isinstance(x, fx.Node) and name_of(x) in _SPLITS and value(node).dtype == dtype:
        parts = w.call(x.target, _log(w, x.args[0], dtype), *x.args[1:], **x.kwargs)  # type: ignore[arg-type]
        return w.getitem(parts, node.args[1])  # type: ignore[arg-type]
    if name in _JOINED and not is_decay(node) and all(value(y).dtype == dtype for y in node.all_input_nodes):
        joined: Any = node.args[0]
        return w.call(node.target, [_log(w, y, dtype) for y in joined], *node.args[1:], **node.kwargs)
    certain = is_decay(node) or (_source(node, casts=True) == "aten::exp" and interval(node)[0] >= 0.0)
    if not certain and not _checked(w, node):
        raise NoMatch("DECAY_RANGE", f"the decay {node.name} lies in {_range(node)}", node)
    return _log_of_values(w, w.to(node, dtype))


def _checked(w: Writer, node: fx.Node) -> bool:
    """Whether a buffer holds decays now. The graph then asserts, whenever it runs, that it does."""
    while is_view(node) or name_of(node) in PICKS:
        node = node.args[0]  # type: ignore[assignment]
    x = known_value(node) if node.op == "get_attr" else known_buffer(node)
    if x is None or not bool(((x >= 0) & (x <= 1)).all()):
        return False
    if not any(name_of(n) == "aten::_assert_async" and n.meta.get(CHECKED) is node for n in w.inserted):
        inside = [w.call(aten.ge.Scalar, node, 0.0), w.call(aten.le.Scalar, node, 1.0)]
        held = w.call(aten.all.default, w.call(aten.logical_and.default, *inside))
        message = (
            f"lattn_compile: {node.name} does not hold decays in [0, 1], as it did when this graph was rewritten. "
            "Compile or rewrite again, or give the decay as exp of a log decay."
        )
        w.call(aten._assert_async.msg, held, message).meta[CHECKED] = node
    return True


CHECKED = "lattn_checked"
"""Key of an assertion's metadata for the input that it is about."""


def _log_of_inverse(w: Writer, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """log of 1 / node, where that is 1 / exp(x), or certain to lie in [0, 1]."""
    try:
        return w.call(aten.neg.default, _argument(w, node, "aten::exp", dtype))
    except NoMatch:
        if value(node).dtype not in (torch.float32, torch.float64) or interval(node)[0] < 1.0:
            raise
    return w.call(aten.neg.default, w.call(aten.log.default, w.to(node, dtype)))


def _log_of_values(w: Writer, x: fx.Node) -> fx.Node:
    """log of a decay that may be 0, with its gradient there, which multiplies by what was added and divides by it."""
    return w.call(aten.log.default, w.call(aten.add.Scalar, x, NEXT_TO_NOTHING))


NEXT_TO_NOTHING = 1e-30
"""Lost in every decay above 1e-22, and far from the smallest normal float32."""


def _argument(w: Writer, node: fx.Node, function: str, dtype: torch.dtype) -> fx.Node:
    """x of function(x), seen through views and selects, in the shape of `node`."""
    x = node.args[0] if node.args else None
    if isinstance(x, fx.Node) and isinstance(value(x), torch.Tensor) and value(node).dtype == value(x).dtype == dtype:
        if name_of(node) == function:
            return x
        if is_view(node) or name_of(node) in PICKS:
            return again(w, node, _argument(w, x, function, dtype))
    raise NoMatch("DECAY_RANGE", f"the decay is made of {node.name}, which lies in {_range(node)}", node)


_JOINED = frozenset(["aten::cat", "aten::stack"])
_SPLITS = frozenset(["aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind", "aten::tensor_split"])


def _range(node: fx.Node) -> str:
    lo, hi = interval(node)
    while is_view(node) or name_of(node) in PICKS or OUTER in node.meta:
        node = node.meta.get(OUTER) or node.args[0]  # type: ignore[assignment]
    given = ": it is an input of the graph, which may hold anything" if node.op == "placeholder" else ""
    return f"[{lo:g}, {hi:g}], not certain to be within [0, 1]{given}"

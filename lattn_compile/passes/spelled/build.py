"""From a chain of steps to one `lattn::decode` op over its tokens, written into the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, Index, name_of
from lattn_compile.passes.spelled.chain import Chain, Link
from lattn_compile.passes.spelled.frontier import frontier_of
from lattn_compile.passes.spelled.labels import Axis, Label, flat, is_one, size_of
from lattn_compile.passes.spelled.proposal import OUTER, NoMatch, Proposal
from lattn_compile.passes.spelled.ranges import interval, is_decay
from lattn_compile.passes.spelled.terms import Factor, is_mask
from lattn_compile.passes.spelled.token import Product, Step
from lattn_compile.passes.spelled.vectorize import vectorize
from lattn_compile.passes.spelled.views import PICKS, is_view
from lattn_compile.passes.spelled.writer import Writer, value

__all__ = ["build", "role_nodes"]

aten = torch.ops.aten


@dataclass
class _Layout:
    """Label groups of the op's axes."""

    batch: list[Label]
    heads: list[Label]
    key_heads: list[Label]
    key: list[Label]
    column: list[Label]


def role_nodes(link: Link) -> list[fx.Node]:
    """The tensors that a token's roles are read from."""
    step = link.step
    products = [*step.decay_terms, step.k, *step.v, *(step.beta or [])]
    factors = [f for p in products for f in p.factors] + list(link.read.q if link.read else ())
    return list(dict.fromkeys(f.node for f in factors))


def build(index: Index, chain: Chain) -> Proposal:
    """Write the op and everything around it behind the last node it needs. Raises NoMatch, the graph left as it was."""
    links = chain.links
    needed = [n for link in links for n in role_nodes(link)] + ([chain.root] if chain.root is not None else [])
    last = max(needed, key=lambda n: index.order[n])
    anchor = links[-1].step.update
    w = Writer(last.next if last.op != "placeholder" else _after_inputs(last), anchor)
    try:
        return _build(index, chain, w, anchor)
    except NoMatch:
        w.undo()
        raise


def _after_inputs(node: fx.Node) -> fx.Node:
    while node.op == "placeholder":
        node = node.next
    return node


def _build(index: Index, chain: Chain, w: Writer, anchor: fx.Node) -> Proposal:
    links = chain.links
    layout = _layout(chain)
    step = links[-1].step
    dtype = value(anchor).dtype
    scale = _scale(links)

    k = _over_time(w, [_product(w, link.step.k, _groups(layout, "k"), dtype) for link in links])
    v = _over_time(w, [_sum(w, link.step.v, _groups(layout, "v"), dtype) for link in links])
    q = k
    if any(link.read for link in links):
        q = _over_time(w, [_query(w, link, layout, scale, dtype) for link in links])
    beta = None
    if any(link.step.beta is not None for link in links):
        beta = _over_time(w, [_sum(w, link.step.beta or [Product()], _groups(layout, "beta"), dtype) for link in links])
    decay = "none"
    for link in links:
        decay = max(decay, link.step.decay, key=("none", "head", "channel").index)
    g = None
    if decay != "none":
        groups = _groups(layout, "g" if decay == "channel" else "beta")
        g = _over_time(w, [_log_decay(w, link.step, groups, dtype) for link in links])
    state = None if chain.root is None else _state(w, _unrounded(chain), step_index(chain), layout, dtype)

    op = w.call(
        torch.ops.lattn.decode.default,
        q,
        k,
        v,
        g,
        beta,
        state,
        None,
        None,
        None,
        None,
        rule=step.rule,
        scale=scale if scale is not None else 1.0,
    )
    old, new = [], []
    if any(link.read for link in links):
        o = w.getitem(op, 0)
        for t, link in enumerate(links):
            if link.read is not None:
                old.append(link.read.node)
                new.append(_output(w, o, t, link, layout))
    if step.update.users:
        final = w.getitem(op, 1)
        for node in [step.update, *_read_back(chain)]:
            old.append(node)
            new.append(_final(w, final, chain, layout))
    roles = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}
    proposal = Proposal(
        form="step" if len(links) == 1 else "loop",
        rule=step.rule,
        decay=decay,
        anchor=anchor,
        op=op,
        frontier=[],
        old=old,
        new=new,
        inserted=w.inserted,
        roles=roles,
        state_dtype=chain.state_dtype,
        evidence={
            "found_by": "algebra",
            "steps": len(links),
            "roles": {name: _text(node) for name, node in roles.items() if node is not None},
        },
    )
    proposal.frontier = frontier_of(index, proposal, needed=[n for link in links for n in role_nodes(link)])
    proposal.domains = _domains(proposal)
    return proposal


def _unrounded(chain: Chain) -> fx.Node:
    """The first state before it was cast for storage: the op rounds it itself, and its gradient is not rounded."""
    root = chain.root
    assert root is not None
    source = root.args[0] if root.args and name_of(root) in CASTS else None
    computed = value(chain.links[-1].step.update).dtype
    same = chain.state_dtype is not None and isinstance(source, fx.Node) and value(source).dtype == computed
    return source if same else root  # type: ignore[return-value]


def _read_back(chain: Chain) -> list[fx.Node]:
    """Casts of the last stored state back to the dtype it was computed in: what the op returns."""
    update = chain.links[-1].step.update
    found = []
    for cast in update.users if chain.state_dtype is not None else ():
        if name_of(cast) in CASTS and value(cast).dtype == chain.state_dtype:
            found += [u for u in cast.users if name_of(u) in CASTS and value(u).dtype == value(update).dtype]
    return found


def _text(node: fx.Node) -> str:
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return f"{node.name} {list(value(node).shape)}"


def step_index(chain: Chain) -> tuple[Axis, ...]:
    return chain.links[0].step.root_index


# Layout.


def _layout(chain: Chain) -> _Layout:
    step = chain.links[-1].step
    batch = flat(step.batch)
    sequences = 0 if len(batch) == 1 and _is_head(batch[0], chain) else 1
    first, heads = batch[:sequences], batch[sequences:]
    with_keys: set[Label] = set()
    for link in chain.links:
        for f in (*link.step.k.factors, *(link.read.q if link.read else ())):
            with_keys |= set(f.labels())
    present = [x for x in heads if x in with_keys]
    absent = [x for x in heads if x not in with_keys]
    heads = present + absent  # value heads of one key head are neighbours
    return _Layout(first, heads, present, flat(step.key), flat(step.column))


def _is_head(label: Label, chain: Chain) -> bool:
    """Whether the one axis beside K and V counts heads of a batch of 1: it comes after an axis of size 1."""
    link = chain.links[-1]
    factors = (*link.step.k.factors, *(f for p in link.step.v for f in p.factors), *(link.read.q if link.read else ()))
    shapes = [list(f.index) for f in factors] + [list(link.step.axes)]
    for index in shapes:
        at = next((i for i, axis in enumerate(index) if not isinstance(axis, int) and label in flat(axis)), 0)
        if at > 0 and any(not isinstance(axis, int) and not flat(axis) for axis in index[:at]):
            return True
    return False


def _groups(layout: _Layout, role: str) -> list[list[Label]]:
    tail = {"k": [layout.key_heads, layout.key], "v": [layout.heads, layout.column], "g": [layout.heads, layout.key]}
    return [layout.batch, *tail.get(role, [layout.heads])]


def _scale(links: Sequence[Link]) -> float | None:
    """The scale that all reads share."""
    scales = {link.read.scale for link in links if link.read is not None}
    return next(iter(scales)) if len(scales) == 1 else None


# Roles. Each is written for one token, [*groups], and then put together over the tokens.


def _over_time(w: Writer, tokens: list[fx.Node]) -> fx.Node:
    """[B, T, ...] of T nodes [B, ...]."""
    if len(tokens) == 1 and tokens[0] not in w.inserted:
        return w.unsqueeze(tokens[0], 1)
    stacked = vectorize(w, tokens)
    rank = len(value(stacked).shape)
    return w.permute(stacked, [1, 0, *range(2, rank)])


def _query(w: Writer, link: Link, layout: _Layout, scale: float | None, dtype: torch.dtype) -> fx.Node:
    if link.read is None:
        return _product(w, link.step.k, _groups(layout, "k"), dtype)
    return _product(w, Product(1.0 if scale is not None else link.read.scale, link.read.q), _groups(layout, "k"), dtype)


def _product(w: Writer, product: Product, groups: list[list[Label]], dtype: torch.dtype) -> fx.Node:
    """coefficient · Π factors as one tensor with an axis a group."""
    return _filled(w, _narrow(w, product, groups, dtype), groups)


def _narrow(w: Writer, product: Product, groups: list[list[Label]], dtype: torch.dtype) -> fx.Node:
    """The product with one axis a label, of size 1 where nothing depends on it."""
    wanted = [label for group in groups for label in group]
    out: fx.Node | None = None
    for f in product.factors:
        x = w.to(_placed(w, f, wanted), dtype)
        if f.inverse:
            out = w.call(aten.reciprocal.default, x) if out is None else w.call(aten.div.Tensor, out, x)
        else:
            out = x if out is None else w.call(aten.mul.Tensor, out, x)
    if out is None:
        like = _device(w)
        out = w.call(aten.full.default, [1] * len(wanted), product.coefficient, dtype=dtype, device=like)
    elif product.coefficient != 1.0:
        out = w.call(aten.mul.Scalar, out, product.coefficient)
    return out


def _device(w: Writer) -> torch.device:
    return value(w.like).device  # type: ignore[no-any-return]


def _placed(w: Writer, f: Factor, wanted: list[Label]) -> fx.Node:
    """A factor's tensor with an axis for each of `wanted`, in their order."""
    node = _booleans(w, f.node) if is_mask(f) else f.node
    for dim in reversed(range(len(f.index))):
        at = f.index[dim]
        if isinstance(at, int):
            node = w.select(node, dim, at)
    axes = [flat(a) for a in f.index if not isinstance(a, int)]
    labels = [label for axis in axes for label in axis]
    if len(set(labels)) != len(labels) or not set(labels) <= set(wanted):
        raise NoMatch("NOT_RANK_ONE", f"{f.node.name} runs along other axes than its role has", f.node)
    node = w.reshape(node, [label.size for label in labels])
    order = sorted(range(len(labels)), key=lambda i: wanted.index(labels[i]))
    node = w.permute(node, order)
    node = w.reshape(node, [label.size if label in labels else 1 for label in wanted])
    return w.call(aten.logical_not.default, node) if f.negated else node


def _booleans(w: Writer, node: fx.Node) -> fx.Node:
    """The booleans that a mask was cast from, in its shape."""
    if value(node).dtype == torch.bool:
        return node
    inside = _booleans(w, node.args[0])  # type: ignore[arg-type]
    return inside if name_of(node) in CASTS else _again(w, node, inside)


def _again(w: Writer, node: fx.Node, x: fx.Node) -> fx.Node:
    """A view or a part, of another tensor of the same shape, whose strides may be others."""
    target = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target
    return w.call(target, x, *node.args[1:], **node.kwargs)


def _filled(w: Writer, node: fx.Node, groups: list[list[Label]]) -> fx.Node:
    """Axes of labels grouped, broadcast ones at full size."""
    wanted = [label for group in groups for label in group]
    node = w.expand(node, [label.size for label in wanted])
    return w.reshape(node, [size_of(group) for group in groups])


def _sum(w: Writer, products: list[Product], groups: list[list[Label]], dtype: torch.dtype) -> fx.Node:
    out = _narrow(w, products[0], groups, dtype)
    for p in products[1:]:
        out = w.call(aten.add.Tensor, out, _narrow(w, p, groups, dtype))
    return _filled(w, out, groups)


def _log_decay(w: Writer, step: Step, groups: list[list[Label]], dtype: torch.dtype) -> fx.Node:
    """log D. Raises NoMatch where D is not certain to lie in [0, 1]."""
    if (mask := _mask_of(step.decay_terms)) is not None:
        return _log_where(w, step, mask, groups, dtype)
    if (taken := _one_plus_expm1(step)) is not None:
        return _filled(w, _log_factor(w, taken, groups, dtype, "aten::expm1"), groups)
    if len(step.decay_terms) > 1:
        wanted = [label for group in groups for label in group]
        total: fx.Node | None = None
        for p in step.decay_terms:
            x = _narrow(w, p, groups, dtype)
            total = x if total is None else w.call(aten.add.Tensor, total, x)
        assert total is not None and len(value(total).shape) == len(wanted)
        if not is_decay(total):
            raise NoMatch("DECAY_RANGE", f"the decay lies in {_range(total)}", step.update)
        return _filled(w, _log_of_values(w, total), groups)
    (product,) = step.decay_terms
    if product.coefficient < 0.0:
        raise NoMatch("DECAY_RANGE", f"the decay has the factor {product.coefficient:g}", step.update)
    mark = len(w.inserted)
    try:
        return _filled(w, _log_product(w, product, groups, dtype, step), groups)
    except NoMatch:
        w.undo(mark)
        # One factor is no decay, all of them may be: (1 + tanh(x)) / 2.
        total = _narrow(w, product, groups, dtype)
        if not is_decay(total):
            w.undo(mark)
            raise
        return _filled(w, _log_of_values(w, total), groups)


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
        return w.call(aten.full.default, size, constant, dtype=dtype, device=_device(w))
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
            logs.append(_log_decay(w, replace(step, decay_terms=terms), groups, dtype))
        else:
            logs.append(w.call(aten.full.default, [1] * len(groups), -math.inf, dtype=dtype, device=_device(w)))
    return w.call(aten.where.self, _filled(w, _placed(w, plain, wanted), groups), *logs)


def _one_plus_expm1(step: Step) -> Factor | None:
    """The expm1(x) of a decay 1 + expm1(x)."""
    if len(step.decay_terms) != 2 or any(p.coefficient != 1.0 for p in step.decay_terms):
        return None
    factors = [f for p in step.decay_terms for f in p.factors]
    if len(factors) != 1 or factors[0].inverse or _source(factors[0].node) != "aten::expm1":
        return None
    return factors[0]


def _source(node: fx.Node) -> str:
    """What a node's values come from, through views and selects, and from outside a loop's body."""
    while is_view(node) or name_of(node) in PICKS or OUTER in node.meta:
        node = node.meta.get(OUTER) or node.args[0]  # type: ignore[assignment]
    return name_of(node)


def _log_factor(w: Writer, f: Factor, groups: list[list[Label]], dtype: torch.dtype, function: str = "") -> fx.Node:
    """log of one factor of the decay, or the argument of `function` in it."""
    if function:
        log = _argument(w, f.node, function, dtype)
    elif f.inverse:
        log = _log_of_inverse(w, f.node, dtype)
    else:
        log = _log(w, f.node, dtype)
    return w.to(_placed(w, Factor(log, f.index), [label for group in groups for label in group]), dtype)


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
            return _again(w, node, _log(w, x, dtype))
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
    if not is_decay(node) and not (_source(node) == "aten::exp" and interval(node)[0] >= 0.0):
        raise NoMatch("DECAY_RANGE", f"the decay {node.name} lies in {_range(node)}", node)
    return _log_of_values(w, w.to(node, dtype))


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
    return w.call(aten.log.default, w.call(aten.add.Scalar, x, _NEXT_TO_NOTHING))


_NEXT_TO_NOTHING = 1e-30
"""Lost in every decay above 1e-22, and far from the smallest normal float32."""


def _argument(w: Writer, node: fx.Node, function: str, dtype: torch.dtype) -> fx.Node:
    """x of function(x), seen through views and selects, in the shape of `node`."""
    x = node.args[0] if node.args else None
    if isinstance(x, fx.Node) and isinstance(value(x), torch.Tensor) and value(node).dtype == value(x).dtype == dtype:
        if name_of(node) == function:
            return x
        if is_view(node) or name_of(node) in PICKS:
            return _again(w, node, _argument(w, x, function, dtype))
    raise NoMatch("DECAY_RANGE", f"the decay is made of {node.name}, which lies in {_range(node)}", node)


_SPLITS = frozenset(["aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind", "aten::tensor_split"])


def _range(node: fx.Node) -> str:
    lo, hi = interval(node)
    while is_view(node) or name_of(node) in PICKS or OUTER in node.meta:
        node = node.meta.get(OUTER) or node.args[0]  # type: ignore[assignment]
    given = ": it is an input of the graph, which may hold anything" if node.op == "placeholder" else ""
    return f"[{lo:g}, {hi:g}], not certain to be within [0, 1]{given}"


# State and outputs.


def _state(w: Writer, root: fx.Node, axes: Sequence[Axis], layout: _Layout, dtype: torch.dtype) -> fx.Node:
    wanted = [*layout.batch, *layout.heads, *layout.key, *layout.column]
    labels = [label for axis in axes for label in flat(axis)]
    node = w.reshape(root, [label.size for label in labels])
    node = w.permute(node, [labels.index(x) for x in wanted])
    groups = [layout.batch, layout.heads, layout.key, layout.column]
    return w.to(w.reshape(node, [size_of(group) for group in groups]), dtype)


def _final(w: Writer, state: fx.Node, chain: Chain, layout: _Layout) -> fx.Node:
    link = chain.links[-1]
    wanted = [*layout.batch, *layout.heads, *layout.key, *layout.column]
    node = _shaped(w, state, wanted, link.step.axes, link.step.update)
    return w.to(node, value(link.step.update).dtype)


def _shaped(w: Writer, node: fx.Node, have: list[Label], axes: Sequence[Axis], like: fx.Node) -> fx.Node:
    """[labels of `have`] as a tensor with `axes`, in the shape of `like`."""
    node = w.reshape(node, [label.size for label in have])
    want = [label for axis in axes for label in flat(axis)]
    node = w.permute(node, [have.index(x) for x in want])
    return w.reshape(node, list(value(like).shape))


def _output(w: Writer, o: fx.Node, t: int, link: Link, layout: _Layout) -> fx.Node:
    assert link.read is not None
    read = link.read
    have = [*layout.batch, *layout.heads, *layout.column]
    node = _shaped(w, w.select(o, 1, t), have, read.axes, read.node)
    return w.to(node, value(read.node).dtype)


def _domains(proposal: Proposal) -> dict[fx.Node, str]:
    """How random values of the inputs are drawn: what a decay is made of has to be negative."""
    out: dict[fx.Node, str] = {}
    for node in proposal.frontier:
        if any(name_of(n) in _POSITIVE for n in _near(node)):
            # A root or log of it is taken. That it is not negative may be known only while a loop's body is searched.
            out[node] = "decay" if is_decay(node) or (OUTER in node.meta and interval(node)[0] >= 0) else "beta"
    for role, domain in (("g", "log_decay"), ("beta", "beta"), ("k", "key")):
        value_of_role = proposal.roles.get(role)
        while value_of_role is not None and value_of_role not in proposal.frontier and _passes_on(value_of_role):
            source = value_of_role.args[0]
            value_of_role = source if isinstance(source, fx.Node) else None
        if value_of_role is None or value_of_role not in proposal.frontier:
            continue
        if role != "k" or _last_axis_kept(proposal, value_of_role):
            out.setdefault(value_of_role, "decay" if domain == "beta" and is_decay(value_of_role) else domain)
    return out


_POSITIVE = frozenset(["aten::sqrt", "aten::rsqrt", "aten::log", "aten::log2", "aten::pow", "aten::log1p"])


def _near(node: fx.Node) -> list[fx.Node]:
    """Users of a node's values, views, selects and what we add below a log aside."""
    out: list[fx.Node] = []
    waiting = list(node.users)
    while waiting and len(out) < 64:
        user = waiting.pop()
        out.append(user)
        if _passes_on(user) or _NEXT_TO_NOTHING in user.args:
            waiting.extend(user.users)
    return out


def _passes_on(node: fx.Node) -> bool:
    return is_view(node) or name_of(node) in ("aten::select", "aten::slice", "aten::to", "aten::_to_copy", "aten::flip")


def _last_axis_kept(proposal: Proposal, node: fx.Node) -> bool:
    k = proposal.roles["k"]
    return k is not None and not is_one(value(k).shape[-1]) and value(node).shape[-1] == value(k).shape[-1]

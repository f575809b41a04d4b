"""From a chain of steps to one `lattn::decode` op over its tokens, written into the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import CASTS, Index, name_of
from lattn_compile.passes.spelled.chain import Chain, Link
from lattn_compile.passes.spelled.frontier import frontier_of
from lattn_compile.passes.spelled.labels import Axis, Label, flat, is_one, size_of
from lattn_compile.passes.spelled.log_decay import CHECKED, NEXT_TO_NOTHING, log_decay
from lattn_compile.passes.spelled.products import product_of, sum_of
from lattn_compile.passes.spelled.proposal import OUTER, NoMatch, Proposal
from lattn_compile.passes.spelled.ranges import interval, is_decay
from lattn_compile.passes.spelled.terms import Factor
from lattn_compile.passes.spelled.token import Product, Step
from lattn_compile.passes.spelled.vectorize import vectorize
from lattn_compile.passes.spelled.views import is_view
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
    products = [*step.decay_terms, *step.k, *step.v, *(step.beta or [])]
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

    k = _over_time(w, [_key(w, link, layout, dtype) for link in links])
    v = _over_time(w, [_value(w, link, layout, dtype) for link in links])
    q = k
    if any(link.read for link in links):
        q = _over_time(w, [_query(w, link, layout, scale, dtype) for link in links])
    beta = None
    if any(link.step.beta is not None for link in links):
        beta = _over_time(
            w, [sum_of(w, link.step.beta or [Product()], _groups(layout, "beta"), dtype) for link in links]
        )
    decay = "none"
    for link in links:
        decay = max(decay, link.step.decay, key=("none", "head", "channel").index)
    g = None
    if decay != "none":
        groups = _groups(layout, "g" if decay == "channel" else "beta")
        g = _over_time(w, [log_decay(w, link.step, groups, dtype) for link in links])
    state = None if chain.root is None else _state(w, _unrounded(chain), step_index(chain), layout, dtype)
    if state is not None:
        state = _cleared(w, state, links[0].step, layout, dtype)

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
        for f in (*_factors(link.step.k), *(link.read.q if link.read else ())):
            with_keys |= set(f.labels())
    present = [x for x in heads if x in with_keys]
    absent = [x for x in heads if x not in with_keys]
    heads = present + absent  # value heads of one key head are neighbours
    return _Layout(first, heads, present, flat(step.key), flat(step.column))


def _is_head(label: Label, chain: Chain) -> bool:
    """Whether the one axis beside K and V counts heads of a batch of 1: it comes after an axis of size 1."""
    link = chain.links[-1]
    factors = (*_factors(link.step.k), *_factors(link.step.v), *(link.read.q if link.read else ()))
    shapes = [list(f.index) for f in factors] + [list(link.step.axes)]
    for index in shapes:
        at = next((i for i, axis in enumerate(index) if not isinstance(axis, int) and label in flat(axis)), 0)
        if at > 0 and any(not isinstance(axis, int) and not flat(axis) for axis in index[:at]):
            return True
    return False


def _factors(products: Sequence[Product]) -> Iterator[Factor]:
    return (f for p in products for f in p.factors)


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


def _key(w: Writer, link: Link, layout: _Layout, dtype: torch.dtype) -> fx.Node:
    """k, 0 where the token is skipped: it may be anything there, NaN included."""
    masks, along = link.step.masks(), [*layout.batch, *layout.key_heads]
    return sum_of(w, [p.masked(masks, along) for p in link.step.k], _groups(layout, "k"), dtype)


def _value(w: Writer, link: Link, layout: _Layout, dtype: torch.dtype) -> fx.Node:
    """v, likewise."""
    masks, along = link.step.masks(), [*layout.batch, *layout.heads]
    return sum_of(w, [p.masked(masks, along) for p in link.step.v], _groups(layout, "v"), dtype)


def _query(w: Writer, link: Link, layout: _Layout, scale: float | None, dtype: torch.dtype) -> fx.Node:
    if link.read is None:
        return sum_of(w, link.step.k, _groups(layout, "k"), dtype)
    return product_of(
        w, Product(1.0 if scale is not None else link.read.scale, link.read.q), _groups(layout, "k"), dtype
    )


# State and outputs.


def _state(w: Writer, root: fx.Node, axes: Sequence[Axis], layout: _Layout, dtype: torch.dtype) -> fx.Node:
    wanted = [*layout.batch, *layout.heads, *layout.key, *layout.column]
    labels = [label for axis in axes for label in flat(axis)]
    node = w.reshape(root, [label.size for label in labels])
    node = w.permute(node, [labels.index(x) for x in wanted])
    groups = [layout.batch, layout.heads, layout.key, layout.column]
    return w.to(w.reshape(node, [size_of(group) for group in groups]), dtype)


def _cleared(w: Writer, state: fx.Node, step: Step, layout: _Layout, dtype: torch.dtype) -> fx.Node:
    """The state, 0 where the first token clears it: a slot that is taken anew may hold NaN."""
    if (kept := step.kept()) is None:
        return state
    groups = _groups(layout, "beta")
    along = {label for group in groups for label in group}
    if any(not set(f.labels()) <= along for p in kept for f in p.factors):
        return state
    here = w.call(aten.ne.Scalar, sum_of(w, kept, groups, dtype), 0.0)
    return w.call(aten.where.ScalarOther, w.unsqueeze(w.unsqueeze(here, 2), 3), state, 0.0)


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
    checked = {n.meta[CHECKED] for n in proposal.inserted if CHECKED in n.meta}
    for node in proposal.frontier:
        if any(name_of(n) in _POSITIVE for n in _near(node)):
            # A root or log of it is taken. That it is not negative may be known only while a loop's body is searched.
            positive = OUTER in node.meta and interval(node)[0] >= 0
            out[node] = "decay" if is_decay(node) or positive or node in checked else "beta"
        elif is_decay(node) and any(name_of(n) in _POSITIVE for u in _near(node) if _from_one(u) for n in _near(u)):
            out[node] = "decay"  # S + w (v - S): 1 - w is one, too
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


def _from_one(node: fx.Node) -> bool:
    """Whether a node is 1 - x."""
    return name_of(node) == "aten::rsub" and bool(node.args[1] == 1) and not node.kwargs


def _near(node: fx.Node) -> list[fx.Node]:
    """Users of a node's values, views, selects and what we add below a log aside."""
    out: list[fx.Node] = []
    waiting = list(node.users)
    while waiting and len(out) < 64:
        user = waiting.pop()
        out.append(user)
        if _passes_on(user) or NEXT_TO_NOTHING in user.args:
            waiting.extend(user.users)
    return out


def _passes_on(node: fx.Node) -> bool:
    return is_view(node) or name_of(node) in ("aten::select", "aten::slice", "aten::to", "aten::_to_copy", "aten::flip")


def _last_axis_kept(proposal: Proposal, node: fx.Node) -> bool:
    k = proposal.roles["k"]
    return k is not None and not is_one(value(k).shape[-1]) and value(node).shape[-1] == value(k).shape[-1]

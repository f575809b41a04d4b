"""Which boundary tensor is q, k, v, g, beta: read off the graph where it says so, tried in float64 where not."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

import lattn_compile.ops.chunk  # noqa: F401  (registers the op that is tried)
from lattn_compile.passes.spelled.chunk_decay import FixedDecay, decay_of, find_decay, is_fixed, measured
from lattn_compile.passes.spelled.chunk_layout import EAGER, from_output, output_of, state_of, to_op, to_state
from lattn_compile.passes.spelled.chunk_ops import sizes_of
from lattn_compile.passes.spelled.chunk_region import Boundary
from lattn_compile.passes.spelled.chunk_tables import Tables
from lattn_compile.passes.spelled.chunk_trial import Trial
from lattn_compile.passes.spelled.chunk_views import Sizes, View, state_views, views
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.verify import TOLERANCE

_VIEWS = 3
"""Readings of one tensor's axes that are tried where sizes coincide."""

_READINGS = 256
_HYPOTHESES = 16
"""Runs of the op for one boundary."""


@dataclass(frozen=True)
class Bound:
    """A boundary tensor and how its axes are read."""

    node: fx.Node
    view: View


@dataclass(frozen=True)
class Roles:
    """A hypothesis: the region computes this recurrence.

    Attributes:
        fixed: the decay where no token chooses it; tables: leaves that hold its powers; negative: whether it was found
            with numbers below 0 for what no token reaches.
        decay_form: how g is had from its tensor: "log" (as it is) or "decay" (its logarithm).
        log_beta: whether the tensor of beta holds its logarithm: an input gate in the exponent of a decay mask.
        o, final: views of the outputs; the state's are those that are possible, none if no state is returned.
        error: the largest difference that was seen, relative to the largest magnitude.
    """

    q: Bound
    k: Bound
    v: Bound
    g: Bound | None
    beta: Bound | None
    state: Bound | None
    rule: str
    decay_form: str
    o: View
    final: tuple[View, ...]
    sizes: Sizes
    fixed: FixedDecay | None = None
    tables: Tables | None = None
    negative: bool = False
    log_beta: bool = False
    scale: float = 1.0
    error: float = 0.0

    @property
    def cost(self) -> int:
        """0 if every axis is where it usually is."""
        return self.o.cost + sum(x.view.cost for x in (self.q, self.k, self.v, self.g, self.beta) if x is not None)

    @property
    def keys(self) -> int:
        return self.q.view.size("f", sizes_of(self.q.node) or ())


def find_roles(exits: Sequence[fx.Node], o_at: int, boundary: Boundary, sizes: Sizes) -> Roles:
    """The roles under which the region is the recurrence. `exits[o_at]` is taken for o.

    Raises:
        NoMatch: CHUNK_INPUTS where the boundary has not the tensors of a recurrence, CHUNK_DECAY_INPUTS or
            CHUNK_NOT_EQUAL where no assignment computes what the region does.
    """
    tensors = boundary.tokens
    if not 3 <= len(tensors) <= 6 or len(boundary.states) > 1:
        raise NoMatch("CHUNK_INPUTS", f"its inputs are {_names([*tensors, *boundary.states])}")
    trial = Trial(exits, boundary, sizes)
    gates = [n for n in tensors if trial.is_gate(n)]
    plain = [n for n in tensors if n not in gates]
    kinds = _kinds(plain, sizes) if len(gates) <= 1 else []
    if len(gates) == 2 and len(plain) == 3 and (split := trial.decay_and_strength(gates)) is not None:
        decay, strength = split
        gates, kinds = [decay], [(plain, [strength])]
    if not kinds and len(plain) in (4, 5) and not boundary.states:
        # A state whose K is T looks like a sequence.
        for n in plain:
            if any(True for _ in state_views(sizes_of(n) or (), sizes, None)):
                rest = [t for t in tensors if t is not n]
                with contextlib.suppress(NoMatch):
                    return find_roles(exits, o_at, replace(boundary, tokens=rest, states=[n]), sizes)
    if not kinds:
        raise NoMatch("CHUNK_INPUTS", f"its inputs are {_names(plain)}, decays {_names(gates)}")
    if not _is_output(exits[o_at], sizes):
        raise NoMatch("CHUNK_INPUTS", "no output has the tokens' axis")
    if not gates:
        trial.look_for_tables()
    chosen = bool(gates) or not boundary.statics
    for negative in (False,) if chosen else (False, True):
        trial.prepare(negative=negative)
        base = trial.run(state=False)
        if not all(torch.isfinite(x).all() for x in base):
            miss = NoMatch("CHUNK_NOT_EQUAL", "it is not finite on random inputs")
            continue
        if float(base[o_at].abs().max()) == 0.0:
            raise NoMatch("CHUNK_INPUTS", "its output is zero without a state")
        search = _Hypotheses(exits, o_at, boundary, sizes, trial, base, gates)
        for vectors, scalars in kinds:
            if (found := search.run(vectors, scalars)) is not None:
                return replace(found, tables=trial.tables if found.fixed is not None else None, negative=negative)
        miss = NotEqual(search.best, plain)
        tables = [n for n in boundary.statics if not _is_longer_sequence(n, sizes)]
        if not chosen and tables and search.fixed:
            miss = NoMatch("CHUNK_DECAY_INPUTS", f"they are {_names(tables)}", tables[0])
    raise miss


class NotEqual(NoMatch):
    """No assignment computes what the region does. `distance`: of the closest one, inf if none could be."""

    def __init__(self, distance: float, tensors: Sequence[fx.Node]) -> None:
        closest = f"the closest recurrence differs by {distance:.2g} of o on random inputs"
        if distance == float("inf"):
            closest = f"in no choice of q, k, v from {_names(tensors)} is o linear in q and v"
        super().__init__("CHUNK_NOT_EQUAL", closest)
        self.distance = distance


def _kinds(nodes: Sequence[fx.Node], sizes: Sizes) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """(three vectors, at most one number a token) that these tensors may be, likely ones first."""
    cost = [
        [min((v.cost for v in _readings(n, sizes) if ("f" in v.labels) == f), default=None) for n in nodes]
        for f in (False, True)
    ]
    found = []
    for scalar in [None, *range(len(nodes))]:
        vectors = [i for i in range(len(nodes)) if i != scalar]
        if len(vectors) != 3 or (scalar is not None and cost[0][scalar] is None):
            continue
        # A vector of one channel is read as a number.
        total = sum(c for i in vectors if (c := cost[1][i] if cost[1][i] is not None else 3) is not None)
        found.append((total + (cost[0][scalar] if scalar is not None else 0), scalar or 0, vectors, scalar))
    return [([nodes[i] for i in v], [] if s is None else [nodes[s]]) for *_, v, s in sorted(found, key=lambda x: x[:2])]


class _Hypotheses:
    """Assignments of roles to tensors, run against what the region computed."""

    def __init__(
        self,
        exits: Sequence[fx.Node],
        o_at: int,
        boundary: Boundary,
        sizes: Sizes,
        trial: Trial,
        base: list[Tensor],
        gates: Sequence[fx.Node],
    ) -> None:
        self.exits, self.o_at, self.boundary, self.sizes = exits, o_at, boundary, sizes
        self.trial, self.base, self.gates = trial, base, gates
        self.best = float("inf")
        self.fixed = False  # whether what a second token keeps of the first was seen to depend on the head alone
        self._linear: dict[fx.Node, tuple[bool, bool | None]] = {}

    def run(self, vectors: Sequence[fx.Node], scalars: Sequence[fx.Node]) -> Roles | None:
        """The first assignment under which old and new agree."""
        hypotheses = self._assignments(vectors, scalars)
        for roles in sorted(hypotheses, key=lambda r: r.cost)[:_HYPOTHESES]:
            found = _test(roles, self.trial, self.base, self.o_at)
            if found.error > TOLERANCE and not self.gates:
                fixed, same = _fixed(roles, self.trial, self.o_at)
                self.fixed = self.fixed or same
                if fixed is not None:
                    found = _test(replace(roles, fixed=fixed), self.trial, self.base, self.o_at)
            if found.error <= TOLERANCE and self.boundary.states:
                found = self._with_state(found)
            if found.error <= TOLERANCE:
                return found
            self.best = min(self.best, found.error)
        return None

    def _with_state(self, roles: Roles) -> Roles:
        """What holds from no state, with the initial state in the reading that fits best."""
        (state,) = self.boundary.states
        base = self.trial.run(state=True)
        readings = _state_readings(state, self.sizes, roles.keys)
        found = [_test(replace(roles, state=Bound(state, view)), self.trial, base, self.o_at) for view in readings]
        return min(found, key=lambda r: r.error, default=replace(roles, error=float("inf")))

    def _scaling(self, node: fx.Node) -> tuple[bool, bool | None]:
        """Whether o doubles with this tensor; whether the state does (None: it does not change)."""
        if node not in self._linear:
            twice = self.trial.run({node: 2 * self.trial.values[node]}, state=False)
            o = _error(twice[self.o_at], 2 * self.base[self.o_at]) <= TOLERANCE
            state = None
            if len(self.base) > 1:
                was, is_now = self.base[1 - self.o_at], twice[1 - self.o_at]
                state = None if torch.equal(is_now, was) else _error(is_now, 2 * was) <= TOLERANCE
            self._linear[node] = o, state
        return self._linear[node]

    def _assignments(self, vectors: Sequence[fx.Node], scalars: Sequence[fx.Node]) -> Iterator[Roles]:
        exits, sizes, trial, gates = self.exits, self.sizes, self.trial, self.gates
        returned = len(exits) == 2
        o_views = _output_views(exits[self.o_at], sizes)
        for q, k, v in itertools.permutations(vectors):
            (o_by_q, s_by_q), (o_by_v, s_by_v) = self._scaling(q), self._scaling(v)
            if not o_by_q or not o_by_v or (returned and (s_by_q is not None or s_by_v is not True)):
                continue
            rules: tuple[str, ...] = ("delta",)
            if self._scaling(k)[0]:
                # One token from a zero state is the same under both rules.
                rules = ("delta", "additive") if trial.multiplies(k) else ("additive", "delta")
            nodes = [q, k, v, *gates, *scalars]
            every = itertools.product(*(_readings(n, sizes) for n in nodes), o_views)
            for readings in itertools.islice(every, _READINGS):
                *read, o_view = readings
                bound = [Bound(n, w) for n, w in zip(nodes, read, strict=True)]
                bq, bk, bv = bound[:3]
                keys = bq.view.size("f", sizes_of(q) or ())
                if bk.view.size("f", sizes_of(k) or ()) != keys or bv.view.size("f", sizes_of(v) or ()) != sizes.width:
                    continue
                # Several heads of queries may share one of values where no state says of how many heads it is.
                with_state = returned or self.boundary.states
                if with_state and bv.view.size("h", sizes_of(v) or ()) != sizes.heads:
                    continue
                g = bound[3] if gates else None
                beta = bound[-1] if scalars else None
                if beta is not None and "f" in beta.view.labels:
                    continue
                if g is not None and "f" in g.view.labels and g.view.size("f", sizes_of(g.node) or ()) != keys:
                    continue
                finals = tuple(_state_readings(exits[1 - self.o_at], sizes, keys)) if returned else ()
                if returned and not finals:
                    continue
                for rule in rules:
                    form = "decay" if gates and trial.as_decay[gates[0]] else "log"
                    log_beta = beta is not None and trial.is_gate(beta.node)
                    yield Roles(bq, bk, bv, g, beta, None, rule, form, o_view, finals, sizes, log_beta=log_beta)


def _readings(node: fx.Node, sizes: Sizes) -> list[View]:
    found = views(node, sizes)
    return found[:_VIEWS]  # unusual ones come last


def _state_readings(node: fx.Node, sizes: Sizes, keys: int) -> list[View]:
    return list(state_views(sizes_of(node) or (), sizes, keys))


def _output_views(node: fx.Node, sizes: Sizes) -> list[View]:
    tokens = sizes.padded if sizes.padded is not None else sizes.tokens
    out = replace(sizes, tokens=tokens, chunk=None)
    shape = sizes_of(node) or ()
    found = [w for w in views(node, out) if w.size("f", shape) == sizes.width and w.size("h", shape) == sizes.heads]
    return found[:_VIEWS]


def _is_output(node: fx.Node, sizes: Sizes) -> bool:
    return any(v.cost <= 1 for v in _output_views(node, sizes))


def _test(roles: Roles, trial: Trial, base: list[Tensor], o_at: int) -> Roles:
    """The hypothesis with its scale and its error filled in."""
    get: Callable[[fx.Node], Tensor] = trial.values.__getitem__
    o, final = evaluate(EAGER, roles, get, scale=1.0)
    want = base[o_at]
    o = output_of(EAGER, o, roles.o, want.shape, roles.sizes)
    denominator = float((o * o).sum())
    scale = float((o * want).sum()) / denominator if denominator else 1.0
    for usual in (1.0, roles.keys**-0.5):
        if abs(scale - usual) <= TOLERANCE * usual:
            scale = usual
    error = _error(scale * o, want)
    if not roles.final or error > TOLERANCE:
        return replace(roles, scale=scale, error=error)
    want = base[1 - o_at]
    errors = {view: _error(state_of(EAGER, final, view, want.shape), want) for view in roles.final}
    best = min(roles.final, key=errors.__getitem__)
    return replace(roles, scale=scale, error=max(error, errors[best]), final=(best,))


def _fixed(roles: Roles, trial: Trial, o_at: int) -> tuple[FixedDecay | None, bool]:
    """A decay that is the same for every token, if the region has one: measured by writing the first token only; and
    whether there is one at all, of whatever powers."""
    first = {n: _first_token(trial.values[n], view) for n, view in ((b.node, b.view) for b in (roles.k, roles.v))}
    o = from_output(trial.run(first, state=False)[o_at], roles.o)
    heads = roles.sizes.heads
    q = to_op(EAGER, trial.values[roles.q.node], roles.q.view, heads, features=True)
    k = to_op(EAGER, first[roles.k.node], roles.k.view, heads, features=True)
    decay = measured(o, q, k)
    if decay is None:
        return None, is_fixed(o, q, k)
    if trial.tables is not None and (fixed := decay_of(trial.tables, decay, trial.values)) is not None:
        return fixed, True
    statics = {n: trial.values[n] for n in trial.boundary.statics if isinstance(trial.values[n], Tensor)}
    return find_decay(decay, trial.region.nodes, trial.inputs, statics), True


def _first_token(x: Tensor, view: View) -> Tensor:
    for at in (i for i, label in enumerate(view.labels) if label in "tmc"):
        x = torch.cat([x.narrow(at, 0, 1), torch.zeros_like(x.narrow(at, 1, x.shape[at] - 1))], at)
    return x


def evaluate(
    w: Any, roles: Roles, get: Callable[[fx.Node], Any], *, scale: float, ones: bool = False
) -> tuple[Any, Any]:
    """The op on the boundary's tensors, in whatever world `w` writes (eager tensors or graph nodes).

    `ones`: of one value a token, which is 1, and from no state.
    """
    s = roles.sizes
    heads = max(x.view.size("h", sizes_of(x.node) or ()) for x in (roles.q, roles.k))
    q = to_op(w, get(roles.q.node), roles.q.view, heads, features=True)
    k = to_op(w, get(roles.k.node), roles.k.view, heads, features=True)
    if ones:
        v = w.ones([*w.shape(q)[:2], s.heads, 1], k)
    else:
        v = to_op(w, get(roles.v.node), roles.v.view, s.heads, features=True)
    g = beta = state = None
    if roles.g is not None:
        g = to_op(w, get(roles.g.node), roles.g.view, s.heads, features="f" in roles.g.view.labels)
        if roles.decay_form == "decay":
            g = w.log(g)
    if roles.fixed is not None:
        g = w.fixed(roles.fixed, q, s.heads)
    if roles.beta is not None:
        beta = to_op(w, get(roles.beta.node), roles.beta.view, s.heads, features=False)
        beta = w.exp(beta) if roles.log_beta else beta
    if roles.state is not None and not ones:
        state = to_state(w, get(roles.state.node), roles.state.view, w.shape(q)[0], s.heads)
    return w.chunk(q, k, v, g, beta, state, rule=roles.rule, scale=scale)


def _error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    top = float(want.abs().max()) if want.numel() else 0.0
    return float((got - want).abs().max()) / top if top else float((got - want).abs().max() if got.numel() else 0.0)


def _is_longer_sequence(node: fx.Node, sizes: Sizes) -> bool:
    """Whether a value that no token of a block reaches is what the block was cut from: a gate of all tokens."""
    shape = sizes_of(node) or ()
    return len(shape) > 2 and shape[0] == sizes.batch and isinstance(shape[1], int) and shape[1] > sizes.tokens


def _names(nodes: Sequence[fx.Node]) -> str:
    return "[" + ", ".join(str(n) for n in nodes) + "]"

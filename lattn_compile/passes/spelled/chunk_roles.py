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
from lattn_compile.passes.spelled.analytic import vet
from lattn_compile.passes.spelled.chunk_decay import FixedDecay, find_decay, measured
from lattn_compile.passes.spelled.chunk_layout import EAGER, from_output, output_of, state_of, to_op, to_state
from lattn_compile.passes.spelled.chunk_ops import PRODUCTS, name_of, sizes_of, sources
from lattn_compile.passes.spelled.chunk_region import Boundary
from lattn_compile.passes.spelled.chunk_views import Sizes, View, state_views, views
from lattn_compile.passes.spelled.proposal import NoMatch
from lattn_compile.passes.spelled.scaled import real
from lattn_compile.passes.spelled.subgraph import Region, clean_state, extract, run
from lattn_compile.passes.spelled.verify import TOLERANCE
from lattn_compile.passes.spelled.writer import value

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
        fixed: the decay where no token chooses it.
        decay_form: how g is had from its tensor: "log" (as it is) or "decay" (its logarithm).
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
    scale: float = 1.0
    error: float = 0.0

    @property
    def cost(self) -> int:
        """0 if every axis is where it usually is."""
        return self.o.cost + sum(x.view.cost for x in (self.q, self.k, self.v, self.g, self.beta) if x is not None)

    @property
    def keys(self) -> int:
        return self.q.view.size("f", sizes_of(self.q.node) or ())


class Trial:
    """A region run on fixed random inputs in float64."""

    def __init__(self, exits: Sequence[fx.Node], boundary: Boundary, sizes: Sizes) -> None:
        self.exits, self.boundary, self.sizes = exits, boundary, sizes
        self.inputs = [*boundary.tokens, *boundary.states, *boundary.statics]
        self.region: Region = extract(exits, self.inputs)
        self.through = {n: self._passes(n, ("exp", "exp2")) for n in boundary.tokens}
        self.as_decay = {n: self._passes(n, ("log", "log2", "cumprod")) for n in boundary.tokens}
        self.values: dict[fx.Node, Any] = {}

    def prepare(self) -> None:
        """Draws the inputs. Raises Rejected where random numbers could not prove anything."""
        vet(self.region, self.inputs)
        generator = torch.Generator().manual_seed(0)
        self.values = {n: self._draw(n, generator) for n in self.inputs}

    def _passes(self, node: fx.Node, names: Sequence[str]) -> bool:
        """Whether every path from a node to an output goes through one of these operators."""
        inside = set(self.region.nodes)
        stack, seen = [node], {node}
        while stack:
            n = stack.pop()
            if n in self.exits:
                return False
            for u in n.users:
                if u in inside and u not in seen and name_of(u) not in names:
                    seen.add(u)
                    stack.append(u)
        return True

    def multiplies(self, key: fx.Node) -> bool:
        """Whether keys are multiplied with keys, as the delta rule does."""
        made: dict[fx.Node, bool] = {key: True}
        for node in self.region.nodes:
            above = [n for n in sources(node) if n in made]
            if not above:
                continue
            if name_of(node) in PRODUCTS and len(sources(node)) > 1 and len(above) == len(sources(node)):
                return True
            made[node] = True
        return False

    def is_gate(self, node: fx.Node) -> bool:
        return self.through.get(node, False) or self.as_decay.get(node, False)

    def _draw(self, node: fx.Node, generator: torch.Generator) -> Any:
        v = value(node)
        if not isinstance(v, Tensor):
            return real(node)
        shape = sizes_of(node)
        assert shape is not None
        if not v.is_floating_point():
            raise NoMatch("CHUNK_INPUTS", f"{node} is {v.dtype}", node)
        x = torch.rand(shape, generator=generator, dtype=torch.float64)
        if self.as_decay.get(node):
            return 0.9 + 0.09 * x
        if self.through.get(node):
            return -0.1 * x - 0.005
        kinds = views(node, self.sizes)
        if node in self.boundary.tokens and kinds and "f" not in kinds[0].labels:
            return 0.1 + 0.8 * x
        if node in self.boundary.statics:
            return 0.05 + 0.2 * x
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        at = kinds[0].labels.find("f") if kinds else -1
        return torch.nn.functional.normalize(x, dim=at) if x.dim() else x

    def run(self, change: dict[fx.Node, Tensor] | None = None, *, state: bool) -> list[Tensor]:
        """The exits' values; `change` replaces inputs. Without `state` the initial state is zero."""
        values = {**self.values, **(change or {})}
        for n in self.boundary.states:
            if not state:
                values[n] = torch.zeros_like(values[n])
        with clean_state(), torch.no_grad():
            return run(self.region, [values[n] for n in self.inputs], real, {})


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
    vectors = [n for n in plain if any("f" in v.labels for v in _readings(n, sizes))]
    scalars = [n for n in plain if n not in vectors]
    if len(vectors) == 4 and not boundary.states:
        # A state whose K is T looks like a sequence.
        for n in vectors:
            if any(True for _ in state_views(sizes_of(n) or (), sizes, None)):
                rest = [t for t in tensors if t is not n]
                with contextlib.suppress(NoMatch):
                    return find_roles(exits, o_at, replace(boundary, tokens=rest, states=[n]), sizes)
    if len(vectors) != 3 or len(scalars) > 1 or len(gates) > 1:
        raise NoMatch("CHUNK_INPUTS", f"vectors {_names(vectors)}, scalars {_names(scalars)}, decays {_names(gates)}")
    trial.prepare()
    base = trial.run(state=False)
    if not all(torch.isfinite(x).all() for x in base):
        raise NoMatch("CHUNK_NOT_EQUAL", "it is not finite on random inputs")
    if not _is_output(exits[o_at], sizes) or float(base[o_at].abs().max()) == 0.0:
        raise NoMatch("CHUNK_INPUTS", "no output has the tokens' axis")
    linear = {n: _doubling(trial, n, base, o_at) for n in vectors}
    best = float("inf")
    hypotheses = _assignments(exits, boundary, sizes, vectors, scalars, gates, linear, trial, o_at)
    for roles in sorted(hypotheses, key=lambda r: r.cost)[:_HYPOTHESES]:
        found = _test(roles, trial, base, o_at, state=False)
        if found.error > TOLERANCE and not gates and (fixed := _fixed(roles, trial, o_at)) is not None:
            found = _test(replace(roles, fixed=fixed), trial, base, o_at, state=False)
        best = min(best, found.error)
        if found.error > TOLERANCE:
            continue
        if boundary.states:
            for view in _state_readings(boundary.states[0], sizes, found.keys):
                with_state = replace(found, state=Bound(boundary.states[0], view))
                checked = _test(with_state, trial, trial.run(state=True), o_at, state=True)
                if checked.error <= TOLERANCE:
                    return checked
            continue
        return found
    if not gates and boundary.statics and best < float("inf"):
        raise NoMatch("CHUNK_DECAY_INPUTS", f"they are {_names(boundary.statics)}", boundary.statics[0])
    raise NoMatch("CHUNK_NOT_EQUAL", f"the closest recurrence differs by {best:.2g} of o on random inputs")


def _doubling(trial: Trial, node: fx.Node, base: list[Tensor], o_at: int) -> tuple[bool, bool | None]:
    """Whether o doubles with this tensor; whether the state does (None: it does not change)."""
    twice = trial.run({node: 2 * trial.values[node]}, state=False)
    o = _error(twice[o_at], 2 * base[o_at]) <= TOLERANCE
    if len(base) == 1:
        return o, None
    s = 1 - o_at
    return o, None if torch.equal(twice[s], base[s]) else _error(twice[s], 2 * base[s]) <= TOLERANCE


def _assignments(
    exits: Sequence[fx.Node],
    boundary: Boundary,
    sizes: Sizes,
    vectors: Sequence[fx.Node],
    scalars: Sequence[fx.Node],
    gates: Sequence[fx.Node],
    linear: dict[fx.Node, tuple[bool, bool | None]],
    trial: Trial,
    o_at: int,
) -> Iterator[Roles]:
    returned = len(exits) == 2
    o_views = _output_views(exits[o_at], sizes)
    for q, k, v in itertools.permutations(vectors):
        if not linear[q][0] or not linear[v][0]:
            continue
        if returned and (linear[q][1] is not None or linear[v][1] is not True):
            continue
        rules: tuple[str, ...] = ("delta",)
        if linear[k][0]:
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
            if bv.view.size("h", sizes_of(v) or ()) != sizes.heads:
                continue
            g = bound[3] if gates else None
            beta = bound[-1] if scalars else None
            if g is not None and "f" in g.view.labels and g.view.size("f", sizes_of(g.node) or ()) != keys:
                continue
            finals = tuple(_state_readings(exits[1 - o_at], sizes, keys)) if returned else ()
            if returned and not finals:
                continue
            for rule in rules:
                form = "decay" if gates and trial.as_decay[gates[0]] else "log"
                yield Roles(bq, bk, bv, g, beta, None, rule, form, o_view, finals, sizes)


def _readings(node: fx.Node, sizes: Sizes) -> list[View]:
    found = views(node, sizes)
    usual = [v for v in found if v.cost <= 1]
    return (usual or found)[:_VIEWS]


def _state_readings(node: fx.Node, sizes: Sizes, keys: int) -> list[View]:
    return list(state_views(sizes_of(node) or (), sizes, keys))


def _output_views(node: fx.Node, sizes: Sizes) -> list[View]:
    tokens = sizes.padded if sizes.padded is not None else sizes.tokens
    out = replace(sizes, tokens=tokens)
    shape = sizes_of(node) or ()
    found = [w for w in views(node, out) if w.size("f", shape) == sizes.width and w.size("h", shape) == sizes.heads]
    return found[:_VIEWS]


def _is_output(node: fx.Node, sizes: Sizes) -> bool:
    return any(v.cost <= 1 for v in _output_views(node, sizes))


def _test(roles: Roles, trial: Trial, base: list[Tensor], o_at: int, *, state: bool) -> Roles:
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


def _fixed(roles: Roles, trial: Trial, o_at: int) -> FixedDecay | None:
    """A decay that is the same for every token, if the region has one: measured by writing the first token only."""
    first = {n: _first_token(trial.values[n], view) for n, view in ((b.node, b.view) for b in (roles.k, roles.v))}
    o = from_output(trial.run(first, state=False)[o_at], roles.o)
    heads = roles.sizes.heads
    q = to_op(EAGER, trial.values[roles.q.node], roles.q.view, heads, features=True)
    k = to_op(EAGER, first[roles.k.node], roles.k.view, heads, features=True)
    decay = measured(o, q, k)
    if decay is None:
        return None
    statics = {n: trial.values[n] for n in trial.boundary.statics if isinstance(trial.values[n], Tensor)}
    return find_decay(decay, trial.region.nodes, trial.inputs, statics)


def _first_token(x: Tensor, view: View) -> Tensor:
    at = view.labels.find("t")
    return torch.cat([x.narrow(at, 0, 1), torch.zeros_like(x.narrow(at, 1, x.shape[at] - 1))], at) if at >= 0 else x


def evaluate(w: Any, roles: Roles, get: Callable[[fx.Node], Any], *, scale: float) -> tuple[Any, Any]:
    """The op on the boundary's tensors, in whatever world `w` writes (eager tensors or graph nodes)."""
    s = roles.sizes
    heads = max(x.view.size("h", sizes_of(x.node) or ()) for x in (roles.q, roles.k))
    q = to_op(w, get(roles.q.node), roles.q.view, heads, features=True)
    k = to_op(w, get(roles.k.node), roles.k.view, heads, features=True)
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
    if roles.state is not None:
        state = to_state(w, get(roles.state.node), roles.state.view, w.shape(q)[0], s.heads)
    return w.chunk(q, k, v, g, beta, state, rule=roles.rule, scale=scale)


def _error(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    top = float(want.abs().max()) if want.numel() else 0.0
    return float((got - want).abs().max()) / top if top else float((got - want).abs().max() if got.numel() else 0.0)


def _names(nodes: Sequence[fx.Node]) -> str:
    return "[" + ", ".join(str(n) for n in nodes) + "]"

"""Chunk-parallel spellings of a recurrence: found by hypothesis and test, replaced by one `lattn::chunk`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from lattn_compile.passes.spelled.aten import short_name
from lattn_compile.passes.spelled.chunk_grain import grain_of
from lattn_compile.passes.spelled.chunk_layout import Nodes, output_of, state_of
from lattn_compile.passes.spelled.chunk_ops import CONTRACTIONS, PADS, PRODUCTS, SOLVES, is_analytic, sources
from lattn_compile.passes.spelled.chunk_region import Boundary, Survey
from lattn_compile.passes.spelled.chunk_roles import Bound, NotEqual, Roles, evaluate, find_roles
from lattn_compile.passes.spelled.chunk_scores import changed_scores
from lattn_compile.passes.spelled.chunk_sums import sum_orders
from lattn_compile.passes.spelled.chunk_tables import ChunkProposal
from lattn_compile.passes.spelled.chunk_views import Sizes, View, is_cut, output_sizes
from lattn_compile.passes.spelled.proposal import NearMiss, NoMatch, Proposal, withdraw
from lattn_compile.passes.spelled.ranges import interval, is_decay, is_log_decay
from lattn_compile.passes.spelled.subgraph import Rejected
from lattn_compile.passes.spelled.verify import verify
from lattn_compile.passes.spelled.writer import value

__all__ = ["find_chunk_forms"]

log = logging.getLogger("lattn_compile")

_OPENED = 8
"""How many boundary tensors are taken apart in search of q, k, v, g, beta."""

_INPUTS = 9
"""More boundary tensors than this are pieces of sequences, not sequences."""

_LOOKS = 48
"""Candidates a group of seeds gets."""

_TRIALS = 24
"""Boundaries of a group of seeds that are run and found to be something else, before it is given up."""

_WRONG = 3
"""How many of them may have the same outputs."""

_MEETS = 8
"""Steps from a clamp to the scores that it masks."""

_MASKED_NEAR = 24
"""Nodes above a system's solution that are looked at for a mask."""

_CORES = 6
_PROGRESS = ("CHUNK_INPUTS", "CHUNK_OPERATOR", "CHUNK_NOT_EQUAL", "CHUNK_DECAY_INPUTS", "DECAY_RANGE")
"""How far a candidate came, least first."""


def find_chunk_forms(gm: fx.GraphModule, taken: set[fx.Node]) -> list[Proposal | NearMiss]:
    """Proposes one `lattn::chunk` for every chunk-form recurrence of a functional graph.

    Nodes in `taken` belong to other sites and are not looked into. Replacements stand in the graph, unused.
    """
    survey = Survey(gm.graph, taken)
    used: set[fx.Node] = set()
    try:
        return _find(survey, used)
    finally:
        survey.sums.erase()
        survey.clamps.restore(used)


def _find(survey: Survey, used: set[fx.Node]) -> list[Proposal | NearMiss]:
    """`used`: takes what stands inside of the forms that are found."""
    found: list[Proposal | NearMiss] = []
    done: set[fx.Node] = set()
    for seeds in survey.groups():
        left = [n for n in seeds if n not in done]
        while left:
            try:
                outcome, boundary = _largest(survey, left)
            except Exception as error:  # a fault of ours: the other regions of the graph are none of its business
                log.exception("the search for chunk forms failed")
                outcome, boundary = NoMatch("SEARCH_FAILED", f"{type(error).__name__}: {error}").at(left[-1]), None
            if outcome is not None:
                found.append(outcome)
            inside = set() if boundary is None else boundary.interior
            if isinstance(outcome, Proposal) and boundary is not None:
                found += _row_sums(survey, boundary)
                used |= inside
                survey.proposed |= inside
            done |= inside
            remaining = [n for n in left if n not in inside]
            if not isinstance(outcome, Proposal) or len(remaining) == len(left):
                break
            left = remaining
    told = done.union(*(o.token for o in found if isinstance(o, NearMiss)), survey.proposed)
    return [*found, *changed_scores(survey, told)]


def _row_sums(survey: Survey, boundary: Boundary) -> list[Proposal]:
    """The row sums of a form's scores, as recurrences of their own."""
    assert boundary.roles is not None
    found: list[Proposal] = []
    for total, scores in survey.sums.scores.items():
        if scores not in boundary.interior:
            continue
        for order in sum_orders(total, boundary.roles.sizes):
            made = _propose_sum(survey, total, order, boundary, boundary.roles)
            if verify(made).ok:
                found.append(made)
                break
            withdraw(made)
    return found


def _largest(survey: Survey, seeds: list[fx.Node]) -> tuple[Proposal | NearMiss | None, Boundary | None]:
    """What the seeds are part of, and where it stands.

    One block of tokens is a recurrence of its own, from no state. What the state gives to its outputs, and what it
    leaves, are products of the same tensors that no further product reads: they may belong to it.
    """
    outcome, boundary = _Search(survey).run(seeds)
    if not isinstance(outcome, Proposal) or boundary is None:
        return outcome, None
    if more := survey.products_of(boundary):
        whole, around = _Search(survey).run([*seeds, *more])
        if isinstance(whole, Proposal) and around is not None:
            if around.interior > boundary.interior:
                withdraw(outcome)
                return whole, around
            withdraw(whole)
    return outcome, boundary


class _Search:
    """One group of seeds: candidates for outputs and inputs, until a hypothesis holds."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.furthest: NoMatch | None = None
        self.tried: set[tuple[object, ...]] = set()
        self.looked = self.failed = 0

    def run(self, seeds: Sequence[fx.Node]) -> tuple[Proposal | NearMiss | None, Boundary | None]:
        for cut in (False, True):
            self.looked = self.failed = 0
            if (done := self._run(seeds, cut=cut)) is not None:
                return done
        return self._near_miss(seeds), None

    def _run(self, seeds: Sequence[fx.Node], *, cut: bool) -> tuple[Proposal, Boundary] | None:
        """With `cut`, its inputs may be tensors of chunks, where nothing holds them before they were cut."""
        cores = [set(seeds)]
        # Outputs above some of the seeds are looked at last: they may be those of a part of the recurrence.
        for early in (False, True):
            for core in cores:
                for o_at, exits, sizes in self._candidates(core, early=early, cut=cut):
                    if not self.survey.proposed.isdisjoint(exits):
                        continue  # an earlier block, again
                    self.looked += 1
                    if self.looked > _LOOKS:
                        return None
                    try:
                        below = self.survey.below(core, exits)
                        boundary = self.survey.boundary(exits, below, sizes, set())
                    except (NoMatch, Rejected) as e:
                        self._note(e)
                        continue
                    if cut and not any(is_cut(n, sizes) for n in boundary.tokens):
                        continue  # which was tried
                    grown = core | {n for n in boundary.interior if short_name(n) in CONTRACTIONS}
                    if grown - core and len(boundary.tokens) >= 3:
                        below = self.survey.below(grown, exits)
                        if not self.survey.is_exit(below, exits):
                            if grown not in cores and len(cores) < _CORES:
                                cores.append(grown)
                            continue
                    if (done := self._bind(exits, o_at, below, sizes, boundary)) is not None:
                        return done
        return None

    def _candidates(self, core: set[fx.Node], *, early: bool, cut: bool) -> list[tuple[int, list[fx.Node], Sizes]]:
        """Outputs with their sizes, likely ones first; outputs that are cut to their tokens later come last.

        With `cut`, with the sizes of chunks of which there are several.
        """
        found: list[tuple[int, int, list[fx.Node], Sizes]] = []
        for exits in self.survey.exits(core, early=early):
            grain = grain_of(self.survey, exits, core)
            for at, o in enumerate(exits):
                for sizes in output_sizes(o):
                    if sizes.tokens == 1:
                        continue  # a token is a step, and what is no step is no recurrence of one token
                    short = sorted(m for m, n in grain.pads if n == sizes.tokens)
                    lowered = self.survey.lowered(exits, at, sizes)
                    ranked = [(1, replace(sizes, tokens=m, padded=sizes.tokens)) for m in short]
                    ranked.append((3 if short else grain.rank(sizes.tokens), sizes))
                    for rank, these in ranked:
                        chunks = grain.chunks(these.tokens) if cut else [None]
                        found += [(rank, at, lowered, replace(these, chunk=chunk)) for chunk in chunks]
        return [candidate for _, *candidate in sorted(found, key=lambda x: x[0])]  # type: ignore[misc]

    def _bind(
        self, exits: list[fx.Node], o_at: int, below: set[fx.Node], sizes: Sizes, boundary: Boundary
    ) -> tuple[Proposal, Boundary] | None:
        opened: set[fx.Node] = set()
        wrong = 0
        if not 3 <= len(boundary.tokens) <= _INPUTS or len(boundary.states) > 1:
            self._note(NoMatch("CHUNK_INPUTS", f"its inputs are {[*boundary.tokens, *boundary.states]}"))
            return None
        for _ in range(_OPENED):
            key = (o_at, tuple(exits), sizes, tuple(boundary.tokens), tuple(boundary.states), tuple(boundary.statics))
            if key in self.tried or self.failed == _TRIALS:
                return None
            self.tried.add(key)
            try:
                boundary.roles = find_roles(exits, o_at, boundary, sizes)
                return propose(self.survey, exits, o_at, boundary, boundary.roles), boundary
            except (NoMatch, Rejected) as e:
                self._note(e)
                if not isinstance(e, NoMatch) or e.code != "CHUNK_INPUTS":
                    self.failed, wrong = self.failed + 1, wrong + 1
                if wrong == _WRONG:
                    return None
            above = self._to_open(boundary, sizes)
            if above is None:
                return None
            opened.add(above)
            try:
                boundary = self.survey.boundary(exits, below, sizes, opened)
            except (NoMatch, Rejected) as e:
                self._note(e)
                return None
            if len(boundary.tokens) < 3:
                return None
        return None

    def _to_open(self, boundary: Boundary, sizes: Sizes) -> fx.Node | None:
        """The latest boundary tensor that is made from another one, or else from several tensors, or else from one."""
        inside = [
            n
            for n in reversed(boundary.tokens)
            if is_analytic(n) and short_name(n) not in PADS and n not in self.survey.taken
        ]
        for n in inside:
            if self.survey.is_above(boundary.tokens, n):
                return n
        for n in inside:
            if short_name(n) in ("mul", "div") and sum(not self.survey.is_constant(s) for s in sources(n)) > 1:
                return n
        return inside[0] if inside else None

    def _note(self, e: NoMatch | Rejected) -> None:
        e = e if isinstance(e, NoMatch) else NoMatch("CHUNK_INPUTS", str(e))
        if self.furthest is None or _progress(e) >= _progress(self.furthest):
            self.furthest = e

    def _near_miss(self, seeds: Sequence[fx.Node]) -> NearMiss | None:
        """A reason, where it looked like a recurrence: by a decay's cumulative sum or a triangular system next to a
        product of sequences, by scores that are masked and nothing else, or by q, k and v that were told apart.
        """
        if self.furthest is None:
            self.furthest = self._cut_by(seeds)
        if self.furthest is None:
            return None
        if self.furthest.code != "DECAY_RANGE" and (clamp := self._clamp(seeds)) is not None:
            node, why = clamp
            return replace(NoMatch("CHUNK_CLAMPED", f"{node}: {why}").at(node), token=frozenset(seeds))
        names = {short_name(n) for n in seeds}
        told_apart = isinstance(self.furthest, NotEqual) and self.furthest.distance < float("inf")
        if (
            not told_apart
            and self.furthest.code not in ("CHUNK_DECAY_INPUTS", "DECAY_RANGE")
            and not (names & {"cumsum", "cumprod"} and names & PRODUCTS)
            and not (names & PRODUCTS and any(map(self._solves_a_triangle, seeds)))
            and not any(self.survey.masks_scores(n) for n in seeds)
        ):
            return None
        return replace(self.furthest.at(seeds[-1]), token=frozenset(seeds))

    def _cut_by(self, seeds: Sequence[fx.Node]) -> NoMatch | None:
        """Why nothing below the seeds was a candidate for an output: the first operator there that is not analytic."""
        below = set(seeds)
        for node in self.survey.nodes[min(map(self.survey.order.__getitem__, seeds)) :]:
            if node.op != "call_function" or below.isdisjoint(sources(node)) or node not in self.survey.alive:
                continue
            if not is_analytic(node):
                return NoMatch("CHUNK_OPERATOR", f"{node} ({short_name(node)}) stands behind a part of it", node)
            below.add(node)
        return None

    def _solves_a_triangle(self, node: fx.Node) -> bool:
        """Whether a node solves a system that is triangular, by its name or by a mask near above it: any other inverse
        is none of a recurrence's."""
        name = short_name(node)
        if name not in SOLVES or "triangular" in name:
            return name in SOLVES
        above = list(node.all_input_nodes)
        for n in above:
            if n.op == "call_function" and self.survey.is_masking(n):
                return True
            if len(above) < _MASKED_NEAR:
                above += [x for x in n.all_input_nodes if x not in above]
        return False

    def _clamp(self, seeds: Sequence[fx.Node]) -> tuple[fx.Node, str] | None:
        """A clamp of a decay's differences that meets what is made from one of the seeds."""
        for clamp, why in self.survey.clamps.kept.items():
            below, near = {clamp}, [clamp]
            for _ in range(_MEETS):
                near = [u for n in near for u in n.users if u not in below]
                below.update(near)
            if not below.isdisjoint(n for seed in seeds for n in (seed, *seed.users)):
                return clamp, why
        return None


def _progress(e: NoMatch) -> tuple[int, float]:
    return _PROGRESS.index(e.code), -e.distance if isinstance(e, NotEqual) else float("-inf")


def propose(survey: Survey, exits: list[fx.Node], o_at: int, boundary: Boundary, roles: Roles) -> Proposal:
    """Writes the op before the first node that reads an output.

    Raises:
        NoMatch: a decay may exceed 1, or an input is computed only after an output was read: the outputs are not those
            of one call.
    """
    if roles.g is not None:
        node = roles.g.node
        low, high = interval(node)
        if not (is_decay(node) or low >= 0.0) if roles.decay_form == "decay" else low > 0.0:
            raise NoMatch("DECAY_RANGE", f"{node} lies in ({low}, {high})", node)
    if roles.log_beta:
        _check_input_gate(roles)
    # Scores that were divided before they met the values: the quotient is what the graph needs.
    divided = survey.sums.products.get(exits[o_at])
    needed = [n if divided is None or n is not exits[o_at] else divided[0] for n in exits]
    reader = min((u for n in needed for u in n.users), key=survey.order.__getitem__)
    order = survey.order
    if late := [n for n in (*boundary.tokens, *boundary.states, *boundary.statics) if order[n] >= order[reader]]:
        raise NoMatch("CHUNK_INPUTS", f"{late[0]} is computed after {reader} has read an output", late[0])
    w = Nodes(reader, max(needed, key=survey.order.__getitem__))
    try:
        o_old = exits[o_at]
        o, final = evaluate(w, roles, lambda n: n, scale=roles.scale)
        old, new = [o_old], [w.to(output_of(w, o, roles.o, value(o_old).shape, roles.sizes), value(o_old).dtype)]
        if divided is not None:
            old, new = [divided[0]], [w.call(torch.ops.aten.div.Tensor, new[0], divided[1])]
        if roles.final:
            s_old = exits[1 - o_at]
            old.append(s_old)
            new.append(w.to(state_of(w, final, roles.final[0], value(s_old).shape), value(s_old).dtype))
        _check_tables(w, roles)
    except BaseException:
        w.undo()
        raise
    made = _proposal(w, old, new, boundary, roles, ("q", "k", "v", "g", "beta", "state"))
    if divided is not None:  # by whatever: the claim is that it may as well be divided behind
        made.frontier.append(divided[1])
        made.domains[divided[1]] = "beta"
    return made


def _check_input_gate(roles: Roles) -> None:
    """Whether exp(c_i - c_j + i_j) may be taken apart into decays and beta_j = exp(i_j).

    A log decay above 0 may be what a gate far below 0 makes finite; and a gate far above 0, of which strong decays
    leave little to later tokens, overflows on its own.

    Raises:
        NoMatch: neither is certain not to happen.
    """
    assert roles.g is not None and roles.beta is not None
    g, gate = roles.g.node, roles.beta.node
    if not is_log_decay(g):
        where = f"[{', '.join(f'{x:g}' for x in interval(g))}]"
        raise NoMatch("DECAY_RANGE", f"{g} lies in {where}, not at most 0, and meets the gate {gate} in an exp", g)
    most = math.log(torch.finfo(value(gate).dtype).max) / 2
    if (high := interval(gate)[1]) > most:
        text = f"the input gate {gate} in an exp is at most {high:g}, not {most:.3g}: clamp it, or take its logsigmoid"
        raise NoMatch("DECAY_RANGE", text, gate)


def _propose_sum(survey: Survey, total: fx.Node, order: View, boundary: Boundary, roles: Roles) -> Proposal:
    """The recurrence with values of 1 in place of the sum of a form's scores."""
    w = Nodes(min((u for u in total.users if u in survey.order), key=survey.order.__getitem__), total)
    try:
        o, _ = evaluate(w, roles, lambda n: n, scale=roles.scale, ones=True)
        o = output_of(w, o, order, value(total).shape, replace(roles.sizes, width=1))
        new = w.to(o, value(total).dtype)
        _check_tables(w, roles)
    except BaseException:
        w.undo()
        raise
    made = _proposal(w, [total], [new], boundary, roles, ("q", "k", "g", "beta"))
    made.evidence["sums"] = "the rows of the scores"
    return made


def _check_tables(w: Nodes, roles: Roles) -> None:
    if roles.tables is not None and roles.fixed is not None and (unsure := roles.tables.changeable()):
        log = w.log_decay(roles.fixed, value(unsure[0]))
        for table in unsure:
            w.check_powers(table, roles.tables.powers[table], log)


def _proposal(
    w: Nodes, old: list[fx.Node], new: list[fx.Node], boundary: Boundary, roles: Roles, used: Sequence[str]
) -> Proposal:
    domains = {roles.k.node: "key"}
    if roles.g is not None:
        domains[roles.g.node] = "log_decay" if roles.decay_form == "log" else "decay"
    if roles.beta is not None:
        domains[roles.beta.node] = "log_decay" if roles.log_beta else "beta"
    decay = "none" if roles.g is None and roles.fixed is None else "head"
    if roles.g is not None and "f" in roles.g.view.labels:
        decay = "channel"
    if roles.fixed is not None:
        domains.update(dict.fromkeys(boundary.statics, "log_decay" if roles.negative else "beta"))
    bound: dict[str, Bound | None] = {name: getattr(roles, name) for name in used}
    nodes = {name: None if x is None else x.node for name, x in bound.items()}
    tokens = [n for n in boundary.tokens if n in nodes.values()]
    states = boundary.states if "state" in used else []
    return ChunkProposal(
        form="chunk",
        rule=roles.rule,
        decay=decay,
        anchor=old[-1],
        op=w.op,
        frontier=[*tokens, *states, *boundary.statics],
        old=old,
        new=new,
        inserted=w.inserted,
        roles={{"state": "initial_state"}.get(name, name): node for name, node in nodes.items()},
        domains={n: domain for n, domain in domains.items() if n in tokens or n in boundary.statics},
        evidence={"nodes": len(boundary.interior), "trial_error": roles.error, "scale": roles.scale},
        tables=roles.tables,
    )

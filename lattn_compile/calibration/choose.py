"""Which policy each site gets: the least error that fits a budget, or the fewest bytes that meet a bound on the error.

Both are plain arithmetic on `Option`s. A budget makes it a multiple-choice knapsack, which is solved exactly:

* For a price λ of a byte, `Σ_i min_c (cost + λ bytes) − λ budget` is at most the cost of any choice that fits
  (Lagrange), and so is its like for every beginning of a choice: `within_budget` takes the λ of the linear relaxation,
  at which the bound is best.
* Beginnings (the first i sites) are extended site by site. One is dropped if another takes no more bytes at no more
  cost, if the rest cannot fit behind it, or if its bound exceeds a choice that was found already.

What is left is small in practice: a greedy choice misses the bound by less than one step of one site, and every
beginning has to stay inside that gap. The worst case is exponential, so beyond `LIMIT` beginnings those of the best
bounds are kept; the result then says what bound was dropped, which is how far from the best it may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["LIMIT", "Choice", "Option", "least", "within_budget", "within_error"]

LIMIT = 100_000
_SLACK = 1e-9  # relative to the cost: sums of the same numbers in another order are not told apart


class Option(NamedTuple):
    """One policy of one site: the bytes that it takes and what it costs (any non-negative number, 0 is exact)."""

    nbytes: int
    cost: float


class Choice(NamedTuple):
    """The number of one option a site, the bytes and the cost of them all, and a bound that no choice is below.

    `bound == cost` says that no choice that fits costs less.
    """

    picks: tuple[int, ...]
    nbytes: int
    cost: float
    bound: float


class _Beginning(NamedTuple):
    nbytes: int
    cost: float
    picks: tuple[int, ...]


def least(sites: Sequence[Sequence[Option]]) -> Choice:
    """The fewest bytes; among equals the least cost, then the first option."""
    return _choice(sites, tuple(min(range(len(s)), key=lambda c: (s[c].nbytes, s[c].cost, c)) for s in sites))


def within_error(sites: Sequence[Sequence[Option]], most: Sequence[float]) -> Choice:
    """For each site the fewest bytes at a cost of at most `most[i]`; among equals the least cost, then the first.

    Every site has an option that costs at most that (exact costs nothing).
    """
    picks = []
    for options, limit in zip(sites, most, strict=True):
        met = [c for c in range(len(options)) if options[c].cost <= limit]
        picks.append(min(met, key=lambda c: (options[c].nbytes, options[c].cost, c)))
    return _choice(sites, tuple(picks))


def within_budget(sites: Sequence[Sequence[Option]], budget: int) -> Choice | None:
    """The least total cost that takes at most `budget` bytes; among equals the fewest bytes, then the first options.

    None if nothing fits.
    """
    fronts = [_front(options) for options in sites]
    if sum(options[front[0]].nbytes for options, front in zip(sites, fronts, strict=True)) > budget:
        return None
    price, greedy = _relaxed(sites, fronts, budget)
    found = _choice(sites, greedy)
    limit = found.cost + _SLACK * (found.cost + 1e-3 * price * budget)
    # What the sites from i on cost and take at least, by Lagrange and in bytes.
    rest, room = [0.0] * (len(sites) + 1), [0] * (len(sites) + 1)
    for i in reversed(range(len(sites))):
        rest[i] = rest[i + 1] + min(sites[i][c].cost + price * sites[i][c].nbytes for c in fronts[i])
        room[i] = room[i + 1] + sites[i][fronts[i][0]].nbytes

    def bound(state: _Beginning, i: int) -> float:
        return state.cost + price * (state.nbytes - budget) + rest[i]

    states, dropped = [_Beginning(0, 0.0, ())], float("inf")
    for i, front in enumerate(fronts):
        longer = [
            _Beginning(s.nbytes + sites[i][c].nbytes, s.cost + sites[i][c].cost, (*s.picks, c))
            for s in states
            for c in front
        ]
        states = []
        for state in sorted(longer):
            better = not states or state.cost < states[-1].cost
            if better and state.nbytes + room[i + 1] <= budget and bound(state, i + 1) <= limit:
                states.append(state)
        if len(states) > LIMIT:
            states.sort(key=lambda s: (bound(s, i + 1), s))
            dropped = min(dropped, bound(states[LIMIT], i + 1))
            states = states[:LIMIT]
    candidates = [_choice(sites, s.picks) for s in states if len(s.picks) == len(sites)]
    best = min([*candidates, found], key=lambda c: (c.cost, c.nbytes, c.picks))
    return best._replace(bound=min(best.cost, dropped))


def _choice(sites: Sequence[Sequence[Option]], picks: tuple[int, ...]) -> Choice:
    chosen = [options[c] for options, c in zip(sites, picks, strict=True)]
    cost = sum(o.cost for o in chosen)
    return Choice(picks, sum(o.nbytes for o in chosen), cost, cost)


def _front(options: Sequence[Option]) -> list[int]:
    """Options that no other beats in both, by bytes; of equals the first."""
    front: list[int] = []
    for c in sorted(range(len(options)), key=lambda c: (*options[c], c)):
        if not front or options[c].cost < options[front[-1]].cost:
            front.append(c)
    return front


def _relaxed(
    sites: Sequence[Sequence[Option]], fronts: Sequence[list[int]], budget: int
) -> tuple[float, tuple[int, ...]]:
    """The price of a byte at which the linear relaxation fits the budget, and a choice that fits: steps along the lower
    convex hull of each site, the steepest first, taken while they fit."""
    steps = []
    for i, front in enumerate(fronts):
        hull = _hull(sites[i], front)
        for a, b in pairwise(hull):
            steps.append((_slope(sites[i][a], sites[i][b]), i, a, b))
    steps.sort(key=lambda step: (-step[0], step[1], sites[step[1]][step[3]].nbytes))
    picks = [front[0] for front in fronts]
    spent = sum(options[c].nbytes for options, c in zip(sites, picks, strict=True))
    price = 0.0
    for slope, i, a, b in steps:
        more = sites[i][b].nbytes - sites[i][a].nbytes
        if picks[i] == a and spent + more <= budget:
            picks[i], spent = b, spent + more
        else:
            price = max(price, slope)  # the first that does not fit is the steepest
    return price, tuple(picks)


def _slope(a: Option, b: Option) -> float:
    """Cost saved a byte by going from `a` to the larger `b`."""
    return (a.cost - b.cost) / (b.nbytes - a.nbytes)


def _hull(options: Sequence[Option], front: list[int]) -> list[int]:
    hull: list[int] = []
    for c in front:
        while len(hull) > 1 and _slope(options[hull[-2]], options[hull[-1]]) <= _slope(options[hull[-1]], options[c]):
            hull.pop()
        hull.append(c)
    return hull

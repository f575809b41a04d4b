"""What `lc.calibrate` chooses is the best that there is, held against every choice of small cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lattn_compile.calibration import choose
from lattn_compile.calibration.choose import Option, least, within_budget, within_error

_options = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda pair: Option(pair[0], float(pair[1]))),
    min_size=1,
    max_size=4,
)
_sites = st.lists(_options, min_size=1, max_size=5)

# Steps along the convex hulls, the steepest first, end at 12 here; the best is 10.
_GREEDY_LOSES = [
    [Option(4, 9.0), Option(12, 5.0), Option(9, 2.0)],
    [Option(7, 5.0), Option(6, 8.0), Option(11, 1.0), Option(9, 3.0)],
    [Option(11, 3.0), Option(4, 6.0), Option(8, 3.0), Option(1, 5.0)],
]


def _all(sites: list[list[Option]]) -> Iterator[tuple[float, int]]:
    for picks in itertools.product(*sites):
        yield sum(o.cost for o in picks), sum(o.nbytes for o in picks)


@given(_sites, st.integers(1, 200))
@example(_GREEDY_LOSES, 19)
@settings(max_examples=300, deadline=None)
def test_within_a_budget_no_choice_costs_less_and_none_as_cheap_is_smaller(sites: Any, budget: int) -> None:
    best = min(((cost, nbytes) for cost, nbytes in _all(sites) if nbytes <= budget), default=None)
    got = within_budget(sites, budget)
    assert (got is None) == (best is None)
    if got is None:
        assert least(sites).nbytes == min(nbytes for _, nbytes in _all(sites)) > budget
    else:
        assert (got.cost, got.nbytes) == best and got.bound == got.cost
        assert got.nbytes == sum(options[c].nbytes for options, c in zip(sites, got.picks, strict=True))


@given(_sites, st.integers(1, 200))
@example(_GREEDY_LOSES, 19)
@settings(max_examples=100, deadline=None)
def test_a_search_cut_short_still_fits_and_bounds_how_far_it_is_from_the_best(sites: Any, budget: int) -> None:
    best = min((cost for cost, nbytes in _all(sites) if nbytes <= budget), default=None)
    with mock.patch.object(choose, "LIMIT", 1):
        got = within_budget(sites, budget)
    if got is not None and best is not None:
        assert got.nbytes <= budget and got.bound <= best * (1 + 1e-9) + 1e-9 and best <= got.cost


@given(_sites, st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_within_an_error_every_site_takes_the_fewest_bytes_that_meet_it(sites: Any, most: int) -> None:
    sites = [[*options, Option(99, 0.0)] for options in sites]
    got = within_error(sites, [most] * len(sites))
    for options, c in zip(sites, got.picks, strict=True):
        assert options[c].cost <= most
        assert options[c].nbytes == min(o.nbytes for o in options if o.cost <= most)


def test_dozens_of_sites_with_a_dozen_candidates_are_chosen_exactly_and_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [524_288 + 1_016 * i * i for i in range(11)]
    noise = torch.rand(60, 12, generator=generator).tolist()
    sites = [[Option(n, (1e5 * (1 + x) / n) ** 2) for n, x in zip(sizes, row, strict=False)] for row in noise]
    sites = [[*options, Option(2_097_152, 0.0)] for options in sites]
    for share in (0.26, 0.3, 0.5, 0.9):
        budget = int(share * 60 * 2_097_152)
        got = within_budget(sites, budget)
        assert got is not None and got.nbytes <= budget and got.bound == got.cost

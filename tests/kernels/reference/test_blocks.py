"""The schedule: every token in one block, no block across a grid line, running sequences first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lattn_compile.kernels.reference.blocks import MAX_BLOCK, schedule

LENGTHS = st.lists(st.sampled_from([0, 1, 2, 31, 63, 64, 65, 128, 200]), min_size=0, max_size=4)
GRIDS = st.one_of(st.none(), st.sampled_from([1, 2, 3, 16, 17, 63, 64, 65, 100, 127, 128, 129, 200, 10**6]))


@settings(max_examples=100, deadline=None)
@given(LENGTHS, GRIDS, st.lists(st.integers(0, 300), min_size=4, max_size=4), st.booleans())
def test_blocks_hold_every_token_once_in_order_and_never_cross_a_grid_line(
    sizes: list[int], grid: int | None, leads: list[int], aligned: bool
) -> None:
    lengths = torch.tensor(sizes, dtype=torch.int64)
    starts = torch.cumsum(lengths + 2, 0) - lengths
    offsets = None if aligned else torch.tensor(leads[: len(sizes)], dtype=torch.int64)
    plan = schedule(starts, lengths, offsets, grid)

    assert plan.index.shape[1] <= MAX_BLOCK and plan.index.shape[1].bit_count() == 1
    seen: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    for j in range(len(plan.steps) - 1):
        rows = range(plan.steps[j], plan.steps[j + 1])
        lines = plan.ends[j]
        ends = [] if lines is None else lines.rows.tolist()
        for rank, row in enumerate(rows):
            sequence = int(plan.order[rank])
            tokens = (plan.index[row][plan.valid[row]] - starts[sequence]).tolist()
            assert tokens
            if grid is None:
                assert not ends
            else:
                lead = 0 if offsets is None else int(offsets[sequence])
                positions = [t + lead for t in tokens]
                assert positions[0] // grid == positions[-1] // grid
                assert (rank in ends) == ((positions[-1] + 1) % grid == 0)
                if rank in ends:
                    assert bool(plan.valid[row, plan.end_slot]) and not plan.valid[row, plan.end_slot + 1 :].any()
            seen[sequence] += tokens
    for sequence, length in enumerate(sizes):
        assert seen[sequence] == list(range(length))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 5, 64, 65, 100, 10**6]), st.lists(st.integers(0, 300), min_size=4, max_size=4))
def test_lines_and_pending_tokens_are_where_counting_finds_them(sizes: list[int], grid: int, leads: list[int]) -> None:
    lengths = torch.tensor(sizes, dtype=torch.int64)
    offsets = torch.tensor(leads[: len(sizes)], dtype=torch.int64)
    plan = schedule(lengths.cumsum(0) - lengths, lengths, offsets, grid)

    lines: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    last: dict[int, int] = {}
    for step, found in enumerate(plan.ends):
        if found is not None:
            for j, (row, owner, done) in enumerate(zip(found.rows, found.owner, found.done, strict=True)):
                assert plan.order[row] == owner == plan.owner[plan.steps[step] + row]
                lines[int(owner)].append(int(done))
                if found.last is not None and j in found.last:
                    last[int(owner)] = int(done)
    pending = plan.pending()
    assert torch.equal(pending.row, pending.row.sort().values)
    halves = [pending.within(0, 1), pending.within(1, len(plan.index))]
    assert sum(0 if half is None else half.row.numel() for half in halves) == pending.row.numel()
    left = {(int(i), int(p)): int(plan.index[r, s]) for r, s, i, p in zip(
        pending.row, pending.slot, pending.sequence, pending.place, strict=True)}  # fmt: skip
    want = {}
    for i, size in enumerate(sizes):
        lead = leads[i] % grid
        counted = [t + 1 for t in range(size) if (lead + t + 1) % grid == 0]
        assert lines[i] == counted and last.get(i) == (counted[-1] if counted else None)
        first = counted[-1] if counted else 0
        want |= {(i, (lead + t) % grid): int(plan.lead.new_tensor(sizes[:i]).sum()) + t for t in range(first, size)}
    assert left == want


@settings(max_examples=50, deadline=None)
@given(LENGTHS, GRIDS, st.sampled_from([1, 100, 10**9]))
def test_spans_cover_all_steps_and_hold_at_least_64_tokens(sizes: list[int], grid: int | None, budget: int) -> None:
    lengths = torch.tensor(sizes, dtype=torch.int64)
    plan = schedule(lengths.cumsum(0) - lengths, lengths, None, grid)
    spans = plan.spans(10, budget)
    steps = len(plan.steps) - 1
    assert [s for first, last in spans for s in range(first, last)] == list(range(steps))
    assert all((last - first) * plan.tokens >= MAX_BLOCK for first, last in spans[:-1])


def test_very_different_lengths_cost_what_their_tokens_cost() -> None:
    lengths = torch.tensor([4096] + [1] * 255)
    plan = schedule(lengths.cumsum(0) - lengths, lengths, None, None)
    assert plan.index.numel() == 4096 + 255 * 64  # padding to the longest would be 256 * 4096


def test_blocks_depend_on_the_grid_only_so_that_cutting_on_it_changes_none() -> None:
    whole = schedule(torch.tensor([0]), torch.tensor([300]), None, 100)
    tail = schedule(torch.tensor([200]), torch.tensor([100]), None, 100)
    torch.testing.assert_close(whole.index[-tail.index.shape[0] :], tail.index)
    assert whole.end_slot == tail.end_slot


@pytest.mark.parametrize("length", [0, 1, 5, 64, 65])
def test_a_short_exact_run_makes_a_small_block(length: int) -> None:
    plan = schedule(torch.tensor([0]), torch.tensor([length]), None, None)
    assert plan.index.shape[1] == {0: 1, 1: 1, 5: 8, 64: 64, 65: 64}[length]

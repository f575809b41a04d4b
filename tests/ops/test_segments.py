from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lattn_compile.ops.segments import next_cursor, split

CPU = torch.device("cpu")


@st.composite
def lengths(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], bool, int]:
    """Sizes, totals and prefixes of sequences, whether they are packed, and tokens behind the last packed one."""
    packed = draw(st.booleans())
    count = draw(st.integers(1, 5))
    width = draw(st.integers(0, 9))
    sizes = [draw(st.integers(0, 9)) if packed else width for _ in range(count)]
    totals = [draw(st.integers(0, n)) for n in sizes]
    prefixes = [draw(st.integers(0, n)) for n in totals]
    return sizes, totals, prefixes, packed, draw(st.integers(0, 3)) if packed else 0


def _split(case: tuple[list[int], list[int], list[int], bool, int]):  # type: ignore[no-untyped-def]
    sizes, totals, prefixes, packed, spare = case
    batch, tokens = (1, sum(sizes) + spare) if packed else (len(sizes), sizes[0])
    cu = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()]) if packed else None
    return split(batch, tokens, cu, torch.tensor(prefixes), torch.tensor(totals), CPU), batch * tokens


@settings(max_examples=200, deadline=None)
@given(lengths())
def test_prefix_and_suffix_tile_each_sequence_and_nothing_else(case) -> None:  # type: ignore[no-untyped-def]
    sizes, totals, prefixes, _, _ = case
    segments, flat = _split(case)
    owner = [-1] * flat
    start = 0
    for i, size in enumerate(sizes):
        for t in range(totals[i]):
            owner[start + t] = i
        assert segments.begin[i] == start
        assert segments.suffix_begin[i] == start + prefixes[i]
        assert segments.suffix[i] == totals[i] - prefixes[i]
        start += size
    assert segments.rows(flat).tolist() == [i >= 0 for i in owner]
    assert all(x.dtype == torch.int64 for x in (segments.begin, segments.prefix, segments.total))


@settings(max_examples=200, deadline=None)
@given(lengths(), st.integers(1, 6), st.data())
def test_the_cursor_counts_what_a_loop_over_tokens_counts(case, chunk_size: int, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    segments, _ = _split(case)
    _, totals, prefixes, _, _ = case
    for chunk in (None, chunk_size):
        before = [data.draw(st.integers(-1, 0 if chunk is None else chunk - 1)) for _ in totals]
        after = next_cursor(segments, torch.tensor(before, dtype=torch.int32), chunk)
        assert after.dtype == torch.int32
        for i, cursor in enumerate(before):
            for t in range(totals[i]):
                if t < prefixes[i]:
                    cursor = -1
                else:
                    cursor = (max(cursor, 0) + 1) % chunk if chunk else 0
            assert after[i] == cursor
        assert (
            next_cursor(segments, None, chunk).tolist()
            == next_cursor(segments, torch.full_like(after, -1), chunk).tolist()
        )


def test_scalars_count_for_every_sequence_and_a_prefix_is_clamped() -> None:
    segments = split(3, 8, None, torch.tensor(5), torch.tensor([8, 2, 0]), CPU)
    assert segments.prefix.tolist() == [5, 2, 0]
    assert segments.suffix.tolist() == [3, 0, 0]


def test_lengths_never_reach_outside_the_buffers() -> None:
    # Off the CPU values are not looked at, so nonsense must be harmless.
    cu = torch.tensor([0, 9, 4, 99])
    segments = split(1, 10, cu, torch.tensor([-3, 50, 50]), torch.tensor([50, 50, -1]), CPU)
    ends = segments.begin + segments.total
    assert (segments.begin >= 0).all() and (ends <= 10).all()
    assert (segments.prefix >= 0).all() and (segments.prefix <= segments.total).all()

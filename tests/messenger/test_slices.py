"""The arithmetic on slice lists keeps every byte where it was asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.errors import ProtocolError
from messenger.slices import LOCAL, REMOTE, Rows, Slices, coalesced, runs, split, within
from messenger.transport import parse_rows

row = st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(1, 50))


@st.composite
def row_lists(draw: st.DrawFn) -> Rows:
    """Rows of which many touch the one before, on one side or on both."""
    rows: list[tuple[int, int, int]] = [draw(row)]
    for local, remote, nbytes in draw(st.lists(row, max_size=30)):
        before = rows[-1]
        rows.append(
            (
                before[0] + before[2] if draw(st.booleans()) else local,
                before[1] + before[2] if draw(st.booleans()) else remote,
                nbytes,
            )
        )
    return np.array(rows, dtype=np.int64)


def pairs(rows: Rows) -> list[tuple[int, int]]:
    """Every byte's (local, remote) address, in order."""
    return [(local + i, remote + i) for local, remote, nbytes in rows.tolist() for i in range(nbytes)]


def addresses(one_side: Rows) -> list[int]:
    return [offset + i for offset, nbytes in one_side.tolist() for i in range(nbytes)]


@given(row_lists())
def test_coalescing_keeps_every_byte_and_leaves_no_two_rows_that_touch(rows: Rows) -> None:
    merged = coalesced(rows)
    assert pairs(merged) == pairs(rows)
    touching = (merged[1:, :2] == merged[:-1, :2] + merged[:-1, 2:]).all(axis=1)
    assert not touching.any()


@given(row_lists(), st.sampled_from([LOCAL, REMOTE]))
def test_runs_keep_one_sides_bytes_in_order_and_never_touch(rows: Rows, side: int) -> None:
    one_side = runs(rows, side)
    assert addresses(one_side) == [pair[side] for pair in pairs(rows)]
    assert not (one_side[1:, 0] == one_side[:-1].sum(axis=1)).any()


@given(row_lists(), st.sampled_from([LOCAL, REMOTE]))
def test_an_extent_is_from_the_first_byte_touched_to_the_last(rows: Rows, side: int) -> None:
    touched = [pair[side] for pair in pairs(rows)]
    assert Slices.of(rows, 1 << 20).extent(side) == (min(touched), max(touched) + 1)


@given(row_lists(), st.integers(1, 60), st.integers(1, 5))
def test_splitting_keeps_every_byte_within_the_limits(rows: Rows, max_nbytes: int, max_rows: int) -> None:
    pieces = list(split(rows, max_nbytes, max_rows))
    assert [pair for piece, _ in pieces for pair in pairs(piece)] == pairs(rows)
    assert all(piece[:, 2].sum() == nbytes for piece, nbytes in pieces)
    assert all(0 < nbytes <= max_nbytes and len(piece) <= max_rows for piece, nbytes in pieces)


edges = st.sampled_from([-(1 << 63), -1, 0, 1, 99, 100, 101, (1 << 62), (1 << 63) - 1])


@given(st.lists(st.tuples(edges, edges), min_size=1, max_size=30), st.integers(0, 100), st.integers(0, 100))
def test_bounds_are_exact_for_any_integers(rows: list[tuple[int, int]], start: int, length: int) -> None:
    array = np.array(rows, dtype=np.int64)
    wanted = all(start <= offset and nbytes >= 0 and offset + nbytes <= start + length for offset, nbytes in rows)
    assert within(array[:, 0], array[:, 1], start, start + length) == wanted


@given(st.lists(st.tuples(edges, edges), max_size=3), edges)
def test_rows_from_the_wire_are_parsed_or_refused(rows: list[tuple[int, int]], nbytes: int) -> None:
    packed = np.array(rows, dtype=np.int64).tobytes()
    lengths = [length for _, length in rows]
    if rows and all(0 <= length <= 8 << 20 for length in lengths) and sum(lengths) == nbytes:
        assert parse_rows(packed, 2, nbytes).tolist() == [list(one) for one in rows]
    else:
        with pytest.raises(ProtocolError):
            parse_rows(packed, 2, nbytes)

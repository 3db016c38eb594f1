"""Ranges are merged into few strided copies that move exactly their bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from messenger.staging import Ranges, StridedCopy, merged

SLOT, LAYER, MAX_PITCH = 64, 16, 4096


def offsets(*slots: int) -> np.ndarray:
    return np.array(slots, np.int64) * SLOT


def test_adjacent_slots_are_one_row() -> None:
    assert merged([Ranges.same(offsets(4, 2, 3), SLOT)], MAX_PITCH) == [StridedCopy(128, 128, 192, 1, 192, 192)]


def test_a_layer_of_adjacent_slots_is_one_strided_copy() -> None:
    assert merged([Ranges.same(offsets(2, 3, 4) + LAYER, LAYER)], MAX_PITCH) == [StridedCopy(144, 144, 16, 3, 64, 64)]


def test_equally_spaced_slots_are_one_strided_copy() -> None:
    assert merged([Ranges.same(offsets(1, 4, 7), SLOT)], MAX_PITCH) == [StridedCopy(64, 64, 64, 3, 192, 192)]


def test_rows_that_are_farther_apart_than_the_largest_pitch_are_copies_of_their_own() -> None:
    copies = merged([Ranges.same(offsets(0, 100, 200), SLOT)], MAX_PITCH)
    assert [(copy.host, copy.rows) for copy in copies] == [(0, 1), (6400, 1), (12800, 1)]


def test_no_ranges_are_no_copies() -> None:
    assert merged([Ranges.same(offsets(), SLOT)], MAX_PITCH) == []


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), unique=True, max_size=30),
            st.randoms(use_true_random=False),
            st.booleans(),
            st.integers(1, SLOT),
        ),
        max_size=3,
    )
)
def test_the_copies_move_the_bytes_of_the_ranges_and_no_others(parts: list) -> None:
    size = 41 * SLOT
    host = np.random.default_rng(0).integers(1, 256, 3 * size, np.uint8)
    device, expected = np.zeros_like(host), np.zeros_like(host)
    ranges = []
    for number, (slots, rng, same, nbytes) in enumerate(parts):
        targets = list(slots) if same else rng.sample(range(41), len(slots))
        one = Ranges(offsets(*slots) + number * size, offsets(*targets) + number * size, nbytes)
        ranges.append(one)
        for at, to in zip(one.host, one.device, strict=True):
            expected[to : to + nbytes] = host[at : at + nbytes]
    copies = merged(ranges, 20 * SLOT)
    for copy in copies:
        assert copy.rows == 1 or copy.nbytes <= copy.host_pitch <= 20 * SLOT >= copy.device_pitch >= copy.nbytes
        for at, to in copy.each_row():
            device[to : to + copy.nbytes] = host[at : at + copy.nbytes]
    assert (device == expected).all()
    assert sum(copy.rows * copy.nbytes for copy in copies) == sum(len(r.host) * r.nbytes for r in ranges)

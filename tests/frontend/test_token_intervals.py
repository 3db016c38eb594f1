"""Times between tokens: all of an ordinary answer's, the last ones of an endless answer's."""

import numpy as np
import pytest

from frontend.token_intervals import TokenIntervals


def filled(values: list[float], most: int = 0) -> TokenIntervals:
    intervals = TokenIntervals(most)
    for value in values:
        intervals.add(value)
    return intervals


@pytest.mark.parametrize("count", [1, 9, 10, 11, 25, 5000])
def test_the_longest_tenth_is_taken_of_all_intervals(count: int) -> None:
    values = np.random.default_rng(count).random(count).astype(np.float32).tolist()
    longest = sorted(values, reverse=True)[: (count + 9) // 10]
    assert filled(values).slow_s == pytest.approx(sum(longest) / len(longest))


def test_without_intervals_it_is_zero() -> None:
    assert TokenIntervals().slow_s == TokenIntervals(4).slow_s == 0.0


@pytest.mark.parametrize("count", [3, 19, 20, 21, 39, 40, 41, 1000])
def test_with_a_bound_it_is_taken_of_the_last_ones(count: int) -> None:
    values = np.random.default_rng(count).random(count).astype(np.float32).tolist()
    intervals = filled(values, most=20)
    assert intervals.slow_s == pytest.approx(filled(values[-20:]).slow_s)
    assert intervals.last_s == values[-1]


def test_a_bound_bounds_what_is_kept() -> None:
    intervals = filled([0.5] * 100_000, most=20)
    assert len(intervals._kept) < 40

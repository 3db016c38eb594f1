"""When a rail counts as silent, on books that are played."""

import pytest

from messenger.rdma.policy.silence_detector import TICKS, PostedCounts, SilenceDetector
from messenger.rdma.verbs.queue_pair import timeout_code

LIMIT_NS = 8_000


class Rail:
    """Ticks of one rail, as books."""

    def __init__(self) -> None:
        self.silence = SilenceDetector(LIMIT_NS, 0)
        self.pair = object()

    def tick(self, posted: int, done: int, asked: int | None = None) -> tuple[bool, bool]:
        """(is silent, is to be asked)"""
        asked = posted if asked is None else asked
        silent, unasked = self.silence.tick([PostedCounts(self.pair, posted, asked, done)], self.silence.next_ns)
        return bool(silent), bool(unasked)


def test_a_rail_that_completes_nothing_for_the_limit_is_silent() -> None:
    rail = Rail()
    found = [rail.tick(posted=5, done=2)[0] for _ in range(TICKS + 1)]
    assert found == [False] * TICKS + [True]
    assert rail.silence.next_ns == LIMIT_NS // TICKS * (TICKS + 2)


def test_a_rail_that_completes_something_now_and_then_is_slow_and_not_silent() -> None:
    rail = Rail()
    assert not any(rail.tick(posted=1000, done=tick // (TICKS - 1))[0] for tick in range(10 * TICKS))


def test_a_rail_at_rest_is_not_silent_and_its_next_work_has_all_the_time() -> None:
    rail = Rail()
    assert not any(rail.tick(posted=5, done=5)[0] for _ in range(3 * TICKS))
    assert rail.silence.is_at_rest
    assert [rail.tick(posted=6, done=5)[0] for _ in range(TICKS + 1)] == [False] * TICKS + [True]
    assert not rail.silence.is_at_rest


def test_time_in_which_nobody_looked_counts_as_one_tick() -> None:
    rail = Rail()
    rail.tick(posted=1, done=0)
    rail.silence.next_ns += 1000 * LIMIT_NS
    assert not rail.tick(posted=1, done=0)[0]


def test_what_would_not_tell_of_its_completion_is_asked_for_one() -> None:
    rail = Rail()
    assert rail.tick(posted=5, done=2, asked=2) == (False, True)
    assert rail.tick(posted=6, done=2, asked=6) == (False, False)
    assert rail.tick(posted=6, done=6, asked=6) == (False, False)


def test_a_rail_that_was_built_anew_begins_anew() -> None:
    rail = Rail()
    for _ in range(TICKS):
        rail.tick(posted=5, done=2)
    rail.pair = object()
    assert [rail.tick(posted=5, done=2)[0] for _ in range(TICKS + 1)] == [False] * TICKS + [True]


def test_a_rail_out_of_use_is_forgotten() -> None:
    silence, pair = SilenceDetector(LIMIT_NS, 0), object()
    for _ in range(TICKS):
        silence.tick([PostedCounts(pair, 5, 5, 2)], 0)
    assert silence.tick([None], 0) == ([], [])
    assert silence.is_at_rest
    assert silence.tick([PostedCounts(pair, 5, 5, 2)], 0) == ([], [])


@pytest.mark.parametrize("silence_s", [0.1, 1.0, 10.0, 60.0])
def test_an_adapters_own_tries_end_before_its_rail_counts_as_silent(silence_s: float) -> None:
    tries_s = 7 * 4.096e-6 * 2 ** timeout_code(silence_s)
    assert silence_s / 2 < tries_s <= silence_s

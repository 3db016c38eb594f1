"""How often a request is tried."""

from frontend.tries import Tries


def test_tries_that_reached_a_worker_are_limited() -> None:
    tries = Tries(3, grace_s=30.0)
    tries.reached()
    assert [tries.are_over(count, now_s=1.0) for count in (1, 2, 3)] == [False, False, True]


def test_attempts_without_a_worker_never_count_beside_those_that_had_one() -> None:
    tries = Tries(3, grace_s=30.0)
    for _ in range(10):
        tries.unreached(1.0)
    assert not tries.are_over(10, now_s=30.9)
    tries.reached()
    assert not tries.are_over(11, now_s=100.0)
    tries.reached()
    assert not tries.are_over(12, now_s=101.0)
    tries.reached()
    assert tries.are_over(13, now_s=102.0)


def test_attempts_without_a_worker_end_when_none_is_reached_for_the_whole_grace() -> None:
    tries = Tries(3, grace_s=30.0)
    for now_s in (1.0, 20.0, 31.0):
        tries.unreached(now_s)
    assert tries.are_over(3, now_s=31.0)
    assert not tries.are_over(2, now_s=31.0)

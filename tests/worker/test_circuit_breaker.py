"""A peer that hangs is left alone for a while, and one caller at a time finds out whether it is back."""

from worker.policy import CircuitBreaker


def test_a_peer_that_failed_is_not_asked_for_a_while_and_others_are() -> None:
    breaker = CircuitBreaker(5.0, 30.0)
    assert breaker.try_pass("a", 0.0)
    breaker.failed("a", 10.0)
    assert not breaker.try_pass("a", 14.9)
    assert breaker.try_pass("b", 14.9)


def test_after_the_pause_one_caller_finds_out() -> None:
    breaker = CircuitBreaker(5.0, 30.0)
    breaker.failed("a", 0.0)
    assert breaker.try_pass("a", 5.0)
    assert not breaker.try_pass("a", 5.0)
    assert not breaker.try_pass("a", 9.9)
    breaker.succeeded("a")
    assert breaker.try_pass("a", 9.9)
    assert breaker.try_pass("a", 9.9)


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    breaker, now_s, pauses = CircuitBreaker(5.0, 30.0), 0.0, []
    for _ in range(5):
        breaker.failed("a", now_s)
        began_s = now_s
        while not breaker.try_pass("a", now_s):
            now_s += 1.0
        pauses.append(now_s - began_s)
        now_s += 40.0  # the caller's deadline
    assert pauses == [5.0, 10.0, 20.0, 30.0, 30.0]
    breaker.succeeded("a")
    breaker.failed("a", now_s)
    assert breaker.try_pass("a", now_s + 5.0)


def test_calls_that_were_under_way_together_count_once() -> None:
    breaker = CircuitBreaker(5.0, 30.0)
    for at_s in (0.0, 0.1, 0.2):
        breaker.failed("a", at_s)
    assert not breaker.try_pass("a", 5.1)
    assert breaker.try_pass("a", 5.2)


def test_a_caller_that_never_comes_back_does_not_shut_the_peer_out() -> None:
    breaker = CircuitBreaker(5.0, 30.0)
    breaker.failed("a", 0.0)
    assert breaker.try_pass("a", 5.0)
    assert breaker.try_pass("a", 10.0)


def test_pauses_double_however_soon_the_next_caller_fails() -> None:
    breaker, now_s, pauses = CircuitBreaker(5.0, 30.0), 0.0, []
    for _ in range(5):
        breaker.failed("a", now_s)
        began_s = now_s
        while not breaker.try_pass("a", now_s):
            now_s += 1.0
        pauses.append(now_s - began_s)
        now_s += 2.0  # the caller's deadline, shorter than any pause
    assert pauses == [5.0, 10.0, 20.0, 30.0, 30.0]

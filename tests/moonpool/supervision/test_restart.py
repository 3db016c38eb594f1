from hypothesis import given
from hypothesis import strategies as st

from moonpool.supervision.restart import GiveUp, Restart, RestartPolicy, RestartTracker, exit_text

POLICY = RestartPolicy(first_delay_s=1.0, max_delay_s=8.0, healthy_after_s=10.0, startup_attempts=3)
SECOND = 1_000_000_000


def test_the_back_off_doubles_to_its_bound() -> None:
    tracker = RestartTracker(POLICY)
    tracker.on_ready(0)
    assert [tracker.on_exit(0, 1) for _ in range(6)] == [Restart(d) for d in (1.0, 2.0, 4.0, 8.0, 8.0, 8.0)]


def test_a_long_healthy_life_resets_the_back_off() -> None:
    tracker = RestartTracker(POLICY)
    tracker.on_ready(0)
    tracker.on_exit(SECOND, -9)
    tracker.on_ready(2 * SECOND)
    assert tracker.on_exit(13 * SECOND, -9) == Restart(1.0)


def test_a_process_that_was_never_ready_is_given_up_after_the_attempts() -> None:
    tracker = RestartTracker(POLICY)
    outcomes = [tracker.on_exit(0, 1) for _ in range(3)]
    assert outcomes[:2] == [Restart(1.0), Restart(2.0)]
    assert outcomes[2] == GiveUp("ended 3 times without becoming ready (exit code 1)")


@given(st.booleans())
def test_a_configuration_error_is_never_tried_again(was_ready: bool) -> None:
    tracker = RestartTracker(POLICY)
    if was_ready:
        tracker.on_ready(0)
    assert isinstance(tracker.on_exit(SECOND, 2), GiveUp)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0, 1, -9, -11, 137])), max_size=50))
def test_a_process_once_ready_is_brought_back_for_ever_within_the_bound(lives: list[tuple[int, int]]) -> None:
    tracker = RestartTracker(POLICY)
    now = 0
    tracker.on_ready(now)
    for seconds, exit_code in lives:
        now += seconds * SECOND
        decision = tracker.on_exit(now, exit_code)
        assert isinstance(decision, Restart)
        assert POLICY.first_delay_s <= decision.delay_s <= POLICY.max_delay_s
        tracker.on_ready(now)


def test_an_exit_is_told_as_code_or_signal() -> None:
    assert (exit_text(3), exit_text(-9)) == ("exit code 3", "killed by signal 9")

"""Alarms ring in time, in order, once, and not when cleared."""

import threading
import time
from collections.abc import Iterator

import pytest

from messenger.alarms import TICK_S, AlarmClock


@pytest.fixture
def clock() -> Iterator[AlarmClock]:
    clock = AlarmClock("alarms")
    clock.start()
    yield clock
    clock.close()


def test_alarms_ring_in_order_and_never_early(clock: AlarmClock) -> None:
    started_s = time.monotonic()
    rang: list[tuple[float, float]] = []
    done = threading.Event()
    for delay_s in (0.09, 0.03, 0.06):
        clock.set(delay_s, lambda delay_s=delay_s: rang.append((delay_s, time.monotonic() - started_s)))  # type: ignore[misc]
    clock.set(0.1 + TICK_S, done.set)
    assert done.wait(10)
    assert [delay_s for delay_s, _ in rang] == [0.03, 0.06, 0.09]
    assert all(at_s >= delay_s for delay_s, at_s in rang)
    assert clock.pending() == 0


def test_a_cleared_alarm_does_not_ring(clock: AlarmClock) -> None:
    rang: list[str] = []
    done = threading.Event()
    alarm = clock.set(0.02, lambda: rang.append("cleared"))
    clock.set(0.02, lambda: rang.append("kept"))
    clock.set(0.04, done.set)
    clock.clear(alarm)
    clock.clear(alarm)
    assert done.wait(10)
    assert rang == ["kept"]


def test_a_callback_that_fails_is_logged_and_the_next_one_rings(
    clock: AlarmClock, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("broken callback")

    clock.set(0.01, fail)
    clock.set(0.03, done.set)
    assert done.wait(10)
    assert "broken callback" in caplog.text


def test_a_far_alarm_does_not_delay_a_near_one(clock: AlarmClock) -> None:
    far = clock.set(1000, lambda: None)
    done = threading.Event()
    clock.set(0.01, done.set)
    assert done.wait(10)
    assert clock.pending() == 1
    clock.clear(far)
    assert clock.pending() == 0


def test_closing_ends_the_thread_although_alarms_are_set() -> None:
    clock = AlarmClock("alarms")
    clock.start()
    clock.set(1000, lambda: None)
    clock.close()
    assert "alarms" not in {thread.name for thread in threading.enumerate()}

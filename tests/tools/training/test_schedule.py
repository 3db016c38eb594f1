"""The pure schedule."""

import pytest

from tools.training.schedule import Clock, context, copy_share, rate


def test_rate_is_a_trapezoid_that_ends_at_zero() -> None:
    assert [rate(progress) for progress in (0.0, 0.005, 0.01, 0.5, 0.75)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert rate(0.875) == pytest.approx(0.5)
    assert rate(1.0) == 0.0


def test_windows_grow_to_every_position() -> None:
    assert [context(progress) for progress in (0.0, 0.45, 0.5, 0.9, 1.0)] == [512, 512, 1024, 2048, 2048]


def test_a_wall_clock_run_that_is_late_is_finished() -> None:
    clock = Clock(started_s=100.0, deadline_s=200.0)
    assert [clock.progress(now, step=7) for now in (90.0, 150.0, 500.0)] == [0.0, 0.5, 1.0]


def test_a_run_by_steps_does_not_look_at_the_time() -> None:
    assert Clock(started_s=0.0, deadline_s=0.0, steps=8).progress(now_s=1e9, step=2) == 0.25


def test_copying_recedes() -> None:
    shares = [copy_share(progress / 10) for progress in range(11)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1] > 0

"""When an SSD in trouble is left alone, and when it is tried again."""

import logging

import pytest

from kvpool.ssd_tier import SsdHealth, SsdState


@pytest.fixture
def health() -> SsdHealth:
    return SsdHealth("the folder")


def test_a_failed_write_makes_it_read_only_for_longer_each_time(health: SsdHealth) -> None:
    now_s, pauses = 100.0, []
    for _ in range(8):
        health.write_failed(now_s, "no space left")
        assert (health.state, health.may_read(now_s)) == (SsdState.READ_ONLY, True)
        pause_s = next(s for s in range(1, 100) if health.may_write(now_s + s))
        assert not health.may_write(now_s + pause_s - 0.5)
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    health.write_succeeded()
    assert (health.state, health.may_write(now_s)) == (SsdState.OK, True)
    health.write_failed(now_s, "again")
    assert health.may_write(now_s + 1)


def test_only_reads_that_fail_in_a_row_make_it_failed(health: SsdHealth) -> None:
    for _ in range(5):
        health.read_failed(0.0, "unreadable")
        health.read_failed(0.0, "unreadable")
        health.read_succeeded()
    assert health.state is SsdState.OK
    for _ in range(3):
        assert health.may_read(0.0)
        health.read_failed(0.0, "gone")
    assert health.state is SsdState.FAILED
    assert not health.may_read(0.5)
    assert not health.may_write(0.5)
    assert health.may_read(1.0)
    health.read_succeeded()
    assert health.state is SsdState.OK


def test_a_write_ends_failed_reads_until_the_next_one(health: SsdHealth) -> None:
    for _ in range(3):
        health.read_failed(0.0, "gone")
    health.write_succeeded()
    assert health.state is SsdState.OK
    health.read_failed(10.0, "gone")
    assert health.state is SsdState.FAILED
    assert not health.may_read(11.5)
    assert health.may_read(12.0)


def test_a_failed_write_does_not_make_a_failed_ssd_readable(health: SsdHealth) -> None:
    for _ in range(3):
        health.read_failed(0.0, "gone")
    health.write_failed(1.0, "gone")
    assert health.state is SsdState.FAILED


def test_each_change_is_logged_once(health: SsdHealth, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for second in range(5):
        health.write_failed(float(second), "no space left")
    for _ in range(5):
        health.write_succeeded()
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "the folder is now read_only: no space left" in caplog.text

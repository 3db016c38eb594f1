"""Conditions that make a run INVALID, and those that do not."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.record import RequestRecord, SendOutcome
from loadtest.validity import ClockReading, ValidityEvidence, clock_jumps, invalid_reasons, read_clocks


def record_of(index: int, lag_s: float = 0.0, held_s: float = 0.0) -> RequestRecord:
    record = RequestRecord(index, 1.0, 10, 1, 0.0, 0, outcome=SendOutcome.REJECTED)
    record.sent_s, record.held_s = 1.0 + lag_s + held_s, held_s
    return record


def reasons(lags: list[float], *, planned: int | None = None, bound: float = 0.25, **changes: object) -> list[str]:
    records = [record_of(i, lag) for i, lag in enumerate(lags)]
    values: dict[str, object] = {"lost": [], "readings": [], "interrupted": False}
    evidence = ValidityEvidence(
        planned=len(lags) if planned is None else planned, records=records, **(values | changes)
    )
    return invalid_reasons(evidence, max_send_lag_s=bound)


def test_a_run_on_time_is_valid_whatever_the_server_answered() -> None:
    assert reasons([0.0] * 50) == []


def test_one_in_a_hundred_may_leave_late_and_no_more() -> None:
    assert reasons([0.0] * 198 + [0.3] * 2) == []
    (reason,) = reasons([0.0] * 197 + [0.3] * 3)
    assert "the sender lagged: 1.5% of the requests were sent more than 0.25 s late" in reason
    assert "--max-send-lag" in reason


def test_where_there_are_no_times_to_keep_nothing_is_late() -> None:
    assert reasons([5.0] * 10, bound=float("inf")) == []


def test_waiting_for_the_limit_of_concurrency_is_not_the_senders_lag() -> None:
    evidence = ValidityEvidence(3, [record_of(i, 0.01, held_s=9.0) for i in range(3)], [], [], False)
    assert invalid_reasons(evidence, max_send_lag_s=0.25) == []


def test_missing_records_and_lost_senders_are_named_apart_from_an_interrupt() -> None:
    assert reasons([0.0] * 3, planned=5) == ["2 of 5 requests have no record"]
    assert reasons([0.0] * 3, planned=5, interrupted=True) == []
    assert reasons([0.0] * 3, planned=5, lost=["sender 2 of 2 is gone"])[0] == "sender 2 of 2 is gone"


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=20))
def test_clocks_that_run_alike_have_not_jumped(steps: list[float]) -> None:
    times = list(accumulate(steps))
    assert clock_jumps([ClockReading(t, 1e9 + t * (1 + 5e-4), 100 + t) for t in times]) == []


@pytest.mark.parametrize(
    ("wall", "boot", "said"),
    [
        (1.0, 1.0, []),
        (-59.0, 1.0, ["the sending machine's clock jumped by -60.0 s"]),
        (3.0, 1.0, ["the sending machine's clock jumped by +2.0 s"]),
        (31.0, 31.0, ["the sending machine was suspended for 30.0 s"]),
    ],
)
def test_jumps_and_sleep_are_told(wall: float, boot: float, said: list[str]) -> None:
    assert clock_jumps([ClockReading(0.0, 0.0, 0.0), ClockReading(1.0, wall, boot)]) == said


def test_this_machines_clocks_can_be_read() -> None:
    first, second = read_clocks(), read_clocks()
    assert second.monotonic_s >= first.monotonic_s
    assert clock_jumps([first, second]) == []

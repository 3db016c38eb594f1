"""Validity of a run: whether its figures measure the server rather than the sender's own delays.

A run is INVALID if requests were sent late, records are missing, or the machine's clock jumped. The outcomes of
requests do not affect validity. time.monotonic is the same clock in all processes of a host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from loadtest.record import RequestRecord

LATE_SHARE = 0.01
CLOCK_JUMP_S = 0.5
"""Smallest clock difference between two readings that counts as a jump. Readings are a second apart; in that time, NTP
slews a clock by less than a millisecond."""


@dataclass(frozen=True)
class ClockReading:
    """Clocks of the sending machine at one time, in seconds.

    `monotonic_s`: the clock of all records. `wall_s`: may be set by users and NTP. `boot_s`: includes suspended time.
    """

    monotonic_s: float
    wall_s: float
    boot_s: float


@dataclass(frozen=True)
class ValidityEvidence:
    """Input of the validity check.

    `planned`: number of planned requests; `lost`: how each lost sender ended; `interrupted`: the user ended the run, so
    missing records are expected.
    """

    planned: int
    records: Sequence[RequestRecord]
    lost: Sequence[str]
    readings: Sequence[ClockReading]
    interrupted: bool


def invalid_reasons(evidence: ValidityEvidence, *, max_send_lag_s: float) -> list[str]:
    """Return the reasons why the run is INVALID; empty for a valid run.

    An infinite `max_send_lag_s` disables the check of send times.
    """
    return [
        *evidence.lost,
        *_missing(evidence),
        *_lagging(evidence.records, max_send_lag_s),
        *clock_jumps(evidence.readings),
    ]


def clock_jumps(readings: Iterable[ClockReading]) -> list[str]:
    """Describe each jump of the wall clock against the monotonic one, and each suspension of the machine."""
    found = []
    for before, after in pairwise(readings):
        asleep_s = (after.boot_s - before.boot_s) - (after.monotonic_s - before.monotonic_s)
        jump_s = (after.wall_s - before.wall_s) - (after.boot_s - before.boot_s)
        if asleep_s > CLOCK_JUMP_S:
            found.append(f"the sending machine was suspended for {asleep_s:.1f} s")
        if abs(jump_s) > CLOCK_JUMP_S:
            found.append(f"the sending machine's clock jumped by {jump_s:+.1f} s")
    return found


def _missing(evidence: ValidityEvidence) -> list[str]:
    missing = evidence.planned - len(evidence.records)
    if missing <= 0 or evidence.interrupted:
        return []
    return [f"{missing:,} of {evidence.planned:,} requests have no record"]


def _lagging(records: Sequence[RequestRecord], max_send_lag_s: float) -> list[str]:
    lags = np.array([r.lateness_s for r in records])
    late = int((lags > max_send_lag_s).sum())
    if not late or late <= LATE_SHARE * len(lags):
        return []
    return [
        f"the sender lagged: {late / len(lags):.1%} of the requests were sent more than {max_send_lag_s:g} s late "
        f"(p99 {np.percentile(lags, 99):.3g} s); at most {LATE_SHARE:.0%} is allowed (--max-send-lag, --senders)"
    ]


_WATCH_EVERY_S = 1.0
_LOOKS = 3


def clock_from(start: float) -> Callable[[], float]:
    """Return a clock that reads 0 when time.monotonic() is `start`."""
    return lambda: time.monotonic() - start


def read_clocks() -> ClockReading:
    """Read all clocks. Of a few attempts the fastest is returned, since preemption between reads looks like a jump."""
    boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    looks = []
    for _ in range(_LOOKS):
        began = time.monotonic()
        looks.append((ClockReading(began, time.time(), time.clock_gettime(boot)), time.monotonic() - began))
    return min(looks, key=lambda look: look[1])[0]


@dataclass
class ClockWatch:
    """Periodic clock readings during a run."""

    readings: list[ClockReading] = field(default_factory=list)

    async def run(self) -> None:
        """Read the clocks until cancelled."""
        try:
            while True:
                self.readings.append(read_clocks())
                await asyncio.sleep(_WATCH_EVERY_S)
        finally:
            self.readings.append(read_clocks())

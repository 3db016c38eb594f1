"""Validity of a run: whether its figures describe the server or the sender's own delays. Pure but for reading clocks.

A run is INVALID if requests left later than they were due, records are missing, or the machine's clock jumped. How
requests ended does not affect validity. time.monotonic is one clock for all processes of a host.
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
"""Between two looks a second apart, NTP's slewing moves a clock by less than a millisecond."""


@dataclass(frozen=True)
class ClockReading:
    """The clocks of the sending machine at one moment, in seconds: `monotonic_s` is the one that times are taken by;
    `wall_s` is set by people and NTP; `boot_s` also runs while the machine sleeps."""

    monotonic_s: float
    wall_s: float
    boot_s: float


@dataclass(frozen=True)
class ValidityEvidence:
    """Evidence for judging a run. `planned`: number of planned requests; `lost`: how each lost sender ended;
    `interrupted`: by the user, so that missing records are expected."""

    planned: int
    records: Sequence[RequestRecord]
    lost: Sequence[str]
    readings: Sequence[ClockReading]
    interrupted: bool


def invalid_reasons(evidence: ValidityEvidence, *, max_send_lag_s: float) -> list[str]:
    """Return the reasons why the run is INVALID; empty for a valid one.

    Infinite `max_send_lag_s`: no send times to meet.
    """
    return [
        *evidence.lost,
        *_missing(evidence),
        *_lagging(evidence.records, max_send_lag_s),
        *clock_jumps(evidence.readings),
    ]


def clock_jumps(readings: Iterable[ClockReading]) -> list[str]:
    """Each jump of the wall clock against the monotonic one, and each sleep of the machine, in words."""
    found = []
    for before, after in pairwise(readings):
        asleep_s = (after.boot_s - before.boot_s) - (after.monotonic_s - before.monotonic_s)
        jump_s = (after.wall_s - before.wall_s) - (after.boot_s - before.boot_s)
        if asleep_s > CLOCK_JUMP_S:
            found.append(f"the sending machine slept for {asleep_s:.1f} s")
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
        f"the sender lagged: {late / len(lags):.1%} of the requests left more than {max_send_lag_s:g} s late "
        f"(p99 {np.percentile(lags, 99):.3g} s); at most {LATE_SHARE:.0%} may (--max-send-lag, --senders)"
    ]


_WATCH_EVERY_S = 1.0
_LOOKS = 3


def clock_from(start: float) -> Callable[[], float]:
    """A clock that is 0 when time.monotonic() is `start`."""
    return lambda: time.monotonic() - start


def read_clocks() -> ClockReading:
    """All clocks now: of a few looks the quickest, since being preempted between two clocks looks like a jump."""
    boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    looks = []
    for _ in range(_LOOKS):
        began = time.monotonic()
        looks.append((ClockReading(began, time.time(), time.clock_gettime(boot)), time.monotonic() - began))
    return min(looks, key=lambda look: look[1])[0]


@dataclass
class ClockWatch:
    """Readings taken while a run lasts."""

    readings: list[ClockReading] = field(default_factory=list)

    async def run(self) -> None:
        """Read the clocks until cancelled."""
        try:
            while True:
                self.readings.append(read_clocks())
                await asyncio.sleep(_WATCH_EVERY_S)
        finally:
            self.readings.append(read_clocks())

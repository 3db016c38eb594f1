"""Whether a run measured the server or its own sender. Pure.

A run is INVALID when what it says of the server cannot be trusted, whatever the server did: requests left later than
they were due, records are missing, or the machine's clock jumped. How requests ended is no matter of validity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
class Evidence:
    """What a run leaves for judgement. `planned`: requests that were to be sent; `lost`: what became of each sender
    that did not come back, in words; `interrupted`: by the user, which loses records for no fault of the run's."""

    planned: int
    records: Sequence[RequestRecord]
    lost: Sequence[str]
    readings: Sequence[ClockReading]
    interrupted: bool


def invalid_reasons(evidence: Evidence, *, max_send_lag_s: float) -> list[str]:
    """Why the run is INVALID; empty for a valid one. `max_send_lag_s` infinite: sending has no times to keep."""
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


def _missing(evidence: Evidence) -> list[str]:
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

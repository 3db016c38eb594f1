"""The clocks of the sending machine: the one that runs are timed by, and a watch over it.

time.monotonic is one clock for all processes of a host, so an instant agreed on by it is the same in each sender.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.validity import ClockReading

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
        """Read for ever, until cancelled."""
        try:
            while True:
                self.readings.append(read_clocks())
                await asyncio.sleep(_WATCH_EVERY_S)
        finally:
            self.readings.append(read_clocks())

"""One alarm for many deadlines: it rings when the earliest may have passed, and is then set to the next."""

import math
import time
from collections.abc import Callable

from messenger.alarms import Alarm, AlarmClock

__all__ = ["Deadlines"]


class Deadlines:
    """Guarded by its user's lock. `ring` is called without it, and calls `rang` first, then `watch` for what is open.

    A deadline that is kept costs no call of the clock: the alarm rings for nothing, now and then.
    """

    def __init__(self, clock: AlarmClock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._alarm: Alarm | None = None
        self._due_s = math.inf

    def watch(self, due_s: float) -> None:
        """Ring at `due_s` (monotonic time) at the latest."""
        if due_s < self._due_s:
            self.clear()
            self._due_s = due_s
            self._alarm = self._clock.set(max(0.0, due_s - time.monotonic()), self._ring)

    def rang(self) -> None:
        """The alarm has rung, and watches nothing now."""
        self._alarm = None
        self._due_s = math.inf

    def clear(self) -> None:
        """Ring no more."""
        if self._alarm is not None:
            self._clock.clear(self._alarm)
        self.rang()

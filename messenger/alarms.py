"""One thread that calls back at given times: deadlines of operations and grace periods.

Alarms are kept in buckets of `TICK_S`, so setting and clearing one costs a dictionary operation. The clock's lock is a
leaf and not held during callbacks.
"""

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable

TICK_S = 0.005
_FOREVER_S = threading.TIMEOUT_MAX / 2
"""Longest delay; a thread cannot wait much longer."""

_log = logging.getLogger(__name__)


class Alarm:
    """A callback that is due at a time; cleared by `AlarmClock.clear`."""

    __slots__ = ("callback", "tick")

    def __init__(self, tick: int, callback: Callable[[], None]) -> None:
        self.tick = tick
        self.callback = callback


class AlarmClock:
    """Thread of alarms. Callbacks run on it, at most `TICK_S` late on an idle machine, and must be brief."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._buckets: dict[int, set[Alarm]] = {}
        self._ticks: list[int] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set(self, delay_s: float, callback: Callable[[], None]) -> Alarm:
        """Call back once, `delay_s` from now. An alarm set after `close` never rings."""
        alarm = Alarm(int((time.monotonic() + min(delay_s, _FOREVER_S)) / TICK_S) + 1, callback)
        with self._changed:
            bucket = self._buckets.get(alarm.tick)
            if bucket is None:
                bucket = self._buckets[alarm.tick] = set()
                heapq.heappush(self._ticks, alarm.tick)
                if self._ticks[0] == alarm.tick:
                    self._changed.notify()
            bucket.add(alarm)
        return alarm

    def clear(self, alarm: Alarm) -> None:
        """Remove the alarm; has no effect on one that is ringing already."""
        with self._changed:
            bucket = self._buckets.get(alarm.tick)
            if bucket is not None:
                bucket.discard(alarm)

    def pending(self) -> int:
        """Return the number of alarms that are set."""
        with self._changed:
            return sum(map(len, self._buckets.values()))

    def is_current_thread(self) -> bool:
        """Return True on the clock's thread, that is, inside a callback."""
        return self._thread.ident == threading.get_ident()

    def close(self) -> None:
        """End the thread; pending alarms never ring."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive() and not self.is_current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._drop_empty_buckets()
                if self._closing:
                    return
                wait_s = self._ticks[0] * TICK_S - time.monotonic() if self._ticks else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                due = self._buckets.pop(heapq.heappop(self._ticks))
            for alarm in due:
                try:
                    alarm.callback()
                except Exception:
                    _log.exception("an alarm's callback failed")

    def _drop_empty_buckets(self) -> None:
        # Only at the head: operations that ended in time leave empty buckets, which must not wake the thread.
        while self._ticks and not self._buckets[self._ticks[0]]:
            del self._buckets[heapq.heappop(self._ticks)]


class EarliestAlarm:
    """One alarm for many deadlines: it rings when the earliest may have passed, and is then set to the next.

    Guarded by its user's lock. `ring` is called without that lock; it must call `rang` first, and then `watch` for each
    deadline that is still open. A deadline that is met costs no call of the clock; in return, the alarm sometimes rings
    unnecessarily.
    """

    def __init__(self, clock: AlarmClock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._alarm: Alarm | None = None
        self.due_s = math.inf
        """Time at which it rings at the latest."""

    def watch(self, due_s: float) -> None:
        """Ring at `due_s` (monotonic time) at the latest."""
        if due_s < self.due_s:
            self.clear()
            self.due_s = due_s
            self._alarm = self._clock.set(max(0.0, due_s - time.monotonic()), self._ring)

    def rang(self) -> None:
        """Record that the alarm has rung and watches nothing."""
        self._alarm = None
        self.due_s = math.inf

    def clear(self) -> None:
        """Discard all deadlines; the alarm does not ring."""
        if self._alarm is not None:
            self._clock.clear(self._alarm)
        self.rang()

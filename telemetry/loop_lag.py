"""Event loop lag: delay of the loop by work on it or by a thread that holds the GIL.

Measured twice: as elapsed time, part of which other processes of the machine may have used; and as the part that this
process can have caused, at most the CPU time it used meanwhile.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

__all__ = ["STALL_S", "LoopWatch"]

STALL_S: Final = 0.05
_EVERY_S: Final = 0.02
_WINDOW_S: Final = 30.0


class LoopWatch:
    """Schedules a wake-up and measures its delay. Call `start` and `close` on the loop to watch."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._cpu_s = 0.0  # of the next wake-up; CPU time of the process at the last one
        self._window_s = now()
        self._before, self._longest = (0.0, 0.0), (0.0, 0.0)  # (lag, own) of the last whole window, of this one
        self.num_stalls = 0  # of STALL_S and longer, by its own work

    def start(self) -> None:
        """Start watching."""
        self._cpu_s = time.process_time()
        self._schedule()

    async def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def lag_s(self) -> float:
        """Longest delay of the loop in the last 30 to 60 seconds."""
        self._turn_over()
        return max(self._before[0], self._longest[0])

    @property
    def own_s(self) -> float:
        """Longest delay caused by this process's own work in that time."""
        self._turn_over()
        return max(self._before[1], self._longest[1])

    def note(self, lag_s: float, cpu_s: float) -> None:
        """Record that the loop ran `lag_s` seconds late while the process used so much CPU time."""
        self._turn_over()
        own_s = min(lag_s, cpu_s)
        self._longest = max(self._longest[0], lag_s), max(self._longest[1], own_s)
        self.num_stalls += own_s >= STALL_S

    # A timer, because a task that sleeps would take several times as long for each of the wake-ups.
    def _schedule(self) -> None:
        self._due_s = self._now() + _EVERY_S
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._wake_up)

    def _wake_up(self) -> None:
        before_s, self._cpu_s = self._cpu_s, time.process_time()
        self.note(max(0.0, self._now() - self._due_s), self._cpu_s - before_s)
        self._schedule()

    def _turn_over(self) -> None:
        passed = self._now() - self._window_s
        if passed >= _WINDOW_S:
            self._before = self._longest if passed < 2 * _WINDOW_S else (0.0, 0.0)
            self._longest, self._window_s = (0.0, 0.0), self._now()

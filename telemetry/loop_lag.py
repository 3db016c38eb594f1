"""How long an event loop does not come round: work on it, or a thread that keeps the interpreter to itself.

Twice: as time that passed, some of which other processes of the machine may have had; and as what of it this process
can be to blame for, which is at most what it computed meanwhile.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

__all__ = ["STALL_S", "LoopWatch"]

STALL_S: Final = 0.05
_EVERY_S: Final = 0.02
_WINDOW_S: Final = 30.0


class LoopWatch:
    """Asks to be woken again and again, and notes how late it is. `start` and `close` on the loop that is watched."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._task: asyncio.Task[None] | None = None
        self._window_s = now()
        self._before, self._longest = (0.0, 0.0), (0.0, 0.0)  # (lag, own) of the last whole window, of this one
        self.num_stalls = 0  # of STALL_S and longer, by its own work

    def start(self) -> None:
        """Watch from now on."""
        self._task = asyncio.create_task(self._watch(), name="loop watch")

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def lag_s(self) -> float:
        """The longest time that the loop did not come round, of the last half a minute to a minute."""
        self._turn_over()
        return max(self._before[0], self._longest[0])

    @property
    def own_s(self) -> float:
        """The longest of what of such times was this process's own work."""
        self._turn_over()
        return max(self._before[1], self._longest[1])

    def note(self, lag_s: float, cpu_s: float) -> None:
        """The loop came round so much later than asked; meanwhile the process had so much CPU time."""
        self._turn_over()
        own_s = min(lag_s, cpu_s)
        self._longest = max(self._longest[0], lag_s), max(self._longest[1], own_s)
        self.num_stalls += own_s >= STALL_S

    async def _watch(self) -> None:
        while True:
            due, cpu_s = self._now() + _EVERY_S, time.process_time()
            await asyncio.sleep(_EVERY_S)
            self.note(max(0.0, self._now() - due), time.process_time() - cpu_s)

    def _turn_over(self) -> None:
        passed = self._now() - self._window_s
        if passed >= _WINDOW_S:
            self._before = self._longest if passed < 2 * _WINDOW_S else (0.0, 0.0)
            self._longest, self._window_s = (0.0, 0.0), self._now()

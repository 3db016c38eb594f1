"""How long an event loop does not come round: work on it, or a thread that keeps the interpreter to itself.

Wall time: on a machine that others load too, some of it is theirs.
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
        self._longest = [0.0, 0.0]  # of the last whole window, of this one
        self.num_stalls = 0  # of STALL_S and longer

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
    def longest_s(self) -> float:
        """The longest lag of the last half a minute, or up to a minute."""
        self._turn_over()
        return max(self._longest)

    def note(self, lag_s: float) -> None:
        """The loop came round so much later than asked."""
        self._turn_over()
        self._longest[1] = max(self._longest[1], lag_s)
        self.num_stalls += lag_s >= STALL_S

    async def _watch(self) -> None:
        while True:
            due = self._now() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.note(max(0.0, self._now() - due))

    def _turn_over(self) -> None:
        passed = self._now() - self._window_s
        if passed >= _WINDOW_S:
            self._longest = [self._longest[1] if passed < 2 * _WINDOW_S else 0.0, 0.0]
            self._window_s = self._now()

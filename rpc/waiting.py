"""Waiting in asyncio: exponential backoff with jitter, the first of several events, writes and tasks to be ended."""

import asyncio
import random
from collections.abc import Awaitable
from typing import Any, Final

LAST_WRITE_S: Final = 0.5
"""What a pending write to a gRPC stream is given to end before the stream ends."""
_GROWTH = 1.6


class Backoff:
    """Exponential backoff with jitter. The first waits are short, since most outages are brief."""

    def __init__(self, first_s: float = 0.2, most_s: float = 3.0, rng: random.Random | None = None) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._step_s = first_s
        self._rng = rng or random.Random()

    def succeeded(self) -> None:
        """Reset: the next wait is a first one again."""
        self._step_s = self._first_s

    def failed(self) -> float:
        """Return the seconds to wait now: between half of the current step and all of it."""
        step_s, self._step_s = self._step_s, min(self._step_s * _GROWTH, self._most_s)
        return step_s * self._rng.uniform(0.5, 1.0)


async def first_of(*either: "asyncio.Future[Any] | asyncio.Event") -> None:
    """Wait until one of the futures is done or one of the events is set. The futures are not cancelled."""
    waits = [asyncio.ensure_future(each.wait()) for each in either if isinstance(each, asyncio.Event)]
    try:
        futures = (each for each in either if not isinstance(each, asyncio.Event))
        await asyncio.wait([*futures, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def whole_write(write: Awaitable[None]) -> None:
    """Wait for a write to a gRPC stream. If cancelled, first give it LAST_WRITE_S to end.

    A cancelled write remains pending in gRPC, which sends no status meanwhile: the peer would wait for its deadline.
    Raises TimeoutError if the peer does not read.
    """
    pending = asyncio.ensure_future(write)
    pending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # or asyncio logs it as lost
    try:
        await asyncio.shield(pending)
    except asyncio.CancelledError:
        await asyncio.wait([pending], timeout=LAST_WRITE_S)
        if pending.cancel():
            raise TimeoutError("the peer does not read its stream") from None
        raise


_CANCEL_AGAIN_S = 1.0


async def cancel_and_wait(task: "asyncio.Task[None] | None") -> None:
    """Cancel the task, if any, and wait until it has ended.

    Cancels repeatedly, since an await in the task may swallow a cancellation.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)

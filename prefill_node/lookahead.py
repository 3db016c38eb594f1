"""Limit on the requests that a prefill node prepares ahead: KV is loaded and pages are reserved for the next request
while one is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from worker.policy.scheduling_order import RequestKey, WaitQueue


class LookaheadPermit:
    """A request's permit to be prepared and computed; ended once it is computed."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._ended = False

    def end(self) -> None:
        """Let the next request in. Idempotent."""
        if not self._ended:
            self._ended = True
            self._end()


class LookaheadLimiter:
    """Granter of permits in the order of `WaitQueue.next_ahead`. Lives on the event loop."""

    def __init__(self, num_permits: int, wait_queue: WaitQueue) -> None:
        self._num_permits = num_permits
        self._wait_queue = wait_queue
        self._holders: set[RequestKey] = set()
        self._waiters: dict[RequestKey, asyncio.Future[None]] = {}

    @property
    def must_wait(self) -> bool:
        """Return True if a new request at the end of the queue would have to wait now."""
        return bool(self._waiters) or len(self._holders) >= self._num_permits

    @contextlib.asynccontextmanager
    async def take(self, key: RequestKey) -> AsyncIterator[LookaheadPermit]:
        """Wait for a permit for the request `key`, and end it when the context exits."""
        waiter = self._waiters[key] = asyncio.get_running_loop().create_future()
        place = LookaheadPermit(lambda: self._end(key))
        self._serve()
        try:
            await waiter
            yield place
        finally:
            place.end()

    def _end(self, key: RequestKey) -> None:
        self._waiters.pop(key, None)
        self._holders.discard(key)
        self._serve()

    def _serve(self) -> None:
        waiters, holders = self._waiters, self._holders
        while first := self._wait_queue.next_ahead(waiters, holders, self._num_permits, time.monotonic()):
            self._holders.add(first)
            if not (waiter := self._waiters.pop(first)).done():
                waiter.set_result(None)

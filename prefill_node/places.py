"""How many requests a prefill node works ahead on: loading and reserving for the next while one is computed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from worker.policy.turns import Key, Line


class Place:
    """Among the requests being prepared or computed; ended once the compute is done."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._ended = False

    def end(self) -> None:
        """Let the next request in. Idempotent."""
        if not self._ended:
            self._ended = True
            self._end()


class Places:
    """Given in the order of the line, as `Line.next_ahead` has it."""

    def __init__(self, num_places: int, line: Line) -> None:
        self._num_places = num_places
        self._line = line
        self._holders: set[Key] = set()
        self._waiters: dict[Key, asyncio.Future[None]] = {}

    @property
    def must_wait(self) -> bool:
        """Whether a newcomer whose turn comes last would have to wait now."""
        return bool(self._waiters) or len(self._holders) >= self._num_places

    @contextlib.asynccontextmanager
    async def take(self, key: Key) -> AsyncIterator[Place]:
        """A place for the request `key`, once it is its turn."""
        waiter = self._waiters[key] = asyncio.get_running_loop().create_future()
        place = Place(lambda: self._end(key))
        self._serve()
        try:
            await waiter
            yield place
        finally:
            place.end()

    def _end(self, key: Key) -> None:
        self._waiters.pop(key, None)
        self._holders.discard(key)
        self._serve()

    def _serve(self) -> None:
        waiters, holders = self._waiters, self._holders
        while first := self._line.next_ahead(waiters, holders, self._num_places, time.monotonic()):
            self._holders.add(first)
            if not (waiter := self._waiters.pop(first)).done():
                waiter.set_result(None)

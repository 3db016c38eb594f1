"""How many requests a prefill node works ahead on: loading and reserving for the next while one is computed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turn:
    """A place among the requests being prepared or computed; ended once the compute is done."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places = places
        self._ended = False

    def end(self) -> None:
        """Let the next request in. Idempotent."""
        if not self._ended:
            self._ended = True
            self._places.release()


class Turns:
    """First come, first served."""

    def __init__(self, num_places: int) -> None:
        self._places = asyncio.Semaphore(num_places)

    @property
    def must_wait(self) -> bool:
        """Whether `take` would have to wait now."""
        return self._places.locked()

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[Turn]:
        await self._places.acquire()
        turn = Turn(self._places)
        try:
            yield turn
        finally:
            turn.end()

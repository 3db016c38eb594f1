"""Who waits for slots on a worker: the first in line gets them, all at once, and nobody goes past it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.policy import OutOfSlots
from worker.policy.turns import Key, Line

__all__ = ["SlotQueue"]

Taken = tuple[list[int], int]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    key: Key
    keys: Sequence[bytes]
    count: int
    wants: int
    taken: asyncio.Future[Taken]


class SlotQueue:
    """Lives on the event loop. `acquire(request, keys, count, wants)` takes slots or raises OutOfSlots;
    `release(request, slots)` undoes it."""

    def __init__(
        self,
        line: Line,
        acquire: Callable[[Key, Sequence[bytes], int, int], Taken],
        release: Callable[[Key, list[int]], None],
    ) -> None:
        self._line = line
        self._acquire = acquire
        self._release = release
        self._waiters: list[_Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    async def take(self, key: Key, keys: Sequence[bytes], count: int, wants: int = 0) -> Taken:
        """As `acquire` for the request `key`, once it is its turn and the slots are there. Cancellable."""
        waiter = _Waiter(key, keys, count, wants, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.serve()
        try:
            return await waiter.taken
        except asyncio.CancelledError:
            if waiter.taken.done() and not waiter.taken.cancelled():
                self._release(key, waiter.taken.result()[0])
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self.serve()

    def serve(self) -> None:
        """Slots may have come back: give them to those whose turn it is."""
        while self._waiters:
            now_s = time.monotonic()
            first = min(self._waiters, key=lambda waiter: self._line.rank(waiter.key, now_s))
            if not first.taken.done():
                try:
                    first.taken.set_result(self._acquire(first.key, first.keys, first.count, first.wants))
                except OutOfSlots:
                    return
            self._waiters.remove(first)

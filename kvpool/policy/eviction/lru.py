"""Least recently used first."""

from collections.abc import Callable

from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use
from kvpool.policy.eviction.ranked import RankedQueue

__all__ = ["Lru"]


class Lru(EvictionPolicy):
    """The block whose last use is the oldest leaves. Uses are counted, not timed, so there are no ties."""

    def __init__(self) -> None:
        self._queue = RankedQueue()
        self._num_uses = 0

    def insert(self, block: Resident, use: Use) -> None:
        block.hits = 0
        self._num_uses += 1
        self._queue.add(block, (self._num_uses,))

    def hit(self, block: Resident, use: Use) -> None:
        block.hits += 1
        self._num_uses += 1
        self._queue.raise_rank(block, (self._num_uses,))

    def offer(self, block: Resident) -> None:
        self._queue.offer(block)

    def pop(self, now_ns: int, may_take: Callable[[Resident], bool]) -> Resident | None:
        return self._queue.take(may_take)

    def remove(self, block: Resident) -> None:
        self._queue.discard(block)

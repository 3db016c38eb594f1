"""Queue of blocks by rank, and the policies based on it: LRU, LFU and length-aware.

The rank of a queued block only rises. So the rank in a heap entry may be outdated, but only too low: it is corrected
when the entry reaches the top, and a block has at most one entry. An offered block that may not be evicted loses its
entry. A block removed otherwise leaves a dead entry; dead entries are swept before they outnumber the others.

Source of length-aware: LengthAwareCache of the Mooncake paper (Qin et al., 2024: "similar to LFU but prioritizing
evicting cache blocks occurring later in requests").
"""

import heapq
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use

Rank = tuple[int, ...]


class _RankedEntry:
    """A block's current rank, and `queued`, True if the heap has an entry for it. Kept in `Resident.state`."""

    __slots__ = ("block", "queued", "rank")

    def __init__(self, block: Resident, rank: Rank) -> None:
        self.block: Resident | None = block
        self.rank = rank
        self.queued = False


class RankedQueue:
    """Blocks of a tier, or of one list of a policy, by rank. Ranks are distinct tuples of equal length.

    Every operation takes amortised O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, _RankedEntry]] = []
        self._num_blocks = 0
        self._num_dead = 0

    def __len__(self) -> int:
        return self._num_blocks

    @property
    def num_entries(self) -> int:
        """Number of heap entries, dead ones included; at most twice the number of blocks plus 64."""
        return len(self._heap)

    def add(self, block: Resident, rank: Rank) -> None:
        """Add the block to this queue without offering it."""
        block.state = _RankedEntry(block, rank)
        self._num_blocks += 1

    def raise_rank(self, block: Resident, rank: Rank) -> None:
        """Set the block's rank, which must be above its last one."""
        _entry_of(block).rank = rank

    def offer(self, block: Resident) -> None:
        """Mark the block as evictable. May be repeated."""
        entry = _entry_of(block)
        if not entry.queued:
            entry.queued = True
            heapq.heappush(self._heap, (entry.rank, entry))

    def is_offered(self, block: Resident) -> bool:
        """Return True if the block is offered and has an entry."""
        return _entry_of(block).queued

    def take(self, may_take: Callable[[Resident], bool]) -> Resident | None:
        """Remove and return the offered block of the lowest rank that may be evicted; None if there is none."""
        heap = self._heap
        while heap:
            rank, entry = heap[0]
            block = entry.block
            if block is None:
                heapq.heappop(heap)
                self._num_dead -= 1
            elif entry.rank != rank:
                heapq.heapreplace(heap, (entry.rank, entry))
            else:
                heapq.heappop(heap)
                entry.queued = False
                if may_take(block):
                    self._forget(entry, block)
                    return block
        return None

    def discard(self, block: Resident) -> None:
        """Remove the block from this queue."""
        entry = _entry_of(block)
        self._forget(entry, block)
        self._num_dead += entry.queued
        if 2 * self._num_dead > len(self._heap) + 64:
            self._heap = [entry for entry in self._heap if entry[1].block is not None]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def _forget(self, entry: _RankedEntry, block: Resident) -> None:
        entry.block = None
        block.state = None
        self._num_blocks -= 1


class RankedPolicy(EvictionPolicy):
    """Evicts the block of the lowest rank, which subclasses compute at every use."""

    def __init__(self) -> None:
        self._queue = RankedQueue()
        self._num_uses = 0

    @abstractmethod
    def rank(self, block: Resident, num_uses: int) -> Rank:
        """Return the block's rank after the `num_uses`-th use of all blocks; above its rank before."""

    def insert(self, block: Resident, use: Use) -> None:
        block.hits = 0
        self._num_uses += 1
        self._queue.add(block, self.rank(block, self._num_uses))

    def hit(self, block: Resident, use: Use) -> None:
        block.hits += 1
        self._num_uses += 1
        self._queue.raise_rank(block, self.rank(block, self._num_uses))

    def offer(self, block: Resident) -> None:
        self._queue.offer(block)

    def pop(self, now_ns: int, may_take: Callable[[Resident], bool]) -> Resident | None:
        return self._queue.take(may_take)

    def remove(self, block: Resident) -> None:
        self._queue.discard(block)


def _entry_of(block: Resident) -> _RankedEntry:
    entry: Any = block.state
    assert entry is not None, "the block was not inserted, or was removed"
    return entry  # type: ignore[no-any-return]


class Lru(RankedPolicy):
    """Evicts the least recently used block. Uses are counted, not timed, so there are no ties."""

    def rank(self, block: Resident, num_uses: int) -> Rank:
        return (num_uses,)


class Lfu(RankedPolicy):
    """Evicts the block with the fewest uses since its insertion; among equals, the least recently used.

    The count is lost with the block: a block that returns starts at zero.
    """

    def rank(self, block: Resident, num_uses: int) -> Rank:
        return (block.hits, num_uses)


class LengthAware(RankedPolicy):
    """Evicts the block with the fewest uses since its insertion; among equals the deepest, then the least recently
    used.
    """

    def rank(self, block: Resident, num_uses: int) -> Rank:
        return (block.hits, -block.depth, num_uses)

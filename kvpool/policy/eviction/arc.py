"""Adaptive replacement cache (ARC), which adapts the balance of recency and frequency to its own misses.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4; counted in bytes
instead of pages.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use
from kvpool.policy.eviction.ranked import RankedQueue


class _Recency:
    """One list of the paper with its ghosts: T1 with B1, or T2 with B2."""

    def __init__(self) -> None:
        self.queue = RankedQueue()
        self.nbytes = 0
        self.ghosts: OrderedDict[object, int] = OrderedDict()  # key -> bytes, least recent first
        self.ghost_nbytes = 0

    def add(self, block: Resident, num_uses: int) -> None:
        self.queue.add(block, (num_uses,))
        self.nbytes += block.nbytes

    def discard(self, block: Resident) -> None:
        self.queue.discard(block)
        self.nbytes -= block.nbytes

    def take(self, may_take: Callable[[Resident], bool]) -> Resident | None:
        block = self.queue.take(may_take)
        if block is not None:
            self.nbytes -= block.nbytes
            self.ghosts[block.key] = block.nbytes
            self.ghost_nbytes += block.nbytes
        return block

    def forget_ghost(self, key: object) -> bool:
        """Remove the ghost of this key; return True if there was one."""
        nbytes = self.ghosts.pop(key, 0)
        self.ghost_nbytes -= nbytes
        return nbytes > 0

    def forget_oldest_ghost(self) -> None:
        _, nbytes = self.ghosts.popitem(last=False)
        self.ghost_nbytes -= nbytes


class Arc(EvictionPolicy):
    """ARC over two lists in LRU order: blocks used once since they were inserted (`once`) and used again (`again`).

    `target_nbytes`, the size that `once` should have, decides which list loses a block. It grows when a block returns
    that `once` lost recently, and shrinks when a block returns that `again` lost.
    """

    def __init__(self, capacity_nbytes: int) -> None:
        self.target_nbytes = 0
        self._capacity_nbytes = capacity_nbytes
        self._once, self._again = _Recency(), _Recency()
        self._num_uses = 0
        self._moved_for: object = None

    def admits(self, block: Resident, use: Use) -> bool:
        """Return True, after moving the target: ARC adapts before it chooses a victim."""
        self._move_target(block)
        return True

    def insert(self, block: Resident, use: Use) -> None:
        self._num_uses += 1
        block.hits = 0
        self._move_target(block)
        self._moved_for = None
        if self._once.forget_ghost(block.key) or self._again.forget_ghost(block.key):
            self._add_again(block)
        else:
            block.rank = 0.0
            self._once.add(block, self._num_uses)
        self._limit_ghosts()

    def hit(self, block: Resident, use: Use) -> None:
        self._num_uses += 1
        block.hits += 1
        if self._list_of(block) is self._again:
            self._again.queue.raise_rank(block, (self._num_uses,))
            return
        was_offered = self._once.queue.is_offered(block)
        self._once.discard(block)
        self._add_again(block)
        if was_offered:
            self._again.queue.offer(block)

    def offer(self, block: Resident) -> None:
        self._list_of(block).queue.offer(block)

    def pop(self, now_ns: int, may_take: Callable[[Resident], bool]) -> Resident | None:
        once, again = self._once, self._again
        surplus = once.nbytes - self.target_nbytes
        # In a tie, a block that returns to `again` evicts from `once`, as in the paper.
        if surplus > 0 or (surplus == 0 and self._moved_for in again.ghosts):
            return once.take(may_take) or again.take(may_take)
        return again.take(may_take) or once.take(may_take)

    def remove(self, block: Resident) -> None:
        self._list_of(block).discard(block)

    def _move_target(self, block: Resident) -> None:
        """Adapt the target, once per incoming block. The ratio of ghosts is rounded down, as in common
        implementations.
        """
        if block.key == self._moved_for:
            return
        self._moved_for = block.key
        once, again = self._once, self._again
        if block.key in once.ghosts:
            step = max(1, again.ghost_nbytes // once.ghost_nbytes) * block.nbytes
            self.target_nbytes = min(self._capacity_nbytes, self.target_nbytes + step)
        elif block.key in again.ghosts:
            step = max(1, once.ghost_nbytes // again.ghost_nbytes) * block.nbytes
            self.target_nbytes = max(0, self.target_nbytes - step)

    def _add_again(self, block: Resident) -> None:
        block.rank = 1.0
        self._again.add(block, self._num_uses)

    def _list_of(self, block: Resident) -> _Recency:
        return self._again if block.rank else self._once

    def _limit_ghosts(self) -> None:
        """Drop ghosts so that `once` with its ghosts has at most the capacity, and all lists at most twice that."""
        once, again = self._once, self._again
        while once.ghosts and once.nbytes + once.ghost_nbytes > self._capacity_nbytes:
            once.forget_oldest_ghost()
        nbytes = once.nbytes + once.ghost_nbytes + again.nbytes
        while again.ghosts and nbytes + again.ghost_nbytes > 2 * self._capacity_nbytes:
            again.forget_oldest_ghost()

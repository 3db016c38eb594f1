"""Moonpool's own policy: evicts the block with the fewest expected uses per second, weighted by the saving of each use.

Blocks are used along prompts, so a request is recorded as a visit (`reuse.Visit`) with facts that hold for all its
blocks: how much of the prompt was known, which turn of a conversation it is, and how long the pause before it was.
From these, `ReuseModel` derives a class of reuse rate; the blocks of one class and one value are queued by the time of
their last use. The expected rate of a class rises with age and then falls, because users pause before they answer. So
the worst block of a queue is its oldest or its newest: `pop` compares the two ends of some dozens of queues, once per
instant, and evicts from the worst queue until another is worse.

The value per byte is the time of computing the block, as far as known, divided among the copies on other nodes, and
multiplied by 1/4 if a slower tier has the block too. It may change while a block is queued; the queue is corrected when
the block reaches an end of its queue or is offered again. Evicted blocks are remembered as ghosts, up to twice the
capacity, so that a conversation that returns too late is still recognised. A block that is worth less than all
evictable blocks is not admitted.

A `Use` that stores what a request computed continues that request's visit; the blocks that it finds are not counted as
used again.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable

from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use
from kvpool.policy.eviction.reuse import ReuseModel, Visit

_LOADING_SHARE = 0.25  # time of loading from a slower tier / time of computing
_MAX_VALUE_STEPS = 8  # half octaves above and below the mean
_GHOST_CAPACITIES = 2

_QueueKey = tuple[int, int]  # class of reuse rate, half octaves of value


class _QueuedBlock:
    """State of a block in the tier. `serial` numbers its last use, `ticket` its last queueing (0 = not queued)."""

    __slots__ = ("block", "key", "serial", "ticket", "visit")

    def __init__(self, block: Resident, visit: Visit, serial: int) -> None:
        self.block = block
        self.visit = visit
        self.serial = serial
        self.ticket = 0
        self.key: _QueueKey = (0, 0)


_RankedEnd = tuple[float, int, int, int, _QueuedBlock]  # index, serial, 1 for the newest end, ticket
_HeapEntry = tuple[int, int, _QueuedBlock]  # serial (of the newest end's heap: negative), ticket


class _ReuseQueue:
    """Blocks of one class by time of last use, accessible at both ends. Entries with old tickets are stale."""

    def __init__(self) -> None:
        self._ends: tuple[list[_HeapEntry], list[_HeapEntry]] = ([], [])

    def add(self, entry: _QueuedBlock) -> None:
        heapq.heappush(self._ends[0], (entry.serial, entry.ticket, entry))
        heapq.heappush(self._ends[1], (-entry.serial, entry.ticket, entry))

    def end(self, newest: int) -> _QueuedBlock | None:
        heap = self._ends[newest]
        while heap:
            _, ticket, entry = heap[0]
            if entry.ticket == ticket:
                return entry
            heapq.heappop(heap)
        return None

    def __len__(self) -> int:
        return max(map(len, self._ends))

    def sweep(self) -> None:
        for heap in self._ends:
            heap[:] = [entry for entry in heap if entry[2].ticket == entry[1]]
            heapq.heapify(heap)


class Moonpool(EvictionPolicy):
    """Policy described in the module's docstring. O(log n) per operation, occasionally some milliseconds to learn."""

    def __init__(self, capacity_nbytes: int) -> None:
        self._model = ReuseModel()
        self._entries: dict[object, _QueuedBlock] = {}  # of the blocks in the tier, by key
        self._ghosts: OrderedDict[object, tuple[int, Visit, int]] = OrderedDict()  # hits, last visit, bytes
        self._ghost_nbytes = 0
        self._max_ghost_nbytes = _GHOST_CAPACITIES * capacity_nbytes
        self._use: Use | None = None
        self._visit = Visit(0, 0)
        self._queues: dict[_QueueKey, _ReuseQueue] = {}
        # Heap of queue ends by their index at `_ranked_ns`, worst first; entries that are no longer an end are skipped.
        self._worst: list[_RankedEnd] = []
        self._ranked_ns = -1
        self._num_uses = self._num_tickets = self._num_queued = self._num_entries = 0
        self._cost_s = self._cost_nbytes = 0.0

    def admits(self, block: Resident, use: Use) -> bool:
        """Return True if the block's index is at least that of the block that would be evicted for it."""
        visit = self._visit_of(block, use)
        ghost = self._ghosts.get(block.key)
        hits = ghost[0] + 1 if ghost else 0
        key = self._queue_key(block, visit, hits)
        worst = self._find_worst(use.now_ns)
        if worst is None or self._index(key, 0) >= worst[0]:
            return True
        self._model.used(block.key, visit, hits, block.depth, block.num_tokens > 0, len(self._entries))
        self._remember(block, hits, visit)
        return False

    def insert(self, block: Resident, use: Use) -> None:
        visit = self._visit_of(block, use)
        visit.reached_blocks = block.depth + 1
        ghost = self._ghosts.pop(block.key, None)
        block.hits = 0
        if ghost is not None:
            hits, before, nbytes = ghost
            self._ghost_nbytes -= nbytes
            block.hits = hits + 1
            _follow(visit, before, block.depth + 1)
        if block.cost_s > 0:
            self._cost_s += block.cost_s
            self._cost_nbytes += block.nbytes
        self._num_uses += 1
        block.state = self._entries[block.key] = _QueuedBlock(block, visit, self._num_uses)
        self._model.used(block.key, visit, block.hits, block.depth, block.num_tokens > 0, len(self._entries))

    def hit(self, block: Resident, use: Use) -> None:
        entry = _entry_of(block)
        visit, before = self._visit_of(block, use), entry.visit
        visit.reached_blocks = block.depth + 1
        if before is visit:
            return
        if not use.stores:
            block.hits += 1
            _follow(visit, before, block.depth + 1)
            self._model.used(block.key, visit, block.hits, block.depth, block.num_tokens > 0, len(self._entries))
        entry.visit = visit
        self._num_uses += 1
        entry.serial = self._num_uses
        if entry.ticket:
            self._unqueue(entry)
            self.offer(block)

    def offer(self, block: Resident) -> None:
        entry = _entry_of(block)
        key = self._queue_key(block, entry.visit, block.hits)
        if entry.ticket:
            if entry.key == key:
                return
            self._unqueue(entry)
        self._num_tickets += 1
        self._num_queued += 1
        self._num_entries += 1
        entry.key, entry.ticket = key, self._num_tickets
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _ReuseQueue()
        queue.add(entry)
        for newest in (0, 1):
            if self._ranked_ns >= 0 and queue.end(newest) is entry:
                self._rank(entry, newest)
        if self._num_entries > 4 * self._num_queued + 256:
            self._sweep()

    def pop(self, now_ns: int, may_take: Callable[[Resident], bool]) -> Resident | None:
        while (worst := self._find_worst(now_ns)) is not None:
            entry = worst[-1]
            block = entry.block
            if self._value_steps(block) != entry.key[1]:
                self.offer(block)
                continue
            self._unqueue(entry)
            if may_take(block):
                self._remember(block, block.hits, entry.visit)
                self.remove(block)
                return block
        return None

    def remove(self, block: Resident) -> None:
        entry = _entry_of(block)
        if entry.ticket:
            self._unqueue(entry)
        block.state = None
        del self._entries[block.key]

    def _visit_of(self, block: Resident, use: Use) -> Visit:
        if use is self._use:
            return self._visit
        visit = self._stored_by(block, use) if use.stores else Visit(use.now_ns, use.request_blocks)
        self._use, self._visit = use, visit
        if self._model.learn(use.now_ns):
            self._ranked_ns = -1
        return visit

    def _stored_by(self, block: Resident, use: Use) -> Visit:
        """Return the visit of the request that stores `block`: that of the block which it found or stored last.

        Returns a new visit if another request has used that block since, as happens to prefixes that many share.
        """
        last = self._entries.get(block.parent if use.after is None else use.after)
        if last is None:
            return Visit(use.now_ns, use.request_blocks)
        depth = last.block.depth + 1
        if last.visit.reached_blocks != depth:
            return Visit(use.now_ns, use.request_blocks, known_blocks=depth)
        last.visit.request_blocks = max(last.visit.request_blocks, use.request_blocks)
        return last.visit

    def _queue_key(self, block: Resident, visit: Visit, hits: int) -> _QueueKey:
        return self._model.classify(visit, hits, block.depth, block.num_tokens > 0), self._value_steps(block)

    def _value_steps(self, block: Resident) -> int:
        value = 1.0
        if block.cost_s > 0 and self._cost_s > 0:
            value = block.cost_s / block.nbytes * self._cost_nbytes / self._cost_s
        if block.in_slower_tier:
            value *= _LOADING_SHARE
        if value == 1.0 and not block.replicas:
            return 0
        steps = round(2 * math.log2(value / (1 + block.replicas)))
        return min(max(steps, -_MAX_VALUE_STEPS), _MAX_VALUE_STEPS)

    def _index(self, key: _QueueKey, age_ns: int) -> float:
        return self._model.uses_per_second(key[0], age_ns) * math.sqrt(2) ** key[1]

    def _rank(self, entry: _QueuedBlock, newest: int) -> None:
        index = self._index(entry.key, self._ranked_ns - entry.visit.now_ns)
        heapq.heappush(self._worst, (index, entry.serial, newest, entry.ticket, entry))

    def _find_worst(self, now_ns: int) -> _RankedEnd | None:
        if self._ranked_ns != now_ns:
            self._ranked_ns = now_ns
            self._worst.clear()
            for queue in self._queues.values():
                self._rank_ends(queue)
        while self._worst:
            worst = self._worst[0]
            _, _, newest, ticket, entry = worst
            if entry.ticket == ticket and self._queues[entry.key].end(newest) is entry:
                return worst
            heapq.heappop(self._worst)
        return None

    def _rank_ends(self, queue: _ReuseQueue) -> None:
        for newest in (0, 1):
            entry = queue.end(newest)
            if entry is not None:
                self._rank(entry, newest)

    def _unqueue(self, entry: _QueuedBlock) -> None:
        """Remove the block from its queue; its neighbour becomes an end if it was one."""
        queue = self._queues[entry.key]
        was_end = queue.end(0) is entry, queue.end(1) is entry
        entry.ticket = 0
        self._num_queued -= 1
        for newest in (0, 1):
            if was_end[newest] and self._ranked_ns >= 0 and (end := queue.end(newest)) is not None:
                self._rank(end, newest)

    def _sweep(self) -> None:
        for key, queue in list(self._queues.items()):
            queue.sweep()
            if not len(queue):
                del self._queues[key]
        self._num_entries = self._num_queued
        self._ranked_ns = -1

    def _remember(self, block: Resident, hits: int, visit: Visit) -> None:
        known = self._ghosts.pop(block.key, None)
        self._ghost_nbytes += block.nbytes - (known[2] if known else 0)
        self._ghosts[block.key] = hits, visit, block.nbytes
        while self._ghost_nbytes > self._max_ghost_nbytes:
            _, (_, _, nbytes) = self._ghosts.popitem(last=False)
            self._ghost_nbytes -= nbytes


def _follow(visit: Visit, before: Visit, known_blocks: int) -> None:
    """Update `visit` with the last visit `before` of the block that ends its first `known_blocks` blocks.

    If most of the earlier prompt is used again, both belong to the same conversation; otherwise they only share a
    prefix.
    """
    visit.known_blocks = known_blocks
    unused = before.request_blocks - known_blocks
    if before is not visit:
        if unused <= max(1, before.request_blocks // 2):
            visit.turn, visit.pause_s = before.turn + 1, (visit.now_ns - before.now_ns) * 1e-9
        else:
            visit.turn, visit.pause_s = 0, 0.0


def _entry_of(block: Resident) -> _QueuedBlock:
    entry = block.state
    assert isinstance(entry, _QueuedBlock), "the block was not inserted, or was removed"
    return entry

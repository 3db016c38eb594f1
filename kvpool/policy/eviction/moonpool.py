"""Moonpool's own policy: it follows the best of several experts, which it compares on the uses that it sees.

Each expert is a policy with a shadow cache, which has the tier's capacity, sees all uses and holds no data (`shadows`):
LRU, ARC, and the policy of the reuse model. The latter evicts the block with the fewest expected uses per second,
weighted by the saving of each use, and refuses a block that is worth less than all evictable ones (`reuse`). The tier
follows one expert: it evicts blocks that the followed expert does not hold, in the order in which they left its cache.
As long as the tier may evict these, it holds what the expert holds. After a switch it comes to hold what the new expert
holds, block by block; nothing is evicted without need.

Blocks are used along prompts, so a request is recorded as a visit with facts that hold for all its blocks: how much of
the prompt was known, which turn of a conversation it is, and how long the pause before it was. A `Use` that stores what
a request computed continues that request's visit; the blocks that it finds are not counted as used again.

The value per byte is the time of computing the block, as far as known, divided among the copies on other nodes, and
multiplied by 1/4 if a slower tier has the block too.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvpool.policy.eviction import shadow_layout as at
from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use
from kvpool.policy.eviction.shadows import UNBOUNDED, Shadows

_LOADING_SHARE = 0.25  # time of loading from a slower tier / time of computing
_MAX_VALUE_STEPS = 8  # half octaves above and below the mean
_MAX_EXPECTED = 4096  # more than the blocks in the tier


class Moonpool(EvictionPolicy):
    """Policy described in the module's docstring. Some microseconds per use, occasionally milliseconds to learn."""

    def __init__(self, capacity_nbytes: int) -> None:
        self._shadows = Shadows()
        self._blocks: dict[int, Resident] = {}  # in the tier, by row
        # Keys whose use was collected before they are inserted, oldest first. Some never are.
        self._expected: dict[object, None] = {}
        self._num_admitted = 0  # of them, since the last insertion
        # Rows that left the followed cache, oldest first. Entries are checked when they are used.
        self._unwanted: deque[int] = deque()
        self._order: list[tuple[int, int]] = []  # (row, its visit) of further victims, next one first
        self._ordered_at = -1  # number of uses; -1: outdated
        self._num_passed = 0  # of them
        self._vacant = -1  # place in it of the block that was evicted last; -1: none
        self._use: Use | None = None
        self._is_settled = False  # it follows one expert for good
        self._peak_blocks = self._num_pops = self._max_pops = 0
        self._cost_s = self._cost_nbytes = 0.0

    def expect(self, parent: object, depth: int, keys: Sequence[object], last_tokens: int, use: Use) -> None:
        """Collect the uses of the missing blocks, which are played through all experts before one is stored."""
        if use is not self._use:
            self._begin(parent, use)
        shadows, expected = self._shadows, self._expected
        if shadows.is_due:
            self._flush()
        shadows.run(parent, depth, keys, ends_partial=last_tokens > 0)
        for key in keys:
            expected[key] = None
        while len(expected) > _MAX_EXPECTED + len(self._blocks):
            del expected[next(iter(expected))]

    def admits(self, block: Resident, use: Use) -> bool:
        """Return True if the followed expert stores the block."""
        shadows = self._shadows
        self._flush()
        row = shadows.rows_by_key.get(block.key) if block.key in self._expected else None
        if row is None:
            self.expect(block.parent, block.depth, (block.key,), block.num_tokens, use)
            self._flush()
            row = shadows.rows_by_key[block.key]
        admits = bool(shadows.cells[row * at.NUM_COLUMNS + at.IN] & shadows.followed_bit)
        if admits:
            self._num_admitted += 1
        else:
            del self._expected[block.key]
        return admits

    def keep_to_recency(self) -> None:
        self.follow(at.LRU)
        self._is_settled = True

    def insert(self, block: Resident, use: Use) -> None:
        if use is not self._use:
            self._begin(block.parent, use)
        if block.cost_s > 0:
            self._cost_s += block.cost_s
            self._cost_nbytes += block.nbytes
        shadows = self._shadows
        row = None
        if block.key in self._expected:
            del self._expected[block.key]
            if shadows.events:
                self._play()
            if self._num_admitted:
                self._num_admitted -= 1
            row = shadows.rows_by_key.get(block.key)
        if row is None:
            if shadows.is_due:
                self._flush()
            shadows.run(block.parent, block.depth, (block.key,), ends_partial=block.num_tokens > 0)
            row = shadows.rows_by_key[block.key]
            cells, place = shadows.cells, row * at.NUM_COLUMNS
            block.hits = cells[place + at.HITS] + 1 if cells[place + at.VISIT] >= 0 else 0
        else:
            cells, place = shadows.cells, row * at.NUM_COLUMNS
            block.hits = cells[place + at.HITS]
        cells[place + at.LIVE] = 1
        if block.cost_s > 0 or block.replicas or block.in_slower_tier or cells[place + at.VALUE]:
            shadows.set_value(row, self._value_steps(block))
        self._blocks[row] = block
        block.state = row

    def hit(self, block: Resident, use: Use) -> None:
        if use is not self._use:
            self._begin(block.parent, use)
        row = block.state
        if use.stores:
            self._shadows.events.append(row << 3 | at.TOUCH)  # type: ignore[operator]
        else:
            block.hits += 1
            self._shadows.events.append(row << 3)  # type: ignore[operator]

    def offer(self, block: Resident) -> None:
        row = _row_of(block)
        shadows = self._shadows
        cells, place = shadows.cells, row * at.NUM_COLUMNS
        cells[place + at.OFFERED] = 1
        if block.cost_s > 0 or block.replicas or block.in_slower_tier or cells[place + at.VALUE]:
            shadows.set_value(row, self._value_steps(block))
        if not cells[place + at.IN] & shadows.followed_bit:
            # The parent of an evicted block was used as long ago as that one.
            self._unwanted.appendleft(row)
            if len(self._unwanted) > 2 * len(self._blocks) + 256:
                self._unwanted = deque(row for row in dict.fromkeys(self._unwanted) if self._is_unwanted(row))
        elif self._vacant >= self._num_passed and cells[place + at.VISIT] <= self._order[self._vacant][1]:
            # Likewise: it is the next victim in place of its child.
            self._order[self._vacant] = row, cells[place + at.VISIT]
            self._vacant = -1

    def pop(self, now_ns: int, may_take: Callable[[Resident], bool]) -> Resident | None:
        self._flush()
        num_blocks = len(self._blocks) + max(0, self._num_admitted - 1)
        self._num_pops += 1
        if num_blocks > self._peak_blocks or self._num_pops > self._max_pops:
            self._resize(num_blocks)
        shadows, unwanted = self._shadows, self._unwanted
        cells, bit = shadows.cells, shadows.followed_bit
        while unwanted:
            row = unwanted[0]
            place = row * at.NUM_COLUMNS
            if not cells[place + at.IN] & bit and cells[place + at.OFFERED] and cells[place + at.LIVE]:
                block = self._blocks[row]
                cells[place + at.OFFERED] = 0
                if may_take(block):
                    unwanted.popleft()
                    cells[place + at.LIVE] = 0
                    block.state = None
                    del self._blocks[row]
                    return block
            unwanted.popleft()
        for i in self._further_victims(now_ns):
            row = self._order[i][0]
            block = self._blocks[row]
            cells[row * at.NUM_COLUMNS + at.OFFERED] = 0
            if may_take(block):
                self._vacant = i
                self._forget(block)
                return block
        self._num_admitted -= self._num_admitted > 0  # the block that was to be stored is refused
        return None

    def next_victims(self, now_ns: int, count: int, may_take: Callable[[Resident], bool]) -> list[Resident]:
        self._flush()
        seen: dict[int, Resident] = {}

        def look(rows: Iterable[int]) -> bool:
            for row in rows:
                if len(seen) >= count:
                    return True
                if row not in seen and may_take(self._blocks[row]):
                    seen[row] = self._blocks[row]
            return len(seen) >= count

        def look_further() -> bool:
            return look(self._order[i][0] for i in self._ordered(now_ns))

        if not look(row for row in list(self._unwanted) if self._is_unwanted(row)) and not look_further():
            self._ordered_at = -1
            look_further()
        return list(seen.values())

    def remove(self, block: Resident) -> None:
        self._shadows.events.append(_row_of(block) << 3 | at.REMOVE)
        self._forget(block)

    def follow(self, expert: int) -> None:
        """Follow this expert until another one is better. Evicts nothing."""
        self._flush()
        self._shadows.follow(expert)
        self._find_unwanted()

    def _begin(self, parent: object, use: Use) -> None:
        """Begin the visit of a use, or resume that of the request whose blocks it stores."""
        self._use = use
        shadows = self._shadows
        known = 0
        if use.stores:
            self._flush()
            row = shadows.rows_by_key.get(parent if use.after is None else use.after)
            if row is not None:
                known = shadows.cells[row * at.NUM_COLUMNS + at.DEPTH] + 1
                # The visit is new if another request has used that block since, as happens to shared prefixes.
                if shadows.resume(row, use.request_blocks, known):
                    return
        elif shadows.is_due:
            self._flush()
        shadows.learn(use.now_ns)
        shadows.begin(use.now_ns, use.request_blocks, known)

    def _flush(self) -> None:
        """Play the collected uses, if there are any."""
        if self._shadows.events:
            self._play()

    def _play(self) -> None:
        """Play the collected uses, and choose the expert to follow."""
        shadows = self._shadows
        left = shadows.flush()
        if left is None or (not self._is_settled and shadows.choose()):
            self._find_unwanted()
        else:
            self._unwanted += left

    def _find_unwanted(self) -> None:
        self._unwanted = deque(self._shadows.unwanted())
        self._ordered_at = -1

    def _resize(self, num_blocks: int) -> None:
        """Adapt the capacity in blocks to that of the tier, which is full: other partitions may take and free room.

        It grows at once, and shrinks to the most blocks that the tier had during half a capacity of evictions.
        """
        shadows = self._shadows
        before = shadows.capacity
        self._peak_blocks = max(self._peak_blocks, num_blocks, 1)
        if self._num_pops > self._max_pops:
            shadows.capacity = self._peak_blocks
            # Puts that were admitted and failed are counted until here.
            self._peak_blocks = self._num_pops = self._num_admitted = 0
        elif before == UNBOUNDED or num_blocks > before:
            shadows.capacity = self._peak_blocks
        self._max_pops = shadows.capacity // 2 + 256
        if shadows.capacity < before:
            self._play()

    def _is_unwanted(self, row: int) -> bool:
        shadows, place = self._shadows, row * at.NUM_COLUMNS
        cells = shadows.cells
        return bool(
            cells[place + at.OFFERED] and cells[place + at.LIVE] and not cells[place + at.IN] & shadows.followed_bit
        )

    def _further_victims(self, now_ns: int) -> Iterator[int]:
        """Yield the places in `_order` of offered rows, as the followed expert would evict them, each at its current
        value.

        Needed if the tier evicts before its uses fill the experts' caches.
        """
        shadows = self._shadows
        is_renewed = False
        while True:
            for i in self._ordered(now_ns):
                row = self._order[i][0]
                steps = self._value_steps(self._blocks[row])
                if steps != shadows.cells[row * at.NUM_COLUMNS + at.VALUE]:
                    shadows.set_value(row, steps)
                    self._ordered_at = -1
                    break
                yield i
            else:
                if is_renewed:
                    return
                self._ordered_at, is_renewed = -1, True  # rows may have been offered since it was made

    def _ordered(self, now_ns: int) -> Iterator[int]:
        """Yield the places in `_order`, which is kept for some uses, of offered rows that were not used since."""
        shadows = self._shadows
        num_uses = shadows.counters[at.NUM_USES]
        if self._ordered_at < 0 or num_uses - self._ordered_at > shadows.capacity // 8:
            cells = shadows.cells
            self._order = [(row, cells[row * at.NUM_COLUMNS + at.VISIT]) for row in shadows.victims(now_ns)]
            self._ordered_at, self._num_passed, self._vacant = num_uses, 0, -1
        for i in range(self._num_passed, len(self._order)):
            row, visit = self._order[i]
            place = row * at.NUM_COLUMNS
            cells = shadows.cells
            if cells[place + at.LIVE] and cells[place + at.OFFERED] and cells[place + at.VISIT] == visit:
                yield i
            elif i == self._num_passed:  # so that evicting all takes linear time
                self._num_passed += 1

    def _forget(self, block: Resident) -> None:
        row = _row_of(block)
        cells, place = self._shadows.cells, row * at.NUM_COLUMNS
        cells[place + at.LIVE] = cells[place + at.OFFERED] = 0
        block.state = None
        del self._blocks[row]

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


def _row_of(block: Resident) -> int:
    row = block.state
    assert isinstance(row, int), "the block was not inserted, or was removed"
    return row

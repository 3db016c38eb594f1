"""Shadow caches of the experts: rows of known blocks, the model, and the choice of the expert that the tier follows.

Keys are mapped to rows of the arrays of `shadow_layout`; uses are collected as events and played together. Rows are
forgotten some capacities of uses after their last one, so memory is bounded by the capacity.

An expert is chosen by its hits, weighted by the saving of each, with a half-life of many capacities of uses: the aim is
to be no worse than the best expert over a whole workload. Another expert is followed once its lead exceeds a share of
the blocks of its cache that the tier lacks, since these are what a switch may cost.
"""

from collections.abc import Sequence

import numpy as np

from kvpool.policy.eviction import shadow_layout as at
from kvpool.policy.eviction.reuse import MAX_RECORDS, NUM_AGES, NUM_FACTORS, RECORD_FIELDS, ReuseModel, place_of_ages
from kvpool.policy.eviction.shadow_kernels import shadow_kernel

UNBOUNDED = 2**40  # capacity before the first eviction
_HALF_LIFE_CAPACITIES = 32
_LACKING_SHARE = 0.1
_MIN_LEAD = 16.0
_FLUSH_AT = 1024


class Shadows:
    """Arrays of the experts' shadow caches.

    `cells` is a flat view of the rows, `rows_by_key` maps the keys, and `events` collects what `flush` plays.
    """

    def __init__(self) -> None:
        self.head = np.zeros(at.HEAD, np.int64)
        self.counters = self.head.data
        self.model = np.zeros(at.MODEL)
        self.rows = np.zeros((0, at.NUM_COLUMNS), np.int64)
        self.rows_by_key: dict[object, int] = {}
        self.events: list[int] = []
        self.followed_bit = 0
        self._keys: list[object] = []
        self._free: list[int] = []
        self._recent_hits = [0.0] * at.NUM_EXPERTS
        self._num_fitted = self._num_judged = self.num_switches = 0
        self._play = shadow_kernel()
        self._scores = self.model[at.SCORES : at.SCORES + at.NUM_EXPERTS]
        self._records = self.head[at.RECORDS :].reshape(MAX_RECORDS, RECORD_FIELDS)
        self._reuse = ReuseModel(self.model[:NUM_FACTORS], self.model[at.INDEX : at.SCORES])
        head = self.head
        head[at.CAPACITY], head[at.RANDOM], head[at.CURRENT_VISIT] = UNBOUNDED, 2463534242, -1
        head[at.LISTS : at.LISTS + 3 * at.NUM_LISTS] = [-1, -1, 0] * at.NUM_LISTS
        head[at.POOL : at.POOL + at.POOL_SIZE] = -1
        self.follow(at.MODEL_POLICY)
        self._grow(64)

    @property
    def capacity(self) -> int:
        """Capacity of every expert's cache in blocks."""
        return self.counters[at.CAPACITY]

    @capacity.setter
    def capacity(self, blocks: int) -> None:
        self.counters[at.CAPACITY] = blocks

    @property
    def followed(self) -> int:
        """Expert that the tier follows."""
        return self.counters[at.FOLLOWED]

    def follow(self, expert: int) -> None:
        """Follow this expert from now on; `flush` reports the rows that leave its cache."""
        self.counters[at.FOLLOWED] = expert
        self.followed_bit = 1 << expert

    def run(self, parent: object, depth: int, keys: Sequence[object], *, ends_partial: bool) -> None:
        """Add uses of blocks that follow `parent` in a row, the first at `depth`; new keys get rows."""
        rows_by_key, events = self.rows_by_key, self.events
        events += (at.RUN, rows_by_key.get(parent, -1), depth)
        for key in keys:
            row = rows_by_key.get(key)
            if row is None:
                if not self._free:
                    self._grow(len(self.rows))
                row = rows_by_key[key] = self._free.pop()
                self._keys[row] = key
            events.append(row << 3 | at.NEXT)
        if ends_partial:
            events[-1] += at.LAST_PARTIAL - at.NEXT

    def set_value(self, row: int, steps: int) -> None:
        """Set the value of the row's block, in half octaves."""
        cells, place = self.cells, row * at.NUM_COLUMNS
        cells[place + at.VALUE] = steps
        leaf = cells[place + at.LEAF_PLACE]
        if leaf >= 0:
            cells[leaf * at.NUM_COLUMNS + at.LEAF_VALUE] = steps

    def begin(self, now_ns: int, request_blocks: int, known_blocks: int) -> None:
        """Begin a visit: the following uses are of one request, whose first `known_blocks` blocks were used before."""
        self.events += (at.BEGIN, now_ns, request_blocks, known_blocks)

    def resume(self, row: int, request_blocks: int, depth: int) -> bool:
        """Resume the visit that used the row last, if the row is the last that it used and ends `depth` blocks.

        All events must have been played.
        """
        serial = self.cells[row * at.NUM_COLUMNS + at.VISIT]
        if serial < 0 or serial <= self.counters[at.NUM_VISITS] - at.VISIT_RING:
            return False
        place = at.VISITS + serial % at.VISIT_RING * at.VISIT_FIELDS
        if self.counters[place + at.V_REACHED] != depth:
            return False
        self.events += (at.RESUME, serial, request_blocks)
        return True

    def flush(self) -> Sequence[int] | None:
        """Play the events. Returns the live rows that left the followed cache; None if they are too many to report."""
        events, counters = self.events, self.counters
        left: list[int] = []
        complete = True
        # Events with operands are among the first (`is_due`), so no part separates them.
        for start in range(0, max(1, len(events)), at.MAX_EVENTS):
            part = events[start : start + at.MAX_EVENTS]
            self.head[at.EVENTS : at.EVENTS + len(part)] = part
            counters[at.NUM_EVENTS] = len(part)
            counters[at.NUM_LEFT] = counters[at.NUM_FREED] = 0
            self._play(self.rows, self.head, self.model)
            complete &= counters[at.NUM_LEFT] <= at.MAX_LEFT
            left += counters[at.LEFT : at.LEFT + min(counters[at.NUM_LEFT], at.MAX_LEFT)]
            for row in counters[at.FREED : at.FREED + counters[at.NUM_FREED]]:
                del self.rows_by_key[self._keys[row]]
                self._keys[row] = None
                self._free.append(row)
        events.clear()
        return left if complete else None

    @property
    def is_due(self) -> bool:
        """True if the events must be played before another visit or run begins."""
        return len(self.events) >= _FLUSH_AT

    def learn(self, now_ns: int) -> None:
        """Refit the model if there are enough new records. Takes milliseconds, at growing intervals."""
        num = self.counters[at.NUM_RECORDS]
        if num - self._num_fitted >= max(64, min(1024, self._num_fitted // 6)):
            self._num_fitted = num
            self._reuse.fit(self._records[: min(num, MAX_RECORDS)], now_ns)

    def choose(self) -> bool:
        """Follow another expert if it has been better by more than a switch costs. Returns True if it switched."""
        num_uses, capacity = self.counters[at.NUM_USES], self.capacity
        passed = num_uses - self._num_judged
        if passed < max(64, capacity // 16) or capacity == UNBOUNDED:
            return False
        self._num_judged = num_uses
        decay = 0.5 ** (passed / (_HALF_LIFE_CAPACITIES * capacity))
        recent = self._recent_hits
        for expert in range(at.NUM_EXPERTS):
            recent[expert] = decay * recent[expert] + float(self._scores[expert])
        self._scores[:] = 0
        best = max(range(at.NUM_EXPERTS), key=lambda expert: (recent[expert], expert))
        lead = recent[best] - recent[self.followed]
        if lead <= _MIN_LEAD:
            return False
        holds = (self.rows[:, at.IN] >> best) & 1
        lacking = int(np.count_nonzero(holds > self.rows[:, at.LIVE]))
        if lead <= _MIN_LEAD + _LACKING_SHARE * lacking:
            return False
        self.follow(best)
        self.num_switches += 1
        return True

    def unwanted(self) -> list[int]:
        """Return the live rows that the followed expert does not hold, least recent first."""
        rows = self.rows
        return self._in_order(np.nonzero(rows[:, at.LIVE] * ((rows[:, at.IN] & self.followed_bit) == 0))[0], None)

    def victims(self, now_ns: int) -> list[int]:
        """Return all live rows that are offered, in the order in which the followed expert would evict them."""
        rows = self.rows
        offered = np.nonzero(rows[:, at.LIVE] & rows[:, at.OFFERED])[0]
        if self.followed == at.LRU:
            return self._in_order(offered, None)
        if self.followed == at.ARC:
            once = self.counters[at.LISTS + 3 * at.ONCE + 2]
            first = at.ONCE if once > self.counters[at.ARC_TARGET] else at.AGAIN
            return self._in_order(offered, rows[offered, at.ARC_LIST] != first)
        places = place_of_ages((now_ns - rows[offered, at.USED_NS]) * 1e-9)
        index = self.model[at.INDEX + rows[offered, at.CLASS] * NUM_AGES + places]
        return self._in_order(offered, index * 2.0 ** (rows[offered, at.VALUE] / 2))

    def _in_order(self, rows: np.ndarray, rank: np.ndarray | None) -> list[int]:
        keys = (-self.rows[rows, at.DEPTH], self.rows[rows, at.VISIT])
        order: list[int] = rows[np.lexsort(keys if rank is None else (*keys, rank))].tolist()
        return order

    def _grow(self, count: int) -> None:
        size = len(self.rows)
        rows = np.zeros((size + count, at.NUM_COLUMNS), np.int64)
        rows[:size] = self.rows
        for column in (at.VISIT, at.RECORD, at.LEAF_PLACE):
            rows[size:, column] = -1
        self.rows = rows
        self.cells = rows.reshape(-1).data
        self._free += range(size + count - 1, size - 1, -1)
        self._keys += [None] * count

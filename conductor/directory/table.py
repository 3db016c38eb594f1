"""Table of all blocks of a directory as arrays: 64-bit key -> holders and tiers. Uses node numbers, not nodes.

Designed for ten million blocks on a thousand nodes: twelve bytes per slot for a block with one holder, additional rows
for several holders, and eight bytes per place of the hash index (`layout.py`). It grows by one segment at a time and
removal leaves no tombstones, so the cost of operations does not depend on the number of blocks.
"""

from collections.abc import Set
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from conductor.directory.layout import (
    CURSOR,
    DENSE,
    END,
    FREE,
    LIVE,
    MAX_FILL,
    NEED,
    NEED_ROWS,
    NEED_SLOTS,
    ROW_CLASSES,
    SEGMENT,
    SHIFT,
    USED,
    GrowingArray,
    Table,
    addresses_of,
)
from kvpool.events import Tier

if TYPE_CHECKING:
    from conductor.directory.kernels import DirectoryKernels

__all__ = ["DirectoryTable", "Replicas", "code_of", "warm_up"]

_DEPTH = 4  # of `top` at the start
_NUMBERS = 64
_ROW_WORDS = 4096
_SLOTS = 1 << 15
_SPLITS_AT_MOST = 31  # maximum common hash bits of a segment's keys; reached only with a broken hash


class Replicas(NamedTuple):
    """Holders of blocks, one entry per block and holder."""

    keys: NDArray[np.uint64]  # folded with their namespace
    codes: NDArray[np.uint32]  # node number * 2, plus 1 if on SSD only


def code_of(number: int, tier: Tier) -> int:
    """Return the code of a replica."""
    return number * 2 + (tier is Tier.SSD)


class DirectoryTable:
    """Hash table of blocks. Node numbers start at 1. `fold`: value with which the keys of a namespace are XORed."""

    def __init__(self, seed: int) -> None:
        """`seed` must be unpredictable to clients, so that they cannot cause collisions."""
        self._run = _kernels()
        self._seed = seed
        segments = 1 << _DEPTH
        self._num_segments = segments
        self._places = GrowingArray(np.uint32, 2 * segments * SEGMENT * 2)
        self._keys = GrowingArray(np.uint64, _SLOTS)
        self._held = GrowingArray(np.uint32, _SLOTS)
        self._rows = GrowingArray(np.uint32, _ROW_WORDS)
        meta = np.full(FREE + ROW_CLASSES, -1, np.int64)
        meta[SHIFT] = 64 - _DEPTH
        meta[[USED, END, CURSOR, LIVE]] = 0
        self._t = Table(
            self._places.array,
            np.zeros(2 * segments, np.int32),
            np.full(2 * segments, _DEPTH, np.int32),
            np.arange(segments, dtype=np.int32),
            self._keys.array,
            self._held.array,
            self._rows.array,
            meta,
            np.zeros((_NUMBERS, 2), np.int64),
            np.zeros(_NUMBERS, np.uint64),
            *(np.zeros(0, np.uint32), np.zeros((0, 2), np.int64), np.zeros(0, np.int64)),
        )
        self._size_for_numbers()

    @property
    def num_parts(self) -> int:
        """Number of parts of 2,048 slots; new parts are added at the end."""
        return -(-int(self._t.meta[END]) // SEGMENT)

    @property
    def num_keys(self) -> int:
        """Number of blocks with at least one holder."""
        return int(self._t.meta[LIVE])

    def num_blocks(self, number: int) -> tuple[int, int]:
        """Return the numbers of blocks that a node holds: (in DRAM, on SSD only)."""
        in_dram, on_ssd = self._t.counts[number].tolist()
        return in_dram, on_ssd

    def contents_sum(self, number: int) -> int:
        """Return the node's contents checksum; see `kvpool.events`."""
        return int(self._t.sums[number])

    def reserve_numbers(self, count: int) -> None:
        """Make node numbers below `count` usable."""
        have = len(self._t.counts)
        if count > have:
            want = max(count, 2 * have)
            counts, sums = np.zeros((want, 2), np.int64), np.zeros(want, np.uint64)
            counts[:have], sums[:have] = self._t.counts, self._t.sums
            self._set(counts=counts, sums=sums)
            self._size_for_numbers()

    def store(self, keys: NDArray[np.uint64], codes: NDArray[np.uint32], fold: int = 0) -> None:
        """Add holders `codes` to blocks `keys`; the tier of existing holders is updated."""
        done = 0
        while (done := self._run.store(self._at, keys, codes, fold, self._seed, done)) < len(keys):
            self._make_room()

    def remove(self, number: int, keys: NDArray[np.uint64], fold: int) -> None:
        """Remove node `number` as holder of `keys`."""
        done = 0
        while (done := self._run.remove(self._at, keys, number, fold, self._seed, done)) < len(keys):
            self._make_room()

    def match(self, keys: NDArray[np.uint64], fold: int, places: NDArray[np.int64], held: NDArray[np.int64]) -> int:
        """Write to `held` [2, ...] the number of leading `keys` that each node holds, and of these on SSD only.

        `places` [numbers] maps each number in use to an index in `held`; nodes with -1, and nodes that do not hold the
        first key, are left out. Returns the longest match.
        """
        longest: int = self._run.match(self._at, keys, fold, self._seed, places, held)
        return longest

    def match_windows(
        self, keys: NDArray[np.uint64], fold: int, places: NDArray[np.int64], need: int, held: NDArray[np.int64]
    ) -> int:
        """Shorten each node's run in `held`, as `match` wrote it, to where it holds the `need` keys before the end.

        `fold` is that of the namespace of windowed blocks. Returns the longest run.
        """
        longest: int = _window_kernel()(self._at, keys, fold, self._seed, places, need, held)
        return longest

    def purge(self, numbers: Set[int], begin: int, count: int) -> int:
        """Remove nodes `numbers` from parts [begin, begin + count). Returns the first part not done."""
        end = min(begin + count, self.num_parts)
        slot, last, dying = begin * SEGMENT, self._slot(end), self._flags(numbers)
        while (slot := self._run.purge(self._at, slot, last, dying, self._seed)) < last:
            self._make_room()
        return end

    def extract(self, numbers: Set[int], begin: int, count: int) -> Replicas:
        """Return the replicas of nodes `numbers` in parts [begin, begin + count)."""
        end, wanted = self._slot(begin + count), self._flags(numbers)
        room = max(1, count) * SEGMENT
        while True:
            replicas = Replicas(np.empty(room, np.uint64), np.empty(room, np.uint32))
            found = self._run.extract(self._at, begin * SEGMENT, end, wanted, *replicas)
            if found <= room:
                return Replicas(replicas.keys[:found], replicas.codes[:found])
            room = found

    def validate(self) -> list[str]:
        """Describe inconsistencies; empty if there are none. Reads the whole table: 0.2 s for ten million blocks."""
        problems = []
        numbers = set(range(len(self._t.counts)))
        counted = np.zeros(2 * len(numbers), np.int64)
        for part in range(self.num_parts):
            counted += np.bincount(self.extract(numbers, part, 1).codes, minlength=len(counted))
        for number in np.flatnonzero((self._t.counts != counted.reshape(-1, 2)).any(axis=1)).tolist():
            have, want = counted[2 * number : 2 * number + 2].tolist(), self._t.counts[number].tolist()
            problems.append(f"node number {number} holds {have} blocks by tier, but its count is {want}")
        refs = self._t.places[1 : self._num_segments * SEGMENT * 2 : 2]
        if np.any(np.count_nonzero(refs.reshape(-1, SEGMENT), axis=1) != self._t.fill[: self._num_segments]):
            problems.append("the number of keys of a segment differs from its count")
        found = np.zeros(len(self._t.held), bool)
        found[refs[refs > 0] - 1] = True
        if not np.array_equal(found, self._t.held > 0) or np.count_nonzero(refs) != self.num_keys:
            problems.append("the slots in use are not exactly those that places refer to, once each")
        free = 0
        for row_class in range(ROW_CLASSES):
            head = int(self._t.meta[FREE + row_class])
            while head >= 0:
                free += 4 << row_class
                head = int(self._t.rows[head * 4]) - 1
        in_use = self._row_words()
        if free + in_use != self._t.meta[USED]:
            problems.append(f"rows: {free} free words and {in_use} in use are not {self._t.meta[USED]} in total")
        return problems

    def _slot(self, part: int) -> int:
        """Return the first slot of a part, or the end of the slots if the part does not exist."""
        return min(part * SEGMENT, int(self._t.meta[END]))

    def _row_words(self) -> int:
        """Return the number of words of rows in use."""
        held = self._t.held[: int(self._t.meta[END])]
        rows = held[held >> 31 == 1].astype(np.int64) & 0x7FFFFFFF
        return int((4 << (self._t.rows[rows * 4].astype(np.int64) >> 24 & 127)).sum())

    def _flags(self, numbers: Set[int]) -> NDArray[np.uint8]:
        flags = np.zeros(len(self._t.counts), np.uint8)
        flags[list(numbers)] = 1
        return flags

    def _size_for_numbers(self) -> None:
        """Resize the arrays that depend on the number of node numbers."""
        count = len(self._t.counts)
        words = -(-count // 32)
        row_class = 5
        while ((4 << row_class) - 2) // 2 < words:
            row_class += 1
        self._t.meta[DENSE] = row_class
        self._set(
            alive=np.zeros((4 << row_class) // 2, np.uint32),
            state=np.zeros((count, 2), np.int64),
            found=np.zeros(count, np.int64),
        )

    def _set(self, **arrays: NDArray[Any]) -> None:
        """Replace these arrays."""
        self._t = self._t._replace(**arrays)
        self._at = addresses_of(self._t)

    def _make_room(self) -> None:
        """Grow what meta[NEED] names: a full segment, rows or slots."""
        need = int(self._t.meta[NEED])
        if need == NEED_SLOTS:
            self._grow_slots()
            return
        if need == NEED_ROWS:
            words = len(self._t.rows)
            self._set(rows=np.zeros(0, np.uint32))
            try:
                self._rows.grow(2 * words + (16 << int(self._t.meta[DENSE])))
            finally:
                self._set(rows=self._rows.array)
            return
        depth = int(self._t.depth[need])
        if depth == 64 - int(self._t.meta[SHIFT]):
            if depth >= _SPLITS_AT_MOST:
                raise RuntimeError(f"{MAX_FILL} keys have {depth} bits of their hash in common")
            self._set(top=np.repeat(self._t.top, 2))
            self._t.meta[SHIFT] -= 1
        if self._num_segments == len(self._t.fill):
            self._grow_segments()
        scratch = np.empty(SEGMENT * 2, np.uint32)
        self._run.split(self._at, need, self._num_segments, scratch)
        self._num_segments += 1

    def _grow_slots(self) -> None:
        want = 2 * len(self._t.held)
        self._set(keys=np.zeros(0, np.uint64), held=np.zeros(0, np.uint32))
        try:
            self._keys.grow(want)
            self._held.grow(want)
        finally:
            # If only one could grow, the smaller size counts.
            slots = min(len(self._keys.array), len(self._held.array))
            self._set(keys=self._keys.array[:slots], held=self._held.array[:slots])

    def _grow_segments(self) -> None:
        want = 2 * self._num_segments
        fill, depth = np.zeros(want, np.int32), np.zeros(want, np.int32)
        fill[: self._num_segments], depth[: self._num_segments] = self._t.fill, self._t.depth
        self._set(places=np.zeros(0, np.uint32))
        try:
            self._places.grow(want * SEGMENT * 2)
        finally:
            self._set(places=self._places.array)
        self._set(fill=fill, depth=depth)


def warm_up() -> None:
    """Compile the kernels, or load them from the cache. The first time takes seconds, too long during an event."""
    _kernels()
    _window_kernel()


def _kernels() -> "DirectoryKernels":
    # Imported late: numba takes half a second to import, and not every process needs it.
    from conductor.directory.kernels import directory_kernels

    return directory_kernels()


def _window_kernel() -> Any:
    from conductor.directory.window_kernels import window_kernel

    return window_kernel()

"""All blocks of a directory as arrays: 64-bit key -> who holds it, in which tier. It knows node numbers, not nodes.

Built for ten million blocks on a thousand nodes: twelve bytes a place for a block with one holder, rows beside for more
(`kvpool.directory_kernels`). It grows by a segment at a time, and what leaves it leaves no trace, so no operation takes
longer the more there is or was.
"""

from collections.abc import Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.directory_layout import DENSE, FREE, MAX_FILL, NEED, ROW_CLASSES, SEGMENT, SHIFT, USED, Table
from kvpool.directory_memory import GrowingArray
from kvpool.tiers import Tier

if TYPE_CHECKING:
    from kvpool.directory_kernels import Kernels

__all__ = ["DirectoryTable", "Replicas", "code_of", "warm_up"]

_DEPTH = 4  # of `top` at the start
_NUMBERS = 64
_ROW_WORDS = 4096
_SPLITS_AT_MOST = 48  # bits in which keys of a full segment can be equal: unreachable but for a broken hash


class Replicas(NamedTuple):
    """What some blocks' holders are, one entry per block and holder."""

    keys: NDArray[np.uint64]  # folded with their namespace
    codes: NDArray[np.uint32]  # node number * 2, plus 1 where on SSD only


def code_of(number: int, tier: Tier) -> int:
    """How a replica is written down."""
    return number * 2 + (tier is Tier.SSD)


class DirectoryTable:
    """`fold` is what keys of one namespace are XORed with; node numbers begin at 1. `seed` should be nobody's guess."""

    def __init__(self, seed: int) -> None:
        self._run = _kernels()
        self._seed = seed
        segments = 1 << _DEPTH
        self._num_segments = segments
        self._places = GrowingArray(np.uint32, 2 * segments * SEGMENT * 3)
        self._rows = GrowingArray(np.uint32, _ROW_WORDS)
        meta = np.full(FREE + ROW_CLASSES, -1, np.int64)
        meta[SHIFT], meta[USED] = 64 - _DEPTH, 0
        self._t = Table(
            self._places.array,
            np.zeros(2 * segments, np.int32),
            np.full(2 * segments, _DEPTH, np.int32),
            np.arange(segments, dtype=np.int32),
            self._rows.array,
            meta,
            np.zeros((_NUMBERS, 2), np.int64),
            np.zeros(_NUMBERS, np.uint64),
        )
        self._size_for_numbers()

    @property
    def num_segments(self) -> int:
        """Segments are numbered from 0; a new one gets the next number."""
        return self._num_segments

    @property
    def num_keys(self) -> int:
        """Blocks that somebody holds."""
        return int(self._t.fill.sum())

    def num_blocks(self, number: int) -> tuple[int, int]:
        """Blocks that a node holds: (in DRAM, on SSD only)."""
        in_dram, on_ssd = self._t.counts[number].tolist()
        return in_dram, on_ssd

    def contents_sum(self, number: int) -> int:
        """See `kvpool.contents`."""
        return int(self._t.sums[number])

    def reserve_numbers(self, count: int) -> None:
        """Node numbers below `count` may be used."""
        have = len(self._t.counts)
        if count > have:
            want = max(count, 2 * have)
            counts, sums = np.zeros((want, 2), np.int64), np.zeros(want, np.uint64)
            counts[:have], sums[:have] = self._t.counts, self._t.sums
            self._t = self._t._replace(counts=counts, sums=sums)
            self._size_for_numbers()

    def store(self, keys: NDArray[np.uint64], codes: NDArray[np.uint32], fold: int = 0) -> None:
        """Blocks `keys` have holders `codes` too; a holder known for another tier moves."""
        done = 0
        while (done := self._run.store(self._t, keys, codes, fold, self._seed, done)) < len(keys):
            self._make_room()

    def remove(self, number: int, keys: NDArray[np.uint64], fold: int) -> None:
        """Node `number` holds `keys` no more."""
        done = 0
        while (done := self._run.remove(self._t, keys, number, fold, self._seed, done)) < len(keys):
            self._make_room()

    def match(self, keys: NDArray[np.uint64], fold: int) -> NDArray[np.int64]:
        """A row per node that has the first: number, how many leading `keys` it holds, of these on SSD only.

        Good until the next match.
        """
        found = self._run.match(self._t, keys, fold, self._seed, self._alive, self._state, self._found)
        return self._found[:found]

    def purge(self, numbers: Set[int], begin: int, count: int) -> int:
        """Nodes `numbers` hold nothing in segments [begin, begin + count). Returns the first one not done."""
        end = min(begin + count, self._num_segments)
        dying = self._flags(numbers)
        while (begin := self._run.purge(self._t, begin, end, dying, self._seed)) < end:
            self._make_room()
        return begin

    def extract(self, numbers: Set[int], begin: int, count: int) -> Replicas:
        """What nodes `numbers` hold of the blocks in segments [begin, begin + count)."""
        end, wanted = min(begin + count, self._num_segments), self._flags(numbers)
        room = max(1, count) * SEGMENT
        while True:
            replicas = Replicas(np.empty(room, np.uint64), np.empty(room, np.uint32))
            found = self._run.extract(self._t, begin, end, wanted, *replicas)
            if found <= room:
                return Replicas(replicas.keys[:found], replicas.codes[:found])
            room = found

    def validate(self) -> list[str]:
        """What does not fit together, in words; empty when all does. Reads everything: 0.2 s for ten million blocks."""
        problems = []
        numbers = set(range(len(self._t.counts)))
        counted = np.zeros(2 * len(numbers), np.int64)
        for segment in range(self._num_segments):
            counted += np.bincount(self.extract(numbers, segment, 1).codes, minlength=len(counted))
        for number in np.flatnonzero((self._t.counts != counted.reshape(-1, 2)).any(axis=1)).tolist():
            have, want = counted[2 * number : 2 * number + 2].tolist(), self._t.counts[number].tolist()
            problems.append(f"node number {number} holds {have} blocks by tier, {want} are counted")
        held = self._held().reshape(-1, SEGMENT)
        if np.any(np.count_nonzero(held, axis=1) != self._t.fill[: len(held)]):
            problems.append("a segment holds more or fewer keys than are counted")
        free = 0
        for row_class in range(ROW_CLASSES):
            head = int(self._t.meta[FREE + row_class])
            while head >= 0:
                free += 4 << row_class
                head = int(self._t.rows[head * 4]) - 1
        in_use = self._row_words()
        if free + in_use != self._t.meta[USED]:
            problems.append(f"rows: {free} words free and {in_use} in use of {self._t.meta[USED]}")
        return problems

    def _held(self) -> NDArray[np.uint32]:
        """What each place is mapped to."""
        return self._t.places[2 : self._num_segments * SEGMENT * 3 : 3]

    def _row_words(self) -> int:
        """Words of rows that places refer to."""
        held = self._held()
        rows = held[held >> 31 == 1].astype(np.int64) & 0x7FFFFFFF
        return int((4 << (self._t.rows[rows * 4].astype(np.int64) >> 24 & 127)).sum())

    def _flags(self, numbers: Set[int]) -> NDArray[np.uint8]:
        flags = np.zeros(len(self._t.counts), np.uint8)
        flags[list(numbers)] = 1
        return flags

    def _size_for_numbers(self) -> None:
        """What depends on how many node numbers there are."""
        count = len(self._t.counts)
        words = -(-count // 32)
        row_class = 5
        while ((4 << row_class) - 2) // 2 < words:
            row_class += 1
        self._t.meta[DENSE] = row_class
        self._alive = np.zeros((4 << row_class) // 2, np.uint32)
        self._state = np.zeros((count, 2), np.int64)
        self._found = np.zeros((count, 3), np.int64)

    def _make_room(self) -> None:
        """For what a kernel stopped at: a full segment, or too few rows."""
        need = int(self._t.meta[NEED])
        if need < 0:
            words = len(self._t.rows)
            self._t = self._t._replace(rows=np.zeros(0, np.uint32))
            try:
                self._rows.grow(2 * words + (16 << int(self._t.meta[DENSE])))
            finally:
                self._t = self._t._replace(rows=self._rows.array)
            return
        depth = int(self._t.depth[need])
        if depth == 64 - int(self._t.meta[SHIFT]):
            if depth >= _SPLITS_AT_MOST:
                raise RuntimeError(f"{MAX_FILL} keys agree in {depth} bits of their hash")
            self._t = self._t._replace(top=np.repeat(self._t.top, 2))
            self._t.meta[SHIFT] -= 1
        if self._num_segments == len(self._t.fill):
            self._grow_segments()
        scratch = np.empty(SEGMENT * 3, np.uint32)
        self._run.split(self._t, need, self._num_segments, self._seed, scratch)
        self._num_segments += 1

    def _grow_segments(self) -> None:
        want = 2 * self._num_segments
        fill, depth = np.zeros(want, np.int32), np.zeros(want, np.int32)
        fill[: self._num_segments], depth[: self._num_segments] = self._t.fill, self._t.depth
        self._t = self._t._replace(places=np.zeros(0, np.uint32))
        try:
            self._places.grow(want * SEGMENT * 3)
        finally:
            self._t = self._t._replace(places=self._places.array)
        self._t = self._t._replace(fill=fill, depth=depth)


def warm_up() -> None:
    """Compile what tables run on, or load it from the cache: seconds the first time, which no event should take."""
    _kernels()


def _kernels() -> "Kernels":
    # numba takes half a second to import, and a process that only computes addresses never needs it.
    from kvpool.directory_kernels import directory_kernels

    return directory_kernels()

"""Shrinking and growth of the arena: which copies leave the units above its usable part, and where they move. No I/O.

Slots are allocated from low addresses upwards, so the arena shrinks from above. Its eviction policy decides which
blocks leave, wherever they lie: their low slots are given to the blocks that stay and lie too high.

    resize ── no new slots above the limit
    vacate ── evict next victims, plan moves of high copies to free low slots; those copies are held
        (the shell: publish the evictions, copy the bytes, all in one step of its event loop)
    moved ─── the copies have their low slots, the high ones are free; publish again
    take_vacated ── free units above the limit, whose memory can be returned

Copies that are leased, read or written, and slots of puts, stay until that ends; `vacate` is repeated until nothing is
high. No copy leaves DRAM before its followers, as in every eviction; a move changes no chain.

A block that the SSD could keep is not evicted before it was written, unless the caller sets `may_lose`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kvpool.policy.records import BlockCopy
from kvpool.policy.store import BlockStore

_MAX_EVICTED = 256  # per call of `vacate`


@dataclass(frozen=True, slots=True, eq=False)
class SlotMove:
    """Move to execute: copy the bytes of a block from its present slots to others, where they differ."""

    copy: BlockCopy
    before: tuple[int, ...]  # per group, in the arena
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vacating:
    """Result of `Resizing.vacate`."""

    moves: tuple[SlotMove, ...]
    num_evicted: int
    num_unwritten: int  # copies that may be evicted once they are on SSD

    @property
    def is_progress(self) -> bool:
        """True if another call may find more to do."""
        return bool(self.moves or self.num_evicted)


class Resizing:
    """Usable part of the arena. `on_resize` is called with its size in bytes after every change."""

    def __init__(self, store: BlockStore, on_resize: Callable[[int], None]) -> None:
        self.num_moved = 0
        self._store = store
        self._slabs = store.dram.slabs
        self._on_resize = on_resize
        self._returned_from = self._slabs.num_units  # free units from here on were returned by `take_vacated`
        self._kept: list[range] = []  # units from there on that were not free then

    @property
    def usable_nbytes(self) -> int:
        """Size of the usable part."""
        return self._slabs.usable_nbytes

    @property
    def has_high_slots(self) -> bool:
        """True if slots are in use above the usable part."""
        return next(self._slabs.high_offsets(), None) is not None

    def resize(self, usable_nbytes: int) -> None:
        """Set the size of the usable part, in whole units, at least one and at most the arena's size."""
        units = max(1, min(usable_nbytes // self._slabs.unit_nbytes, self._slabs.num_units))
        if units != self._slabs.usable_units:
            self._slabs.resize(units)
            self._returned_from = max(self._returned_from, units)
            self._kept = [range(max(each.start, units), each.stop) for each in self._kept if each.stop > units]
            self._on_resize(self._slabs.usable_nbytes)

    def vacate(self, now_ns: int, max_nbytes: int, *, may_lose: bool) -> Vacating:
        """Evict copies and plan moves of up to `max_nbytes`, so that fewer slots above the usable part are in use.

        The caller must execute the moves and call `moved` before any other call to the core.
        """
        moves: list[SlotMove] = []
        without_slot: defaultdict[tuple[int, ...], dict[BlockCopy, None]] = defaultdict(dict)
        nbytes = num_without_slot = 0
        for offset in self._slabs.high_offsets():
            copy = self._store.dram.holders.get(offset)
            if copy is None or copy.holds or copy.gone or not copy.ready:
                continue
            after = self._store.dram.try_take_low(copy)
            if after is None:
                without_slot[copy.block.namespace.sizes[copy.tier]][copy] = None
                num_without_slot += 1
            else:
                copy.holds += 1
                nbytes += copy.nbytes
                moves.append(SlotMove(copy, copy.offsets, after))
            if nbytes >= max_nbytes or num_without_slot >= _MAX_EVICTED:
                break
        evicted, unwritten = self._evict(now_ns, without_slot, may_lose)
        self._store.log_changes()
        return Vacating(tuple(moves), evicted, unwritten)

    def moved(self, moves: tuple[SlotMove, ...]) -> None:
        """Record that the bytes of these moves were copied. The high slots are free from now on."""
        for move in moves:
            self._store.dram.move(move.copy, move.after)
            self._store.relocated(move.copy.block)
            self._store.release(move.copy)
        self.num_moved += len(moves)

    def take_vacated(self) -> list[range]:
        """Return the bytes above the usable part that became free since the last call."""
        slabs = self._slabs
        candidates = [range(slabs.usable_units, self._returned_from), *self._kept]
        self._returned_from = slabs.usable_units
        freed: list[range] = []
        self._kept = []
        for units in candidates:
            at = units.start
            for free in slabs.free_units(units):
                freed.append(range(free.start * slabs.unit_nbytes, free.stop * slabs.unit_nbytes))
                if at < free.start:
                    self._kept.append(range(at, free.start))
                at = free.stop
            if at < units.stop:
                self._kept.append(range(at, units.stop))
        return freed

    def _evict(
        self, now_ns: int, without_slot: Mapping[tuple[int, ...], Collection[BlockCopy]], may_lose: bool
    ) -> tuple[int, int]:
        """Evict as many next victims as there are copies without slots. Returns (evicted, not written yet)."""
        evicted = unwritten = 0
        for sizes, copies in without_slot.items():
            count = min(len(copies), _MAX_EVICTED)
            done, skipped = self._store.dram.evict_next(sizes, count, "shrunk", now_ns, may_lose)
            evicted += done
            unwritten += skipped
        return evicted, unwritten

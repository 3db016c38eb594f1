"""Holders of the engine's slots: reference counts, a prefix index over whole blocks, LRU reuse.

A slot is free, held (count > 0), cached (count 0, its content still indexed by chain key) or quarantined (not held, but
a remote writer may still write to it). Cached slots are reused for new blocks, the least recently released first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from worker.policy.window_slots import OutOfSlots, WindowHold, WindowSlots

IndexChange = Callable[[bytes], None]


class TakenSlots(NamedTuple):
    """Slots of one request in block order; the first `num_shared` are shared. `window`: of groups with windows.

    `num_known`: leading blocks of an earlier request, shared or not, because their slots with windows are gone.
    """

    slots: list[int]
    num_shared: int
    window: WindowHold | None = None
    num_known: int = 0


class SlotPool:
    """Slots 0..num_slots-1, each holding one block in every KV group without a window.

    `windows` has the slots of the groups with windows; without it, all groups are alike.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        windows: WindowSlots | None = None,
        on_indexed: IndexChange = lambda key: None,
        on_forgotten: IndexChange = lambda key: None,
        on_window_indexed: IndexChange = lambda key: None,
        on_window_forgotten: IndexChange = lambda key: None,
    ) -> None:
        """`on_indexed(key)` and `on_forgotten(key)` are called when a block enters the index and when it leaves it.

        `on_window_indexed(key)` and `on_window_forgotten(key)` are called when an indexed block has a slot in groups
        with windows, too, and when it has no more; the latter after `settle_windows`.
        """
        self.num_slots = num_slots
        self.windows = windows
        self._on_indexed = on_indexed
        self._on_forgotten = on_forgotten
        self._on_window_indexed = on_window_indexed
        self._on_window_forgotten = on_window_forgotten
        self._windowed: set[int] = set()  # indexed slots whose windows were announced
        self._free: deque[int] = deque(range(num_slots))
        self._count = [0] * num_slots
        self._key: list[bytes | None] = [None] * num_slots
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()

    @property
    def num_available(self) -> int:
        """Number of slots that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_slots - self.num_available - len(self._quarantined)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def num_sole(self, slots: Iterable[int]) -> int:
        """Return how many of these held slots nobody else holds."""
        return sum(self._count[slot] == 1 for slot in slots)

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the slots of the longest indexed leading run of `keys`, without holding them."""
        found: list[int] = []
        for key in keys:
            slot = self._index.get(key)
            if slot is None:
                break
            found.append(slot)
        return found

    def hold(self, slots: Sequence[int]) -> None:
        """Add a reference to each; a cached slot becomes held."""
        for slot in slots:
            if self._count[slot] == 0:
                del self._cached[slot]
            self._count[slot] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` empty slots, evicting cached blocks if necessary. Raises OutOfSlots, and then takes none."""
        if count > self.num_available:
            raise OutOfSlots(f"{count} slots requested, {self.num_available} of {self.num_slots} available")
        taken: list[int] = []
        while len(taken) < count:
            if self._free:
                slot = self._free.popleft()
            else:
                slot, _ = self._cached.popitem(last=False)
                self._forget(slot)
                if self.windows is not None:
                    self.windows.forget(slot)
            self._count[slot] = 1
            taken.append(slot)
        return taken

    def acquire(
        self,
        keys: Sequence[bytes],
        count: int,
        *,
        window_slots: int = 0,
        seen_from: int | None = None,
        keeps_windows: bool = False,
    ) -> TakenSlots:
        """Take `count` slots for a request whose leading blocks are `keys`.

        Indexed blocks are shared, the other slots are empty. Raises OutOfSlots, and then takes none: a waiting request
        holds nothing, so waiting requests cannot starve each other. In groups with windows, the request holds at most
        `window_slots` at once. Blocks are shared only as far as it can go on from them there: those from `seen_from` on
        must have slots; by default, the computation goes on after the shared ones. `keeps_windows`: see `WindowHold`.
        """
        if self.windows is None:
            shared = self.match(keys)
            self.hold(shared)
            try:
                return TakenSlots(shared + self.allocate(count - len(shared)), len(shared))
            except OutOfSlots:
                self.release(shared)
                raise
        self.windows.reserve(window_slots)
        window = WindowHold(self.windows, [], window_slots, keeps_all=keeps_windows)
        return self._acquire_windows(self.windows, window, keys, count, seen_from)

    def _acquire_windows(
        self, windows: WindowSlots, window: WindowHold, keys: Sequence[bytes], count: int, seen_from: int | None
    ) -> TakenSlots:
        slots = window.blocks
        try:
            shared = self.match(keys)
            num_known = len(shared)
            while True:  # until the engine's thread has taken none of the slots that were found
                del shared[windows.usable(shared, seen_from) :]
                slots[:] = shared
                first = windows.first_seen(len(shared)) if seen_from is None else seen_from
                if window.try_share(first, len(shared)):
                    break
            self.hold(shared)
            try:
                slots += self.allocate(count - len(shared))
            except OutOfSlots:
                self.release(shared)
                raise
        except OutOfSlots:
            window.close()
            raise
        return TakenSlots(slots, len(shared), window, num_known)

    def index(self, slot: int, key: bytes) -> None:
        """Index a held slot that now contains the whole block `key`. The first slot of a key keeps it."""
        if self._count[slot] == 0:
            raise ValueError(f"slot {slot} is not held")
        if key not in self._index and self._key[slot] is None:
            self._index[key] = slot
            self._key[slot] = key
            self._on_indexed(key)
        indexed = self._key[slot]
        if self.windows is None or indexed is None or slot in self._windowed or self.windows.slot_of[slot] < 0:
            return
        # The engine's thread may take the window's slot now. `settle_windows` runs after this, on the same thread.
        self._windowed.add(slot)
        self._on_window_indexed(indexed)

    def settle_windows(self) -> None:
        """Announce the indexed blocks that have lost their slots in groups with windows (`WindowSlots.watch`)."""
        for slot in self.windows.take_lost() if self.windows is not None else ():
            self._forget_window(slot)

    def forget(self, key: bytes) -> None:
        """Remove this block from the index; present holders keep its slot."""
        slot = self._index.get(key)
        if slot is not None:
            self._forget(slot)
            if self._count[slot] == 0:
                del self._cached[slot]
                self._add_free(slot)

    def release(self, slots: Sequence[int]) -> None:
        """Drop one reference to each slot, given in block order; the last blocks are reused first."""
        for slot in reversed(slots):
            if self._count[slot] <= 0:
                raise ValueError(f"slot {slot} is released but not held")
            self._count[slot] -= 1
            if self._count[slot] == 0:
                if self._key[slot] is None:
                    self._add_free(slot)
                else:
                    self._cached[slot] = None

    def quarantine(self, slots: Sequence[int]) -> None:
        """Drop the only reference and exclude the slots from reuse until `readmit`. Their content is forgotten."""
        for slot in slots:
            if self._count[slot] != 1:
                raise ValueError(f"slot {slot} must have one reference, got {self._count[slot]}")
            self._count[slot] = 0
            self._forget(slot)
            self._quarantined.add(slot)

    def readmit(self, slots: Sequence[int]) -> None:
        """Free quarantined slots after the remote writer is fenced off."""
        for slot in slots:
            self._quarantined.remove(slot)
            self._add_free(slot)

    def validate(self) -> list[str]:
        """Return inconsistencies; empty if there are none."""
        problems: list[str] = []
        free, cached = set(self._free), set(self._cached)
        held = {slot for slot in range(self.num_slots) if self._count[slot] > 0}
        if len(free) != len(self._free):
            problems.append("a slot is free twice")
        for name, one, two in (
            ("free and cached", free, cached),
            ("free and held", free, held),
            ("cached and held", cached, held),
            ("quarantined and another state", self._quarantined, free | cached | held),
        ):
            if one & two:
                problems.append(f"slots {sorted(one & two)[:5]} are {name}")
        if len(free) + len(cached) + len(held) + len(self._quarantined) != self.num_slots:
            problems.append("a slot is in no state")
        for key, slot in self._index.items():
            if self._key[slot] != key:
                problems.append(f"index points at slot {slot}, which holds another block")
        problems += [f"cached slot {slot} has no key" for slot in cached if self._key[slot] is None]
        return problems if self.windows is None else problems + self.windows.validate()

    def _add_free(self, slot: int) -> None:
        self._free.append(slot)
        if self.windows is not None:
            self.windows.forget(slot)

    def _forget(self, slot: int) -> None:
        key = self._key[slot]
        if key is not None:
            self._forget_window(slot)
            del self._index[key]
            self._key[slot] = None
            self._on_forgotten(key)

    def _forget_window(self, slot: int) -> None:
        key = self._key[slot]
        if key is not None and slot in self._windowed:
            self._windowed.remove(slot)
            self._on_window_forgotten(key)

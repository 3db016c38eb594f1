"""Where slots lie in the arena: slabs of equal units, each cut into slots of one size. It knows sizes, never blocks.

A size's slabs span as few units as keep the waste at a slab's end below an eighth. A slab whose last slot is freed goes
back to the arena at once, so another size can use it. The lowest slab with a free slot is filled first: high addresses
stay untouched (no memory is committed for them), and low use concentrates in few slabs.
"""

import heapq
from dataclasses import dataclass, field

__all__ = ["SLOT_ALIGNMENT", "SlabAllocator"]

SLOT_ALIGNMENT = 64
_MAX_WASTE = 1 / 8


@dataclass
class _Slab:
    first_unit: int
    num_units: int
    slot_nbytes: int
    free: list[int]  # offsets in the arena, the lowest last
    num_slots: int


@dataclass
class _SizeClass:
    slot_nbytes: int
    units_per_slab: int
    partial: list[tuple[int, int]] = field(default_factory=list)  # heap of (first unit, serial), stale entries included


class SlabAllocator:
    """Hands out slots by byte offset. Slots start at multiples of 64 bytes and never overlap."""

    def __init__(self, arena_nbytes: int, unit_nbytes: int) -> None:
        self.unit_nbytes = unit_nbytes
        self.num_units = arena_nbytes // unit_nbytes
        self.num_slots_used = 0
        self.nbytes_used = 0
        self._unit_used = bytearray(self.num_units)
        self._slabs: dict[int, _Slab] = {}
        self._slab_of_unit: list[int] = [-1] * self.num_units
        self._classes: dict[int, _SizeClass] = {}
        self._serial = 0

    def fits(self, slot_nbytes: int) -> bool:
        """Whether an empty arena would have room for one slot of this size."""
        return self._class_of(slot_nbytes).units_per_slab <= self.num_units

    def try_allocate(self, slot_nbytes: int) -> int | None:
        """Offset of a free slot, or None when no slab has one and no room is left for a slab."""
        size_class = self._class_of(slot_nbytes)
        slab = self._partial_slab(size_class) or self._new_slab(size_class)
        if slab is None:
            return None
        self.num_slots_used += 1
        self.nbytes_used += size_class.slot_nbytes
        return slab.free.pop()

    def free(self, offset: int) -> None:
        """Give back the slot at `offset`, which must be allocated."""
        slab = self._slabs[self._slab_of_unit[offset // self.unit_nbytes]]
        slab.free.append(offset)
        self.num_slots_used -= 1
        self.nbytes_used -= slab.slot_nbytes
        if len(slab.free) == slab.num_slots:
            self._release(slab)
        elif len(slab.free) == 1:
            self._offer(slab)

    def validate(self) -> list[str]:
        """What does not fit together, in words; empty when all does."""
        problems = []
        covered = bytearray(self.num_units)
        used = 0
        for serial, slab in self._slabs.items():
            units = range(slab.first_unit, slab.first_unit + slab.num_units)
            if any(covered[unit] for unit in units) or any(self._slab_of_unit[unit] != serial for unit in units):
                problems.append(f"the slab at unit {slab.first_unit} overlaps another")
            for unit in units:
                covered[unit] = 1
            if len(set(slab.free)) != len(slab.free) or len(slab.free) >= slab.num_slots:
                problems.append(f"the slab at unit {slab.first_unit} has a wrong list of free slots")
            if slab.free and (slab.first_unit, serial) not in self._classes[slab.slot_nbytes].partial:
                problems.append(f"the slab at unit {slab.first_unit} has free slots that are not offered")
            used += slab.num_slots - len(slab.free)
        if covered != self._unit_used:
            problems.append("the used units are not those of the slabs")
        if used != self.num_slots_used:
            problems.append(f"{used} slots are used, {self.num_slots_used} are counted")
        return problems

    def _class_of(self, slot_nbytes: int) -> _SizeClass:
        size = -(-slot_nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        known = self._classes.get(size)
        if known is None:
            least = -(-size // self.unit_nbytes)
            thrifty = (n for n in range(least, self.num_units + 1) if n * self.unit_nbytes % size <= self._allowed(n))
            known = self._classes[size] = _SizeClass(size, next(thrifty, least))
        return known

    def _allowed(self, units: int) -> float:
        return _MAX_WASTE * units * self.unit_nbytes

    def _partial_slab(self, size_class: _SizeClass) -> _Slab | None:
        while size_class.partial:
            slab = self._slabs.get(size_class.partial[0][1])
            if slab is not None and slab.free:
                return slab
            heapq.heappop(size_class.partial)
        return None

    def _new_slab(self, size_class: _SizeClass) -> _Slab | None:
        units = size_class.units_per_slab
        first = self._unit_used.find(bytes(units))
        if first < 0:
            return None
        self._unit_used[first : first + units] = b"\1" * units
        self._serial += 1
        self._slab_of_unit[first : first + units] = [self._serial] * units
        num_slots = units * self.unit_nbytes // size_class.slot_nbytes
        start = first * self.unit_nbytes
        free = [start + i * size_class.slot_nbytes for i in reversed(range(num_slots))]
        slab = self._slabs[self._serial] = _Slab(first, units, size_class.slot_nbytes, free, num_slots)
        self._offer(slab)
        return slab

    def _offer(self, slab: _Slab) -> None:
        entry = (slab.first_unit, self._slab_of_unit[slab.first_unit])
        heapq.heappush(self._classes[slab.slot_nbytes].partial, entry)

    def _release(self, slab: _Slab) -> None:
        units = slice(slab.first_unit, slab.first_unit + slab.num_units)
        del self._slabs[self._slab_of_unit[slab.first_unit]]
        self._unit_used[units] = bytes(slab.num_units)
        self._slab_of_unit[units] = [-1] * slab.num_units

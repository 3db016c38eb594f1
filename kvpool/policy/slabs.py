"""Allocator of a tier's slots: slabs of whole units, each divided into slots of one size. Independent of blocks.

A slab of a size spans the fewest units that keep the waste at its end to at most an eighth. A slab whose last slot is
freed returns to the tier at once, so that another size can use it. The lowest slab with a free slot is filled first:
high addresses stay untouched (no memory is committed for them), and a lightly used tier occupies few slabs.

The tier can be shrunk to its lowest units and extended again (`resize`). Slabs that reach beyond the usable units keep
their used slots, but get no new ones:

    units     0 ......... usable_units ......... num_units
    free      can be used              withheld, until `resize` extends the tier
    slabs     can be used   ├──straddles──┤    only freed: `high_offsets` returns their used slots

If slots must be found again by their offset alone (`adopt`), slabs are aligned: they start at multiples of their own
length, so that a slot's size and offset determine its slab.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

SLOT_ALIGNMENT = 64
_MAX_WASTE = 1 / 8
_FREE, _USED, _WITHHELD = 0, 1, 2


@dataclass
class _Slab:
    first_unit: int
    num_units: int
    slot_nbytes: int
    free: list[int]  # offsets in the tier, the lowest last
    num_slots: int


@dataclass
class _SizeClass:
    slot_nbytes: int
    units_per_slab: int
    step: int  # slabs start at multiples of it, in units
    partial: list[tuple[int, int]] = field(default_factory=list)  # heap of (first unit, serial), stale entries included


class SlabAllocator:
    """Allocates slots by byte offset. Slots start at multiples of `alignment` bytes and never overlap."""

    def __init__(
        self, nbytes: int, unit_nbytes: int, *, alignment: int = SLOT_ALIGNMENT, aligned_slabs: bool = False
    ) -> None:
        self.unit_nbytes = unit_nbytes
        self.num_units = nbytes // unit_nbytes
        self.usable_units = self.num_units
        self.num_slots_used = 0
        self.nbytes_used = 0
        self._alignment = alignment
        self._aligned_slabs = aligned_slabs
        self._unit_state = bytearray(self.num_units)
        self._num_free_units = self.num_units
        self._slabs: dict[int, _Slab] = {}
        self._slab_of_unit: list[int] = [-1] * self.num_units
        self._classes: dict[int, _SizeClass] = {}
        self._serial = 0

    def fits(self, slot_nbytes: int) -> bool:
        """Return True if an empty tier has room for one slot of this size."""
        return self._class_of(slot_nbytes).units_per_slab <= self.num_units

    def slot_nbytes(self, nbytes: int) -> int:
        """Return the size of a slot for `nbytes`, rounded up to the alignment."""
        return -(-nbytes // self._alignment) * self._alignment

    def slots_per_slab(self, slot_nbytes: int) -> int:
        """Return the number of slots of this size in one slab."""
        size_class = self._class_of(slot_nbytes)
        return size_class.units_per_slab * self.unit_nbytes // size_class.slot_nbytes

    @property
    def usable_nbytes(self) -> int:
        """Bytes of the units that new slots can be in."""
        return self.usable_units * self.unit_nbytes

    def resize(self, usable_units: int) -> None:
        """Restrict new slots to the first `usable_units`; used slots beyond them stay until they are freed."""
        low, high = sorted((usable_units, self.usable_units))
        wanted, given = (_FREE, _WITHHELD) if usable_units > self.usable_units else (_WITHHELD, _FREE)
        changed = [unit for unit in range(low, high) if self._unit_state[unit] == given]
        for unit in changed:
            self._unit_state[unit] = wanted
        self._num_free_units += len(changed) if wanted == _FREE else -len(changed)
        self.usable_units = usable_units

    def is_high(self, offset: int) -> bool:
        """Return True if the used slot at `offset` lies in a slab that reaches beyond the usable units."""
        if self.usable_units == self.num_units:
            return False
        return self._end_of(self._slabs[self._slab_of_unit[offset // self.unit_nbytes]]) > self.usable_units

    def high_offsets(self) -> Iterator[int]:
        """Yield the used slots of all slabs that reach beyond the usable units, the highest slab first.

        Meanwhile slots may be freed, and low ones allocated.
        """
        unit = self.num_units - 1
        while unit >= self.usable_units:
            slab = self._slabs.get(self._slab_of_unit[unit])
            unit -= 1
            if slab is not None:
                unit = slab.first_unit - 1
                yield from self._used_in(slab)

    def free_units(self, units: range) -> list[range]:
        """Return the maximal ranges of these units that no slab occupies."""
        found: list[range] = []
        for unit in units:
            if self._unit_state[unit] != _USED:
                if found and found[-1].stop == unit:
                    found[-1] = range(found[-1].start, unit + 1)
                else:
                    found.append(range(unit, unit + 1))
        return found

    def open(self, slot_nbytes: int, first_unit: int) -> None:
        """Create a slab for slots of this size at `first_unit`, whose units must be free."""
        self._make_slab(self._class_of(slot_nbytes), first_unit)

    def try_allocate(self, slot_nbytes: int) -> int | None:
        """Return the offset of a newly allocated slot, or None if no slab has one and no slab can be created."""
        size_class = self._classes.get(slot_nbytes) or self._class_of(slot_nbytes)
        slab = self._partial_slab(size_class) or self._new_slab(size_class)
        if slab is None:
            return None
        self.num_slots_used += 1
        self.nbytes_used += size_class.slot_nbytes
        return slab.free.pop()

    def adopt(self, slot_nbytes: int, offset: int) -> bool:
        """Allocate the slot at `offset`, which `try_allocate` of an allocator with equal parameters returned earlier.

        Requires aligned slabs. Returns False if the offset is out of bounds, in use or not that of a slot of this size.
        """
        assert self._aligned_slabs
        size_class = self._class_of(slot_nbytes)
        first = offset // self.unit_nbytes // size_class.step * size_class.step
        if offset < 0 or first + size_class.units_per_slab > self.num_units:
            return False
        slab = self._slabs.get(self._slab_of_unit[first])
        if slab is None and not any(self._unit_state[first : first + size_class.units_per_slab]):
            slab = self._make_slab(size_class, first)
        if slab is None or slab.slot_nbytes != size_class.slot_nbytes or offset not in slab.free:
            return False
        slab.free.remove(offset)
        self.num_slots_used += 1
        self.nbytes_used += size_class.slot_nbytes
        return True

    def free(self, offset: int) -> None:
        """Free the slot at `offset`, which must be allocated."""
        slab = self._slabs[self._slab_of_unit[offset // self.unit_nbytes]]
        slab.free.append(offset)
        self.num_slots_used -= 1
        self.nbytes_used -= slab.slot_nbytes
        if len(slab.free) == slab.num_slots:
            self._release(slab)
        elif len(slab.free) == 1:
            self._offer(slab)

    def windows(self, slot_nbytes: int, offset: int) -> list[range]:
        """Return the ranges of units that a slab of this size could occupy and that overlap the slab at `offset`."""
        size_class = self._class_of(slot_nbytes)
        slab = self._slabs[self._slab_of_unit[offset // self.unit_nbytes]]
        length, step = size_class.units_per_slab, size_class.step
        first = max(0, slab.first_unit - length + 1)
        last = min(self._end_of(slab) - 1, self.usable_units - length)
        return [range(start, start + length) for start in range(-(-first // step) * step, last + 1, step)]

    def used_offsets(self, units: range) -> list[int]:
        """Return the offsets of the used slots of all slabs that overlap these units."""
        serials = dict.fromkeys(serial for serial in self._slab_of_unit[units.start : units.stop] if serial >= 0)
        return [offset for serial in serials for offset in self._used_in(self._slabs[serial])]

    def validate(self) -> list[str]:
        """Return descriptions of all inconsistencies; empty if the state is consistent."""
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
                problems.append(f"the slab at unit {slab.first_unit} has free slots but is not among the partial slabs")
            used += slab.num_slots - len(slab.free)
        for unit in range(self.usable_units, self.num_units):
            covered[unit] = covered[unit] or _WITHHELD
        if covered != self._unit_state or covered.count(_FREE) != self._num_free_units:
            problems.append("the used units differ from the units of the slabs")
        if used != self.num_slots_used:
            problems.append(f"{used} slots are used, {self.num_slots_used} are counted")
        return problems

    def _class_of(self, slot_nbytes: int) -> _SizeClass:
        known = self._classes.get(slot_nbytes)
        if known is None:
            size = self.slot_nbytes(slot_nbytes)
            known = self._classes.get(size) or self._new_class(size)
            self._classes[slot_nbytes] = known
        return known

    def _new_class(self, size: int) -> _SizeClass:
        least = -(-size // self.unit_nbytes)
        thrifty = (n for n in range(least, self.num_units + 1) if n * self.unit_nbytes % size <= self._allowed(n))
        units = next(thrifty, least)
        made = self._classes[size] = _SizeClass(size, units, units if self._aligned_slabs else 1)
        return made

    def _allowed(self, units: int) -> float:
        return _MAX_WASTE * units * self.unit_nbytes

    def _partial_slab(self, size_class: _SizeClass) -> _Slab | None:
        partial = size_class.partial
        while partial:
            slab = self._slabs.get(partial[0][1])
            if slab is not None and slab.free:
                # Slabs of one size are equally long: if the lowest one reaches too high, so do all others.
                return slab if slab.first_unit + slab.num_units <= self.usable_units else None
            heapq.heappop(partial)
        return None

    def _free_place(self, size_class: _SizeClass) -> int | None:
        """Return the lowest unit where a slab of this size can start."""
        length, step = size_class.units_per_slab, size_class.step
        if self._num_free_units < length:
            return None
        wanted = bytes(length)
        first = self._unit_state.find(wanted)
        while first >= 0 and first % step:
            first = self._unit_state.find(wanted, first - first % step + step)
        return first if first >= 0 else None

    def _new_slab(self, size_class: _SizeClass) -> _Slab | None:
        first = self._free_place(size_class)
        return None if first is None else self._make_slab(size_class, first)

    def _make_slab(self, size_class: _SizeClass, first: int) -> _Slab:
        units = size_class.units_per_slab
        self._unit_state[first : first + units] = bytes([_USED]) * units
        self._num_free_units -= units
        self._serial += 1
        self._slab_of_unit[first : first + units] = [self._serial] * units
        num_slots = units * self.unit_nbytes // size_class.slot_nbytes
        start = first * self.unit_nbytes
        free = [start + i * size_class.slot_nbytes for i in reversed(range(num_slots))]
        slab = self._slabs[self._serial] = _Slab(first, units, size_class.slot_nbytes, free, num_slots)
        self._offer(slab)
        return slab

    def _used_in(self, slab: _Slab) -> list[int]:
        start, free = slab.first_unit * self.unit_nbytes, set(slab.free)
        slots = range(start, start + slab.num_slots * slab.slot_nbytes, slab.slot_nbytes)
        return [offset for offset in slots if offset not in free]

    def _offer(self, slab: _Slab) -> None:
        entry = (slab.first_unit, self._slab_of_unit[slab.first_unit])
        heapq.heappush(self._classes[slab.slot_nbytes].partial, entry)

    def _end_of(self, slab: _Slab) -> int:
        return slab.first_unit + slab.num_units

    def _release(self, slab: _Slab) -> None:
        units = range(slab.first_unit, self._end_of(slab))
        del self._slabs[self._slab_of_unit[slab.first_unit]]
        for unit in units:
            self._unit_state[unit] = _FREE if unit < self.usable_units else _WITHHELD
        self._num_free_units += len(range(units.start, min(units.stop, self.usable_units)))
        self._slab_of_unit[units.start : units.stop] = [-1] * slab.num_units

"""Which extents hold what: a map by offset that knows what overlaps. No I/O, no locks."""

import enum
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvpool.ssd.records import SsdEntry

__all__ = ["Extent", "ExtentMap", "ExtentState"]


class ExtentState(enum.Enum):
    """Of an extent in the store's map; a freed extent is in it no more."""

    WRITING = enum.auto()
    DOOMED = enum.auto()  # freed while it was being written
    SEALED = enum.auto()  # durable and in the journal


@dataclass(slots=True, eq=False)
class Extent:
    """A block, where it lies and what its bytes sum up to; `checksum` is known once they are written."""

    entry: SsdEntry
    start: int
    end: int
    checksum: int = 0
    state: ExtentState = ExtentState.WRITING

    @classmethod
    def of(cls, entry: SsdEntry) -> "Extent":
        return cls(entry, entry.offset, entry.end)


class ExtentMap:
    """Disjoint extents, in the order of their offsets."""

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        self._at = {extent.start: extent for extent in extents}
        self._starts = sorted(self._at)
        self.nbytes = sum(extent.end - extent.start for extent in self._at.values())

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Extent]:
        return (self._at[start] for start in self._starts)

    def get(self, start: int) -> Extent | None:
        return self._at.get(start)

    def overlaps(self, start: int, end: int) -> Extent | None:
        """The last extent that has a byte in `start..end`, if any has."""
        i = bisect_left(self._starts, end) - 1
        if i >= 0 and (extent := self._at[self._starts[i]]).end > start:
            return extent
        return None

    def add(self, extent: Extent) -> None:
        """It must overlap none."""
        insort(self._starts, extent.start)
        self._at[extent.start] = extent
        self.nbytes += extent.end - extent.start

    def remove(self, extent: Extent) -> None:
        """It must be in the map."""
        del self._at[extent.start]
        del self._starts[bisect_right(self._starts, extent.start) - 1]
        self.nbytes -= extent.end - extent.start

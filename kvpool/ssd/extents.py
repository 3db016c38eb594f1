"""Which extents hold what: a map by offset that knows what overlaps. No I/O, no locks."""

import enum
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvpool.ssd.records import SsdEntry

__all__ = ["Extent", "ExtentMap", "ExtentState"]

_BUCKET_NBYTES = 1 << 20


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


class ExtentMap:
    """Disjoint extents, in the order in which they were added. Costs do not grow with the number of extents."""

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        self._at: dict[int, Extent] = {}
        # Per MiB of the space: the starts of the extents that touch it, sorted.
        self._buckets: defaultdict[int, list[int]] = defaultdict(list)
        self.nbytes = 0
        for extent in extents:
            self.add(extent)

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._at.values())

    def get(self, start: int) -> Extent | None:
        return self._at.get(start)

    def overlaps(self, start: int, end: int) -> Extent | None:
        """An extent that has a byte in `start..end`, if any has."""
        for bucket in _buckets(start, end):
            starts = self._buckets.get(bucket)
            # Disjoint extents end in the order in which they start: if any reaches beyond `start`, the last one does.
            if starts and (i := bisect_left(starts, end)) and (extent := self._at[starts[i - 1]]).end > start:
                return extent
        return None

    def add(self, extent: Extent) -> None:
        """It must overlap none."""
        self._at[extent.start] = extent
        self.nbytes += extent.end - extent.start
        for bucket in _buckets(extent.start, extent.end):
            insort(self._buckets[bucket], extent.start)

    def remove(self, extent: Extent) -> None:
        """It must be in the map."""
        del self._at[extent.start]
        self.nbytes -= extent.end - extent.start
        for bucket in _buckets(extent.start, extent.end):
            starts = self._buckets[bucket]
            if len(starts) == 1:
                del self._buckets[bucket]
            else:
                del starts[bisect_left(starts, extent.start)]


def _buckets(start: int, end: int) -> range:
    return range(start // _BUCKET_NBYTES, (end - 1) // _BUCKET_NBYTES + 1)

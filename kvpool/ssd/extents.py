"""Which extents hold what: a map by offset that knows what overlaps. No I/O, no locks."""

import enum
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvpool.ssd.records import PAGE_NBYTES, SsdEntry

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


class ExtentMap:
    """Disjoint extents in a space, in the order in which they were added. A byte per page says whether it is taken."""

    def __init__(self, space_nbytes: int, extents: Iterable[Extent] = ()) -> None:
        self._at: dict[int, Extent] = {}
        # A mapping takes memory only for those parts of the space that are used.
        self._taken = mmap.mmap(-1, space_nbytes // PAGE_NBYTES)
        self.nbytes = 0
        for extent in extents:
            self.add(extent)

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[Extent]:
        return iter(self._at.values())

    def get(self, start: int) -> Extent | None:
        return self._at.get(start)

    def is_clear(self, start: int, end: int) -> bool:
        """Whether no extent has a byte in `start..end`, which are multiples of a page in the space."""
        return self._taken.find(b"\1", start // PAGE_NBYTES, end // PAGE_NBYTES) < 0

    def add(self, extent: Extent) -> None:
        """Where it lies must be clear."""
        self._at[extent.start] = extent
        self._mark(extent, b"\1")

    def remove(self, extent: Extent) -> None:
        """It must be in the map."""
        del self._at[extent.start]
        self._mark(extent, b"\0")

    def _mark(self, extent: Extent, value: bytes) -> None:
        first, nbytes = extent.start // PAGE_NBYTES, extent.end - extent.start
        pages = nbytes // PAGE_NBYTES
        self._taken[first : first + pages] = value * pages
        self.nbytes += nbytes if value == b"\1" else -nbytes

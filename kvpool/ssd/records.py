"""Data types of the SSD store's interface, and its map of extents."""

import enum
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SsdFolderError
from kvpool.spec import KvSpec

PAGE_NBYTES = 4096
"""Extents start at multiples of this and are multiples of it long."""

Bytes = NDArray[np.uint8]
Run = tuple[int, int]
"""A run of this process's memory: its address and its length in bytes."""


def extent_nbytes(spec: KvSpec, coded_nbytes: int = 0) -> int:
    """Return the bytes of a block on the SSD, rounded up to whole pages.

    That is all groups, one after the other, or the coded block if `coded_nbytes` is given.
    """
    return -(-(coded_nbytes or spec.block_nbytes) // PAGE_NBYTES) * PAGE_NBYTES


@dataclass(frozen=True)
class SsdConfig:
    """Location and tuning of a pool node's SSD tier. `dir` must exist and belong to this node alone.

    Raises SsdFolderError for invalid values.
    """

    dir: Path
    nbytes: int
    """Space for extents, preallocated when the store opens. May change between runs; blocks beyond its end are lost."""
    owner_id: str
    cluster: str = ""
    """A folder of another cluster, or of another `owner_id`, is rejected."""
    segment_nbytes: int = 1 << 30
    """Size of a segment file. A folder keeps the size with which it was created."""
    read_depth: int = 8
    """Most I/Os in flight for reads. Reads and writes have separate threads, so neither waits for the other."""
    write_depth: int = 8
    """Most I/Os in flight for writes."""
    min_journal_nbytes: int = 4 << 20
    """The journal is rewritten when it is larger than this and more than twice its size after the last rewrite."""
    coded: bool = False
    """Coded blocks may be written. Blocks stored before are read in either form."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dir", Path(self.dir))
        if self.nbytes < PAGE_NBYTES or self.nbytes % PAGE_NBYTES:
            raise SsdFolderError(f"the SSD tier's size is {self.nbytes} bytes: expected a positive multiple of 4096")
        if self.segment_nbytes < PAGE_NBYTES or self.segment_nbytes % PAGE_NBYTES:
            raise SsdFolderError(f"segment_nbytes is {self.segment_nbytes}: expected a positive multiple of 4096")
        if not self.owner_id:
            raise SsdFolderError("the SSD tier needs the pool node's id")
        for name in ("read_depth", "write_depth"):
            if not 1 <= getattr(self, name) <= 256:
                raise SsdFolderError(f"{name} is {getattr(self, name)}: expected 1..256")
        if self.min_journal_nbytes < 16 * PAGE_NBYTES:
            raise SsdFolderError(f"min_journal_nbytes is {self.min_journal_nbytes}: expected 65536 or more")
        object.__setattr__(self, "min_journal_nbytes", self.min_journal_nbytes // PAGE_NBYTES * PAGE_NBYTES)


@dataclass(frozen=True, slots=True)
class SsdEntry:
    """One block on the SSD, all groups included: its extent and all facts that the pool node records."""

    offset: int  # bytes from the start of the SSD space, a multiple of 4096
    kv_namespace: bytes  # 16
    chain_key: bytes  # 16
    parent: bytes  # 16: the parent's chain key
    spec: KvSpec
    num_tokens: int  # 0 for a full block, otherwise the tokens of a tail
    digests: tuple[bytes, ...]  # per group: uint64 little-endian per layer
    compute_s: float = 0.0  # time that computing it took; 0 = unknown
    coded_nbytes: int = 0  # length of the coded block (`kvpool.block_coding`) that is stored; 0 = its plain bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the extent."""
        return extent_nbytes(self.spec, self.coded_nbytes)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class SsdWrite:
    """A block to write to `entry.offset`. `sources`: per group uint8 [slot_nbytes], contiguous.

    Of a coded block: its bytes and padding up to the extent's end, in one array uint8 [entry.nbytes].
    Sources whose addresses and lengths are multiples of 4096 are written directly; others are copied first. They must
    not change until the write returns.
    """

    entry: SsdEntry
    sources: Sequence[Bytes]


@dataclass(frozen=True, slots=True)
class SsdRead:
    """A block to read from `offset`. `targets`: per group uint8 [slot_nbytes], contiguous and writable.

    Of a coded block, one array for its extent (`SsdStore.coded_nbytes`).
    `kv_namespace` and `chain_key` identify the expected block: if another one is stored there, the read fails.
    """

    offset: int
    kv_namespace: bytes
    chain_key: bytes
    targets: Sequence[Bytes]


class ExtentState(enum.Enum):
    """State of an extent in the store's map; freed extents are not in it."""

    WRITING = enum.auto()
    DOOMED = enum.auto()  # freed while it was being written
    SEALED = enum.auto()  # durable and in the journal


@dataclass(slots=True, eq=False)
class SsdExtent:
    """A block and its extent `start`..`end`. `checksum` is set once the bytes are written.

    `began_after` is the number of syncs that had failed before its bytes were written.
    """

    entry: SsdEntry
    start: int
    end: int
    checksum: int = 0
    state: ExtentState = ExtentState.WRITING
    began_after: int = 0


class ExtentMap:
    """Disjoint extents in a space, in the order in which they were added. One byte per page marks it as used."""

    def __init__(self, space_nbytes: int, extents: Iterable[SsdExtent] = ()) -> None:
        self._at: dict[int, SsdExtent] = {}
        # An anonymous mapping commits memory only for the parts that are used.
        self._taken = mmap.mmap(-1, space_nbytes // PAGE_NBYTES)
        self.nbytes = 0
        for extent in extents:
            self.add(extent)

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[SsdExtent]:
        return iter(self._at.values())

    def get(self, start: int) -> SsdExtent | None:
        return self._at.get(start)

    def is_clear(self, start: int, end: int) -> bool:
        """Return True if no extent has a byte in `start..end`, which are page-aligned offsets in the space."""
        return self._taken.find(b"\1", start // PAGE_NBYTES, end // PAGE_NBYTES) < 0

    def add(self, extent: SsdExtent) -> None:
        """Add an extent; its range must be clear."""
        self._at[extent.start] = extent
        self._mark(extent, b"\1")

    def remove(self, extent: SsdExtent) -> None:
        """Remove an extent, which must be in the map."""
        del self._at[extent.start]
        self._mark(extent, b"\0")

    def _mark(self, extent: SsdExtent, value: bytes) -> None:
        first, nbytes = extent.start // PAGE_NBYTES, extent.end - extent.start
        pages = nbytes // PAGE_NBYTES
        self._taken[first : first + pages] = value * pages
        self.nbytes += nbytes if value == b"\1" else -nbytes

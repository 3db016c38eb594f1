"""Memory that peers can access: shared memory, GPU memory, their registered regions and remote keys, and peers' memory.

Host memory is backed by a memfd, whose descriptor crosses to processes of the same host (shm). GPU memory is touched by
RDMA adapters alone, never by this process.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from messenger.errors import ProtocolError
from messenger.mapping import HUGE_NBYTES, advise_huge, collapse, give_back, mapped, populate
from rpc.errors import InvalidArgument

_PACKED = struct.Struct("<QQQQB")
_READ, _WRITE = 1, 2


@dataclass(frozen=True)
class RemoteKey:
    """Right to access bytes [offset, offset + nbytes) of an owner's region; the token cannot be guessed."""

    region_id: int
    token: int
    offset: int
    nbytes: int
    read: bool
    write: bool

    def pack(self) -> bytes:
        """Return the key as 33 bytes, for messages of the control plane."""
        rights = _READ * self.read | _WRITE * self.write
        return _PACKED.pack(self.region_id, self.token, self.offset, self.nbytes, rights)

    @classmethod
    def unpack(cls, packed: bytes) -> "RemoteKey":
        """Return the key that `pack` packed. Raises InvalidArgument for other bytes."""
        if len(packed) != _PACKED.size:
            raise InvalidArgument(f"a packed remote key must have {_PACKED.size} bytes, got {len(packed)}")
        region_id, token, offset, nbytes, rights = _PACKED.unpack(packed)
        if not rights or rights & ~(_READ | _WRITE):
            raise InvalidArgument(f"a remote key has invalid rights: {rights:#x}")
        return cls(region_id, token, offset, nbytes, bool(rights & _READ), bool(rights & _WRITE))


Bytes = npt.NDArray[np.uint8]

# From linux/fcntl.h; the fcntl module of Python 3.11 names only some.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 2, 4, 16

HugePages = Literal["auto", "transparent", "on", "off"]
"""on: reserved huge pages, or an error; auto: reserved huge pages if there are enough, otherwise as transparent;
transparent: small pages, which the kernel joins to transparent huge pages, as far as it can, when they are committed;
off: small pages."""
Pages = Literal["huge", "transparent", "small"]
"""Pages of a memory: reserved huge pages, mostly transparent huge pages, or small pages."""


class SharedMemory:
    """Anonymous shared memory with a file descriptor. Its size is sealed, so that a peer's mapping stays valid.

    Other processes can map the descriptor for reading only: the memory is sealed against further writable mappings. The
    kernel takes back no pages of memory sealed like that; of `returnable` memory, `fd` is instead opened for reading,
    which a process of the same user could evade on purpose, by opening it again in /proc.
    """

    def __init__(self, fd: int, array: Bytes, name: str, *, is_huge: bool = False, joins: bool = False) -> None:
        self.fd = fd  # to pass to other processes
        self._writable_fd: int | None = None  # of returnable memory
        self.name = name
        self.nbytes = int(array.nbytes)
        self._array: Bytes | None = array
        self._is_huge = is_huge
        self._joins = joins
        self._tried_nbytes = 0
        self._joined_nbytes = 0

    @classmethod
    def create(
        cls, nbytes: int, name: str, huge_pages: HugePages = "off", *, returnable: bool = False
    ) -> "SharedMemory":
        """Create zeroed memory of `nbytes` > 0, rounded up to whole huge pages if it is made of them.

        `returnable` memory supports `release`; it is not made of reserved huge pages. `name` appears in /proc. Raises
        OSError if there is not enough memory, or not enough huge pages if `on`.
        """
        if nbytes <= 0:
            raise InvalidArgument(f"shared memory {name!r} must have a positive size, got {nbytes}")
        if huge_pages in ("auto", "on"):
            try:
                return cls._create(_rounded_up(nbytes), name, is_huge=True)
            except OSError as error:
                if huge_pages == "on":
                    raise OSError(error.errno, _TOO_FEW_HUGE_PAGES.format(nbytes=nbytes, name=name)) from error
        joins = huge_pages in ("auto", "transparent") and nbytes >= HUGE_NBYTES
        return cls._create(nbytes, name, joins=joins, returnable=returnable)

    @classmethod
    def _create(
        cls, nbytes: int, name: str, *, is_huge: bool = False, joins: bool = False, returnable: bool = False
    ) -> "SharedMemory":
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if is_huge else 0)
        fd = os.memfd_create(name, flags)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            array = mapped(fd, nbytes, writable=True)
            if joins:
                advise_huge(int(array.ctypes.data), nbytes)
            if returnable:
                os.fchmod(fd, 0o400)
                made = cls(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), array, name, joins=joins)
                made._writable_fd = fd
                return made
            with contextlib.suppress(OSError):  # not supported before Linux 5.1
                fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
            return cls(fd, array, name, is_huge=is_huge, joins=joins)
        except BaseException:
            os.close(fd)
            raise

    @property
    def array(self) -> Bytes:
        """The memory as uint8 [nbytes], writable, shared with every process that maps the descriptor."""
        if self._array is None:
            raise InvalidArgument(f"shared memory {self.name!r} is closed")
        return self._array

    @property
    def pages(self) -> Pages:
        """Pages of the memory that was committed so far."""
        if self._is_huge:
            return "huge"
        return "transparent" if 2 * self._joined_nbytes > self._tried_nbytes else "small"

    def try_commit(self, start: int, nbytes: int) -> bool:
        """Allocate the pages of [start, start + nbytes) now, keeping contents.

        If huge pages are requested, the pages that the range touches are joined. Runs without the GIL. Returns False if
        the kernel is too old or has too little memory.
        """
        array = self.array  # keeps the mapping until the kernel is done, even if another thread closes the memory
        address = int(array.ctypes.data)
        if self._joins:
            first = start // HUGE_NBYTES * HUGE_NBYTES
            end = min(-(-(start + nbytes) // HUGE_NBYTES), self.nbytes // HUGE_NBYTES) * HUGE_NBYTES
            if first < end:
                self._tried_nbytes += end - first
                self._joined_nbytes += collapse(address + first, end - first)
        return populate(address + start, nbytes)

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the pages that the memory has, in RAM or swap."""
        return os.fstat(self.fd).st_blocks * 512

    @property
    def writable_fd(self) -> int:
        """Descriptor of returnable memory through which another process of the owner can map it for writing."""
        assert self._writable_fd is not None, "the memory is not returnable"
        return self._writable_fd

    def release(self, start: int, nbytes: int) -> None:
        """Return the whole pages in [start, start + nbytes) of returnable memory to the kernel.

        They read as zeros until they are written again. Runs without the GIL. Raises OSError if the kernel cannot.
        """
        assert self._writable_fd is not None, "the memory is not returnable"
        give_back(self._writable_fd, start, nbytes)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._array is None

    def close(self) -> None:
        """Close the descriptor; the mapping itself ends with the last array over it. Idempotent."""
        if self._array is not None:
            self._array = None
            os.close(self.fd)
            if self._writable_fd is not None:
                os.close(self._writable_fd)


class UnitSection(NamedTuple):
    """Adjacent units of a region, of which the messenger computes digests while peers write them.

    `num_units` units of `unit_nbytes` bytes each, a multiple of 4, begin at byte `start`, another multiple of 4.
    """

    start: int
    unit_nbytes: int
    num_units: int


class WrittenUnits(Protocol):
    """Digests of the units of a region that peers wrote (messenger.native.unit_digests). Any thread."""

    address: int

    def find(self, offsets: npt.NDArray[np.int64], token: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Return digests [n] of the units that begin at `offsets` [n], and for each True if it is valid.

        A digest is valid if the last write of any part of the unit was one of the whole unit under the token. Call it
        after the notification of that write.
        """

    def distrust(self) -> None:
        """Void all digests for ever."""

    def spoiling(self, rows: npt.NDArray[np.int64]) -> AbstractContextManager[None]:
        """Return a context manager around a write to rows [n, 2] of (offset, nbytes), which voids their digests."""


@dataclass(frozen=True, eq=False)
class Region:
    """Host memory registered with a messenger, which never reuses a `region_id`."""

    region_id: int
    memory: SharedMemory
    array: Bytes
    """The memory's array, which keeps the mapping for transfers in flight."""
    units: WrittenUnits | None = None
    """Digests of the units that peers wrote, if the region has units."""

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @cached_property
    def address(self) -> int:
        """Address of the mapping in this process."""
        return int(self.array.ctypes.data)

    @cached_property
    def view(self) -> memoryview:
        """The bytes as a memoryview, for scatter and gather calls."""
        return memoryview(self.array)  # type: ignore[arg-type]


class PeerMemory:
    """A peer's region, mapped read-only: on shm every process writes only its own memory."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `fd` and close it. Raises ProtocolError if it is not sealed memory of `nbytes`."""
        try:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
            if not seals & F_SEAL_SHRINK or nbytes <= 0 or os.fstat(fd).st_size != nbytes:
                raise ProtocolError(f"a peer offered memory that is not {nbytes} bytes sealed against shrinking")
            self.array: Bytes = mapped(fd, nbytes, writable=False)
        except OSError as error:
            raise ProtocolError(f"a peer offered a descriptor that is not shared memory: {error}") from error
        finally:
            os.close(fd)
        self.nbytes = nbytes
        self.address = int(self.array.ctypes.data)


_TOO_FEW_HUGE_PAGES = (
    "shared memory {name!r} of {nbytes} bytes needs more huge pages than are free: reserve more (sysctl "
    "vm.nr_hugepages), or do not require them"
)


def _rounded_up(nbytes: int) -> int:
    """Round up to whole huge pages of the default size; unchanged if the kernel has none."""
    size = 1
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Hugepagesize:"):
            size = int(line.split()[1]) << 10
    return -(-nbytes // size) * size


class NotInHostMemory(Exception):
    """A transport that moves host memory was given GPU memory; reported to the caller as MemoryOutOfReach."""


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU within one allocation, by its device pointer (a torch tensor's data_ptr()).

    It must stay allocated until its region is deregistered and all transfers with it have ended. Raises InvalidArgument
    for an invalid address or size.
    """

    address: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.address <= 0 or self.nbytes <= 0:
            raise InvalidArgument(
                f"GPU memory needs a device pointer and a positive size, got {self.nbytes} bytes at {self.address:#x}"
            )


@dataclass(frozen=True, eq=False)
class GpuRegion:
    """GPU memory registered with a messenger, which never reuses a `region_id`."""

    region_id: int
    memory: GpuMemory

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


AnyRegion = Region | GpuRegion


def require_host_region(region: AnyRegion) -> Region:
    """Return the region if this process can touch its bytes. Raises NotInHostMemory."""
    if isinstance(region, Region):
        return region
    raise NotInHostMemory(unreachable_gpu_error(region))


def unreachable_gpu_error(region: GpuRegion) -> str:
    """Return the error for a region that a transport of host memory cannot move."""
    return (
        f"region {region.region_id} is GPU memory, which only rdma can move: enable rdma on both sides, or keep a copy "
        "in host memory"
    )


def views(region: AnyRegion, runs: Iterable[Sequence[int]]) -> list[memoryview]:
    """Return a memoryview for each (offset, nbytes) that is not empty. Raises NotInHostMemory."""
    view = require_host_region(region).view
    return [view[offset : offset + nbytes] for offset, nbytes in runs if nbytes]


class Loan:
    """Bytes of a peer's memory in place, without a copy.

    `array` is uint8 [nbytes], read-only, in the owner's memory. It may change at any time once the key is revoked,
    because a revoke does not wait for borrowers. So read, then call `confirm`, and only then use the data.
    """

    def __init__(self, array: Bytes, is_good: Callable[[], bool]) -> None:
        self.array = array
        self._is_good = is_good

    def confirm(self) -> bool:
        """Return True if the key was valid, and the connection to its owner alive, from the borrowing until now.

        Once it returns False, it always does, and the data must be discarded.
        """
        return self._is_good()

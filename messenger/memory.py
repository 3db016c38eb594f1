"""Remote keys: what an owner hands out so that a peer may touch a window of one of its regions.

Memory that can be handed to peers: memfd-backed own memory, registered regions, and read-only views of peers'.

Memory of a GPU as the messenger knows it: only adapters touch it, by rdma, and no code of this process does.

Memory views of a region's slices, for scatter and gather calls.

Bytes of a peer's memory, lent in place: nothing is copied, and what was read is confirmed afterwards.
"""

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from messenger.errors import ProtocolError
from messenger.mapping import HUGE_NBYTES, advise_huge, collapse, mapped, populate
from rpc.errors import InvalidArgument

_PACKED = struct.Struct("<QQQQB")
_READ, _WRITE = 1, 2


@dataclass(frozen=True)
class RemoteKey:
    """A window of bytes [offset, offset + nbytes) of the owner's region, named by an unguessable token."""

    region_id: int
    token: int
    offset: int
    nbytes: int
    read: bool
    write: bool

    def pack(self) -> bytes:
        """33 bytes, for the control plane's messages."""
        rights = _READ * self.read | _WRITE * self.write
        return _PACKED.pack(self.region_id, self.token, self.offset, self.nbytes, rights)

    @classmethod
    def unpack(cls, packed: bytes) -> "RemoteKey":
        """Raises InvalidArgument when `packed` is no key."""
        if len(packed) != _PACKED.size:
            raise InvalidArgument(f"a packed remote key has {_PACKED.size} bytes, not {len(packed)}")
        region_id, token, offset, nbytes, rights = _PACKED.unpack(packed)
        if not rights or rights & ~(_READ | _WRITE):
            raise InvalidArgument(f"a remote key cannot have the rights {rights:#x}")
        return cls(region_id, token, offset, nbytes, bool(rights & _READ), bool(rights & _WRITE))


Bytes = npt.NDArray[np.uint8]

# From linux/fcntl.h; the fcntl module of Python 3.11 names only some.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 2, 4, 16

HugePages = Literal["auto", "on", "off"]
"""on: of reserved huge pages alone, or not at all; auto: of those if there are enough, else of small ones,
which the kernel joins as they are committed, as far as it can."""
Pages = Literal["huge", "transparent", "small"]
"""What memory is made of: reserved huge pages, pages most of which the kernel joined, or small ones."""


class SharedMemory:
    """Anonymous shared memory with a file descriptor; its size is sealed, so nobody can pull it from under a peer.

    Whoever is given the descriptor can map it for reading only.
    """

    def __init__(self, fd: int, array: Bytes, name: str, *, is_huge: bool = False, joins: bool = False) -> None:
        self.fd = fd
        self.name = name
        self.nbytes = int(array.nbytes)
        self._array: Bytes | None = array
        self._is_huge = is_huge
        self._joins = joins
        self._tried_nbytes = 0
        self._joined_nbytes = 0

    @classmethod
    def create(cls, nbytes: int, name: str, huge_pages: HugePages = "off") -> "SharedMemory":
        """Zeroed memory of `nbytes` > 0, rounded up to whole huge pages where it is made of them.

        `name` is what /proc shows. Raises OSError when there is not enough, of huge pages if these are `on`.
        """
        if nbytes <= 0:
            raise InvalidArgument(f"shared memory {name!r} needs a positive size, not {nbytes}")
        if huge_pages != "off":
            try:
                return cls._create(_rounded_up(nbytes), name, is_huge=True)
            except OSError as error:
                if huge_pages == "on":
                    raise OSError(error.errno, _TOO_FEW_HUGE_PAGES.format(nbytes=nbytes, name=name)) from error
        return cls._create(nbytes, name, joins=huge_pages == "auto" and nbytes >= HUGE_NBYTES)

    @classmethod
    def _create(cls, nbytes: int, name: str, *, is_huge: bool = False, joins: bool = False) -> "SharedMemory":
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if is_huge else 0)
        fd = os.memfd_create(name, flags)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            array = mapped(fd, nbytes, writable=True)
            if joins:
                advise_huge(int(array.ctypes.data), nbytes)
            with contextlib.suppress(OSError):  # not known before Linux 5.1
                fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
            return cls(fd, array, name, is_huge=is_huge, joins=joins)
        except BaseException:
            os.close(fd)
            raise

    @property
    def array(self) -> Bytes:
        """uint8 [nbytes], writable, shared with every process that maps the descriptor."""
        if self._array is None:
            raise InvalidArgument(f"shared memory {self.name!r} is closed")
        return self._array

    @property
    def pages(self) -> Pages:
        """Of what was committed so far."""
        if self._is_huge:
            return "huge"
        return "transparent" if 2 * self._joined_nbytes > self._tried_nbytes else "small"

    def try_commit(self, start: int, nbytes: int) -> bool:
        """Let the kernel find and clear the pages of [start, start + nbytes) now; what is in them stays.

        Where huge pages are wanted, those that the range touches are made. Runs without the GIL. False where the kernel
        cannot commit: an old kernel, too little memory.
        """
        array = self.array  # stays mapped until the kernel is done, whoever closes the memory meanwhile
        address = int(array.ctypes.data)
        if self._joins:
            first = start // HUGE_NBYTES * HUGE_NBYTES
            end = min(-(-(start + nbytes) // HUGE_NBYTES), self.nbytes // HUGE_NBYTES) * HUGE_NBYTES
            if first < end:
                self._tried_nbytes += end - first
                self._joined_nbytes += collapse(address + first, end - first)
        return populate(address + start, nbytes)

    @property
    def closed(self) -> bool:
        return self._array is None

    def close(self) -> None:
        """Close the descriptor; the mapping itself ends with the last array over it. Closing twice is allowed."""
        if self._array is not None:
            self._array = None
            os.close(self.fd)


@dataclass(frozen=True, eq=False)
class Region:
    """Shared memory registered with a messenger; `region_id` is never reused by it."""

    region_id: int
    memory: SharedMemory
    array: Bytes
    """The memory's array: kept so that a transfer in flight never loses it."""

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @cached_property
    def address(self) -> int:
        """Where the mapping starts in this process."""
        return int(self.array.ctypes.data)

    @cached_property
    def view(self) -> memoryview:
        """The bytes, for scatter and gather calls."""
        return memoryview(self.array)  # type: ignore[arg-type]


class PeerMemory:
    """A peer's region mapped read-only: on shm every process writes only memory of its own."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes over `fd`. Raises ProtocolError when it is no sealed memory of `nbytes`."""
        try:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
            if not seals & F_SEAL_SHRINK or nbytes <= 0 or os.fstat(fd).st_size != nbytes:
                raise ProtocolError(f"a peer offered memory that is not {nbytes} bytes sealed against shrinking")
            self.array: Bytes = mapped(fd, nbytes, writable=False)
        except OSError as error:
            raise ProtocolError(f"a peer offered a descriptor that is no shared memory: {error}") from error
        finally:
            os.close(fd)
        self.nbytes = nbytes
        self.address = int(self.array.ctypes.data)


_TOO_FEW_HUGE_PAGES = (
    "shared memory {name!r} of {nbytes} bytes was to be made of huge pages, and there are not enough free ones: "
    "reserve more (sysctl vm.nr_hugepages), or do not ask for them"
)


def _rounded_up(nbytes: int) -> int:
    """To whole huge pages of the default size; as it is where the kernel knows none."""
    size = 1
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Hugepagesize:"):
            size = int(line.split()[1]) << 10
    return -(-nbytes // size) * size


class NotInHostMemory(Exception):
    """A transport that moves host memory was given a GPU's; travels to the caller as MemoryOutOfReach."""


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU by its device pointer, as of a torch tensor's data_ptr(), within one allocation.

    It must stay allocated until its region is deregistered and what was under way with it has ended. Raises
    InvalidArgument for what can be no such memory.
    """

    address: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.address <= 0 or self.nbytes <= 0:
            raise InvalidArgument(
                f"{self.nbytes} bytes at {self.address:#x} are no GPU memory: expected a device pointer and a size"
            )


@dataclass(frozen=True, eq=False)
class GpuRegion:
    """GPU memory registered with a messenger; `region_id` is never reused by it."""

    region_id: int
    memory: GpuMemory

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


AnyRegion = Region | GpuRegion


def require_host_region(region: AnyRegion) -> Region:
    """The region, if this process may touch its bytes itself. Raises NotInHostMemory."""
    if isinstance(region, Region):
        return region
    raise NotInHostMemory(unreachable_gpu_error(region))


def unreachable_gpu_error(region: GpuRegion) -> str:
    """Why a transport that moves host memory leaves the region alone, and what to do."""
    return (
        f"region {region.region_id} is GPU memory, which rdma alone reaches: see to it that both sides speak rdma, or "
        "keep a copy in host memory"
    )


def views(region: AnyRegion, runs: Iterable[Sequence[int]]) -> list[memoryview]:
    """One view for each (offset, nbytes); none for an empty one, which reads as an end. Raises NotInHostMemory."""
    view = require_host_region(region).view
    return [view[offset : offset + nbytes] for offset, nbytes in runs if nbytes]


class Loan:
    """`array`: uint8, read-only, in the owner's own memory; it may change under the reader once the key is revoked.

    The owner waits for no borrower. So: read, then `confirm`, and only then use what was read.
    """

    def __init__(self, array: Bytes, is_good: Callable[[], bool]) -> None:
        self.array = array
        self._is_good = is_good

    def confirm(self) -> bool:
        """Whether the key was good, and the connection to its owner alive, from the borrowing until now.

        False: forget what was read. It never becomes true again.
        """
        return self._is_good()

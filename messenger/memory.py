"""Memory that can be handed to peers: memfd-backed own memory, registered regions, and read-only views of peers'."""

import fcntl
import mmap
import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from messenger.errors import InvalidArgument, ProtocolError

Bytes = npt.NDArray[np.uint8]

# From linux/fcntl.h; the fcntl module of Python 3.11 names only some.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SHRINK, F_SEAL_GROW = 2, 4


class SharedMemory:
    """Anonymous shared memory with a file descriptor; its size is sealed, so nobody can pull it from under a peer."""

    def __init__(self, fd: int, array: Bytes, name: str) -> None:
        self.fd = fd
        self.name = name
        self.nbytes = int(array.nbytes)
        self._array: Bytes | None = array

    @classmethod
    def create(cls, nbytes: int, name: str) -> "SharedMemory":
        """Zeroed memory of `nbytes` > 0; `name` is what /proc shows. Raises OSError when there is not enough."""
        if nbytes <= 0:
            raise InvalidArgument(f"shared memory {name!r} needs a positive size, not {nbytes}")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            array = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, array, name)

    @property
    def array(self) -> Bytes:
        """uint8 [nbytes], writable, shared with every process that maps the descriptor."""
        if self._array is None:
            raise InvalidArgument(f"shared memory {self.name!r} is closed")
        return self._array

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
            self.array: Bytes = np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), dtype=np.uint8)
        except OSError as error:
            raise ProtocolError(f"a peer offered a descriptor that is no shared memory: {error}") from error
        finally:
            os.close(fd)
        self.nbytes = nbytes
        self.address = int(self.array.ctypes.data)

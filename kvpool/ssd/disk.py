"""Every effect that the SSD store has on a file system: one method each, so tests can record or fail them."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool.ssd.transfer import Batch, Flight, IoThreads

__all__ = ["Disk"]


class Disk:
    """The real one. All methods raise OSError; a flight's outcome gives errors per extent instead."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """A descriptor to read and write by."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0) | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, 0o600)  # who can read KV can tell the prompt

    def close(self, fd: int) -> None:
        os.close(fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Make the file at least this long, with room on the disk for all of it; what is in it stays."""
        os.posix_fallocate(fd, 0, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """All of `data`, through the page cache."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, fd: int) -> None:
        """What was written to the file, by whatever descriptor, survives a loss of power from now on."""
        os.fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def sync_dir(self, path: Path) -> None:
        """The folder's names survive a loss of power from now on."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def start(self, threads: IoThreads, batch: Batch, fds: NDArray[np.int32], *, write: bool) -> Flight:
        """Begin to carry extents between memory and the files `fds`, which stand one after the other for the space."""
        return threads.start(batch, fds, write=write)

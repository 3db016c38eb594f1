"""The store's folder: checks, lock, and the segment files that form the space."""

import errno
import fcntl
import logging
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SsdFolderError, SsdInUse
from kvpool.ssd.disk import Disk
from kvpool.ssd.records import PAGE_NBYTES

_log = logging.getLogger(__name__)
IN_MEMORY = ("tmpfs", "ramfs")
_JOURNAL_ROOM_NBYTES = 16 << 20


def check_folder(folder: Path) -> None:
    """Raise SsdFolderError if `folder` is missing, not a directory, or on a file system in memory."""
    try:
        folder.stat()
    except FileNotFoundError as error:
        raise SsdFolderError(
            f"the SSD folder {folder} does not exist: create it on the disk for the SSD tier"
        ) from error
    except OSError as error:
        raise SsdFolderError(f"the SSD folder {folder} cannot be reached: {error.strerror}") from error
    if not folder.is_dir():
        raise SsdFolderError(f"the SSD folder {folder} is not a directory: give a directory for the SSD tier")
    kind = file_system(folder)
    if kind in IN_MEMORY:
        raise SsdFolderError(
            f"the SSD folder {folder} is on {kind}, which is in memory: give a folder on a disk, or give the "
            "memory to the DRAM tier (pool_bytes)"
        )


def on_disk(folder: Path) -> bool:
    """Return True if the folder exists on a file system that is not in memory."""
    return folder.is_dir() and file_system(folder) not in IN_MEMORY


def lock_folder(disk: Disk, folder: Path) -> int:
    """Lock the folder for this process and return the descriptor that holds the lock.

    Raises SsdInUse if another process holds it, SsdFolderError if the folder cannot be written.
    """
    path = folder / "lock"
    try:
        fd = disk.open(path, create=True)
    except OSError as error:
        raise SsdFolderError(
            f"the SSD folder {folder} cannot be written: {error.strerror}. Give this user write permission, or give "
            "another folder"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        disk.close(fd)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise SsdFolderError(f"the SSD folder {folder} cannot be locked: {error.strerror}") from error
        raise SsdInUse(
            f"the SSD folder {folder} is open in another process (pid {holder}): stop it, or give another folder"
        ) from error
    return fd


class Segments:
    """Preallocated files that form the SSD space, all of `segment_nbytes` except the last."""

    def __init__(self, disk: Disk, folder: Path, segment_nbytes: int, nbytes: int) -> None:
        """Open or create the files and preallocate what is missing. Raises SsdFolderError."""
        self._disk, self._folder = disk, folder
        self.segment_nbytes, self.nbytes = segment_nbytes, nbytes
        count = -(-nbytes // segment_nbytes)
        self._sizes = [min(segment_nbytes, nbytes - i * segment_nbytes) for i in range(count)]
        self._paths = [folder / f"segment-{i:05}" for i in range(count)]
        self.found_nbytes = [path.stat().st_size if path.exists() else 0 for path in self._paths]
        self.fds: NDArray[np.int32] = np.zeros(0, np.int32)
        self.direct = True
        self._check_room()
        opened: list[int] = []
        try:
            for path, size, found in zip(self._paths, self._sizes, self.found_nbytes, strict=True):
                opened.append(self._open(path))
                if found < size:
                    disk.allocate(opened[-1], size)
                    disk.sync(opened[-1])
            if 0 in self.found_nbytes:
                disk.sync_dir(folder)
        except OSError as error:
            for fd in opened:
                disk.close(fd)
            raise SsdFolderError(
                f"cannot allocate {nbytes} bytes in the SSD folder {folder}: {error.strerror}. Free disk space, or "
                "set a smaller pool_ssd_bytes"
            ) from error
        self.fds = np.array(opened, np.int32)

    def was_there(self, start: int, end: int) -> bool:
        """Return True if the files were long enough to hold `start..end` when they were opened."""
        parts = self.touched(start, end)
        return end <= self.nbytes and all(
            min(end - i * self.segment_nbytes, self._sizes[i]) <= self.found_nbytes[i] for i in parts
        )

    def touched(self, start: int, end: int) -> range:
        """Return the indices of the segments that contain `start..end`."""
        return range(start // self.segment_nbytes, (end - 1) // self.segment_nbytes + 1)

    def sync(self, index: int) -> None:
        """Make writes to this segment durable. Raises OSError."""
        self._disk.sync(int(self.fds[index]))

    def trim(self) -> None:
        """Remove files, and truncate the last one, that are left from an earlier, larger space. Raises OSError."""
        for path in self._folder.glob("segment-*"):
            if path not in self._paths:
                _log.info("removing %s: the SSD tier's space is %d bytes now", path, self.nbytes)
                self._disk.remove(path)
        if self.found_nbytes[-1] > self._sizes[-1]:
            self._disk.truncate(int(self.fds[-1]), self._sizes[-1])

    def close(self) -> None:
        for fd in self.fds:
            self._disk.close(int(fd))

    def _check_room(self) -> None:
        taken = sum(path.stat().st_blocks * 512 for path in self._paths if path.exists())
        usage = os.statvfs(self._folder)
        free = usage.f_bavail * usage.f_frsize
        needed = self.nbytes - min(taken, self.nbytes) + _JOURNAL_ROOM_NBYTES
        if free < needed:
            raise SsdFolderError(
                f"the SSD folder {self._folder} is on a disk with {free / 2**30:.4g} GiB free, "
                f"{needed / 2**30:.4g} GiB are needed for {self.nbytes / 2**30:.4g} GiB. Free disk space, "
                "or set a smaller pool_ssd_bytes"
            )

    def _open(self, path: Path) -> int:
        if self.direct:
            with suppress(OSError):
                fd = self._disk.open(path, create=True, direct=True)
                if _reads_directly(fd):
                    return fd
                self._disk.close(fd)
            self.direct = False
            _log.warning("%s: this file system has no direct I/O; using the page cache", self._folder)
        return self._disk.open(path, create=True)


def _reads_directly(fd: int) -> bool:
    # Some file systems accept O_DIRECT and fail the first I/O.
    with mmap.mmap(-1, PAGE_NBYTES) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as error:
            return error.errno != errno.EINVAL
    return True


def file_system(folder: Path) -> str:
    """Return the type of the folder's file system, as in proc_pid_mountinfo(5); empty if unknown."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return ""

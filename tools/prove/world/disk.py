"""The simulated disk of a host: a file system with the system calls that roles make, its times, faults and crashes.

`SimDisk(world, host)` mounts an empty one at `/disk` of the host. `disk_modules` passes the calls of the roles' modules
to the disk of the running process's host. A call takes virtual time, in which other threads run, before and after its
effect; a transfer of several pages may happen in two steps.

What is durable:

    written data, sizes         when an fsync or fdatasync has returned that began after the write, also with O_DIRECT
    O_DSYNC, O_SYNC             when the write has returned
    create, rename, unlink      when an fsync of the folder has returned that began afterwards
    end of a process            loses nothing; its descriptors are closed and its locks released
    crash of the machine        loses or tears everything else (`stored_files`)
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tools.prove.world.scheduler import ProcessState, SimThread, World
from tools.prove.world.stored_files import PAGE_NBYTES, SECTOR_NBYTES, File, StoredFolder

FIRST_FD = 1 << 20
"""Smallest descriptor of a file on a simulated disk; the system's own are smaller."""
_DEVICE = os.makedev(4000, 1)
_NAME_S, _CACHED_S, _DIRECT_S, _SYNC_S = 5e-6, 5e-6, 80e-6, 1e-3
_BYTES_PER_S = 2e9
_SLOW_MOMENT = 0.01  # of the operations take much longer
_AGAIN_S = 1e-3  # until a lock that is waited for is tried again


@dataclass(eq=False)
class OpenFile:
    """Open file description: what descriptors refer to."""

    path: str
    node: File | StoredFolder
    flags: int
    position: int = 0
    num_descriptors: int = 1

    @property
    def file(self) -> File:
        """The file. Raises IsADirectoryError."""
        if isinstance(self.node, StoredFolder):
            raise _error(errno.EISDIR, self.path)
        return self.node


def _error(number: int, path: str = "") -> OSError:
    return OSError(number, os.strerror(number), *([path] if path else []))


class SimDisk:
    """Disk of one host. Its attributes are faults, which may be changed at any time.

    Methods that have the name of a function of `os` do what it does; paths are absolute and normalised.
    """

    lies = False
    """A sync returns without making anything durable."""
    full = False
    """Writes that need more space fail; files keep the space that they have."""
    slow = 1.0
    """Factor of all times."""
    read_errors = 0.0
    """Probability that a read fails."""
    write_errors = 0.0
    """Probability that a direct write, a sync or a change of entries fails."""
    loses_writes = True
    """A failed sync loses writes for good, also those of others, as on Linux: later syncs succeed without them."""
    has_direct_io = True
    """Files can be opened with O_DIRECT."""
    has_async_io = True
    """Linux's asynchronous I/O can be set up."""

    def __init__(self, world: World, host: str, *, mount: str = "/disk", capacity_nbytes: int = 1 << 40) -> None:
        self.world, self.host, self.mount, self.capacity_nbytes = world, host, mount, capacity_nbytes
        self._numbers = 1
        self._root = StoredFolder(1, 0o700)
        self._opened: dict[ProcessState, dict[int, OpenFile]] = {}
        self._stalled = False
        self._waiting: list[SimThread] = []
        world.disks[host] = self

    # Faults

    @property
    def stalled(self) -> bool:
        """Nothing happens while this is true."""
        return self._stalled

    @stalled.setter
    def stalled(self, value: bool) -> None:
        self._stalled = value
        if not value:
            waiting, self._waiting = self._waiting, []
            for thread in waiting:
                self.world.wake(thread)

    def crash(self, rng: random.Random) -> None:
        """Crash the machine: its processes end, and the disk keeps what a disk may keep."""
        for process in self.world.processes:
            if process.host == self.host:
                process.end("loses power")
        self._root.crash(rng)

    def flip(self, rng: random.Random, *, under: str = "") -> str:
        """Flip one bit of a file whose path begins with `under`. Returns which; empty if nothing is stored."""
        files = [(path, file) for path, file in self._root.files(self.mount) if path.startswith(under)]
        rng.shuffle(files)
        for path, file in files:
            found = file.flip(rng)
            if found is not None:
                return f"{path} byte {found[0]} bit {found[1]}"
        return ""

    def make_folders(self, path: str) -> None:
        """Create a folder and those above it, durably, as an operator does before the roles start."""
        folder = self._root
        for name in self._names(path):
            if name not in folder.entries:
                folder.change({name: StoredFolder(self._next_number(), 0o700)})
                folder.make_durable(folder.last_change())
            found = folder.entries[name]
            assert isinstance(found, StoredFolder)
            folder = found

    def contents(self) -> dict[str, bytes]:
        """Return all files' contents as processes see them, by path."""
        return {path: file.read(0, file.size) for path, file in self._root.files(self.mount)}

    # System calls with a path

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        with self._operation(_NAME_S):
            if flags & os.O_DIRECT and not self.has_direct_io:
                raise _error(errno.EINVAL, path)
            if not self._names(path):
                return self._install(OpenFile(path, self._root, flags))
            folder, name = self._parent(path)
            node = folder.entries.get(name)
            if node is None:
                if not flags & os.O_CREAT:
                    raise _error(errno.ENOENT, path)
                self._check_change(path)
                node = File(self._next_number(), mode)
                folder.change({name: node})
            elif flags & os.O_CREAT and flags & os.O_EXCL:
                raise _error(errno.EEXIST, path)
            elif isinstance(node, StoredFolder) and flags & os.O_ACCMODE != os.O_RDONLY:
                raise _error(errno.EISDIR, path)
            elif isinstance(node, File) and flags & os.O_DIRECTORY:
                raise _error(errno.ENOTDIR, path)
            if flags & os.O_TRUNC and isinstance(node, File):
                node.truncate(0)
            return self._install(OpenFile(path, node, flags))

    def stat(self, path: str, *, follow_symlinks: bool = True) -> os.stat_result:
        with self._operation(_NAME_S):
            return _status(self._find(path))

    lstat = stat

    def chmod(self, path: str, mode: int) -> None:
        with self._operation(_NAME_S):
            self._find(path).mode = mode

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        with self._operation(_NAME_S):
            folder, name = self._parent(path)
            if name in folder.entries:
                raise _error(errno.EEXIST, path)
            self._check_change(path)
            folder.change({name: StoredFolder(self._next_number(), mode)})

    def unlink(self, path: str) -> None:
        self._remove(path, File, errno.EISDIR)

    remove = unlink

    def rmdir(self, path: str) -> None:
        self._remove(path, StoredFolder, errno.ENOTDIR)

    def rename(self, path: str, target: str) -> None:
        with self._operation(_NAME_S):
            folder, name = self._parent(path)
            to_folder, to_name = self._parent(target)
            if name not in folder.entries:
                raise _error(errno.ENOENT, path)
            node, old = folder.entries[name], to_folder.entries.get(to_name)
            if isinstance(old, StoredFolder) and (old.entries or isinstance(node, File)):
                raise _error(errno.ENOTEMPTY if old.entries else errno.EISDIR, target)
            if self._may_fail(self.write_errors):
                raise _error(errno.EIO, path)
            if folder is to_folder:
                folder.change({name: None, to_name: node})
            else:
                to_folder.change({to_name: node})
                folder.change({name: None})

    replace = rename

    def listdir(self, path: str) -> list[str]:
        with self._operation(_NAME_S):
            return list(self._folder(path).entries)

    def statvfs(self, path: str) -> os.statvfs_result:
        with self._operation(_NAME_S):
            self._find(path)
            total = self.capacity_nbytes // PAGE_NBYTES
            free = self._num_free_pages()
            return os.statvfs_result((PAGE_NBYTES, PAGE_NBYTES, total, free, free, 1 << 20, 1 << 20, 1 << 20, 0, 255))

    # System calls with a descriptor

    def close(self, fd: int) -> None:
        opened = self._of(fd)
        del self._table()[fd]
        self._let_go(opened)

    def dup(self, fd: int) -> int:
        opened = self._of(fd)
        opened.num_descriptors += 1
        return self._install(opened)

    def fstat(self, fd: int) -> os.stat_result:
        return _status(self._of(fd).node)

    def fchmod(self, fd: int, mode: int) -> None:
        self._of(fd).node.mode = mode

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        opened = self._of(fd)
        file, step = opened.file, self._first_step(offset, nbytes)
        self._check_access(opened, os.O_WRONLY)
        with self._operation(self._transfer_s(opened, nbytes)):
            if self._may_fail(self.read_errors):
                raise _error(errno.EIO, opened.path)
            data = file.read(offset, step)
            if step < nbytes:
                self._wait(_CACHED_S)
                data += file.read(offset + step, nbytes - step)
            return data

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        opened, view = self._of(fd), memoryview(data).cast("B")
        file, step = opened.file, self._first_step(offset, len(view))
        self._check_access(opened, os.O_RDONLY)
        with self._operation(self._transfer_s(opened, len(view))):
            if opened.flags & os.O_DIRECT and self._may_fail(self.write_errors):
                file.write(offset, view[: self.world.chance.randint(0, len(view)) // SECTOR_NBYTES * SECTOR_NBYTES])
                raise _error(errno.EIO, opened.path)
            view = self._fitting(file, offset, view)
            file.write(offset, view[:step])
            if step < len(view):
                self._wait(_CACHED_S)
                file.write(offset + step, view[step:])
        if opened.flags & (os.O_DSYNC | os.O_SYNC):
            self._sync(opened)
        return len(view)

    def read(self, fd: int, nbytes: int) -> bytes:
        opened = self._of(fd)
        data = self.pread(fd, nbytes, opened.position)
        opened.position += len(data)
        return data

    def write(self, fd: int, data: bytes | memoryview) -> int:
        opened = self._of(fd)
        if opened.flags & os.O_APPEND:
            opened.position = opened.file.size
        written = self.pwrite(fd, data, opened.position)
        opened.position += written
        return written

    def lseek(self, fd: int, position: int, whence: int = os.SEEK_SET) -> int:
        opened = self._of(fd)
        base = {os.SEEK_SET: 0, os.SEEK_CUR: opened.position, os.SEEK_END: opened.file.size}[whence]
        if base + position < 0:
            raise _error(errno.EINVAL)
        opened.position = base + position
        return opened.position

    def ftruncate(self, fd: int, nbytes: int) -> None:
        opened = self._of(fd)
        self._check_access(opened, os.O_RDONLY)
        with self._operation(_NAME_S):
            opened.file.truncate(nbytes)

    def posix_fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        opened = self._of(fd)
        self._check_access(opened, os.O_RDONLY)
        with self._operation(_NAME_S):
            if opened.file.num_new_pages(0, offset + nbytes) > self._num_free_pages():
                raise _error(errno.ENOSPC, opened.path)
            opened.file.reserve(offset + nbytes)

    def fsync(self, fd: int) -> None:
        self._sync(self._of(fd))

    fdatasync = fsync

    def flock(self, fd: int, operation: int) -> None:
        """As `fcntl.flock`."""
        opened = self._of(fd)
        locks = opened.file.locks
        if operation & fcntl.LOCK_UN:
            locks.pop(opened, None)
            return
        is_exclusive = bool(operation & fcntl.LOCK_EX)
        while any((is_exclusive or theirs) and holder is not opened for holder, theirs in locks.items()):
            if operation & fcntl.LOCK_NB:
                raise _error(errno.EAGAIN)
            self._wait(_AGAIN_S)
        locks[opened] = is_exclusive

    def path_of(self, fd: int) -> str:
        """Return the path with which a descriptor was opened."""
        return self._of(fd).path

    # Descriptors

    def _table(self) -> dict[int, OpenFile]:
        """Return the descriptors of the running process."""
        thread = self.world.current
        assert thread is not None, "the scheduler's callbacks have no descriptors"
        process = thread.process
        if process not in self._opened:
            self._opened[process] = {}
            process.at_death.append(lambda: self._close_all(process))
        return self._opened[process]

    def _close_all(self, process: ProcessState) -> None:
        for opened in self._opened.pop(process).values():
            self._let_go(opened)

    def _install(self, opened: OpenFile) -> int:
        table, fd = self._table(), FIRST_FD
        while fd in table:
            fd += 1
        table[fd] = opened
        return fd

    def _of(self, fd: int) -> OpenFile:
        opened = self._table().get(fd)
        if opened is None:
            raise _error(errno.EBADF)
        return opened

    @staticmethod
    def _let_go(opened: OpenFile) -> None:
        opened.num_descriptors -= 1
        if not opened.num_descriptors and isinstance(opened.node, File):
            opened.node.locks.pop(opened, None)

    @staticmethod
    def _check_access(opened: OpenFile, wrong: int) -> None:
        if opened.flags & os.O_ACCMODE == wrong:
            raise _error(errno.EBADF, opened.path)

    # Names

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _names(self, path: str) -> list[str]:
        return [name for name in path[len(self.mount) :].split("/") if name]

    def _find(self, path: str) -> File | StoredFolder:
        node: File | StoredFolder = self._root
        for name in self._names(path):
            if isinstance(node, File):
                raise _error(errno.ENOTDIR, path)
            if name not in node.entries:
                raise _error(errno.ENOENT, path)
            node = node.entries[name]
        return node

    def _folder(self, path: str) -> StoredFolder:
        node = self._find(path)
        if isinstance(node, File):
            raise _error(errno.ENOTDIR, path)
        return node

    def _parent(self, path: str) -> tuple[StoredFolder, str]:
        parent, _, name = path.rpartition("/")
        if not self._names(path):
            raise _error(errno.EBUSY, path)
        return self._folder(parent), name

    def _remove(self, path: str, kind: type[File | StoredFolder], wrong: int) -> None:
        with self._operation(_NAME_S):
            folder, name = self._parent(path)
            node = folder.entries.get(name)
            if node is None:
                raise _error(errno.ENOENT, path)
            if not isinstance(node, kind):
                raise _error(wrong, path)
            if isinstance(node, StoredFolder) and node.entries:
                raise _error(errno.ENOTEMPTY, path)
            if self._may_fail(self.write_errors):
                raise _error(errno.EIO, path)
            folder.change({name: None})

    # Space, times and faults

    def _num_free_pages(self) -> int:
        if self.full:
            return 0
        used = sum(file.num_pages for _, file in self._root.files(self.mount))
        return max(0, self.capacity_nbytes // PAGE_NBYTES - used)

    def _fitting(self, file: File, offset: int, view: memoryview) -> memoryview:
        """Return the part of a write for which there is space. Raises OSError if there is for none of it."""
        nbytes = len(view)
        if file.num_new_pages(offset, nbytes):
            free = self._num_free_pages()
            while nbytes > 0 and file.num_new_pages(offset, nbytes) > free:
                nbytes = (offset + nbytes - 1) // PAGE_NBYTES * PAGE_NBYTES - offset  # up to the page before
            if nbytes <= 0:
                raise _error(errno.ENOSPC)
        return view[:nbytes]

    def _check_change(self, path: str) -> None:
        if not self._num_free_pages():
            raise _error(errno.ENOSPC, path)
        if self._may_fail(self.write_errors):
            raise _error(errno.EIO, path)

    def _sync(self, opened: OpenFile) -> None:
        node = opened.node
        until = node.last_change()
        with self._operation(_SYNC_S):
            if self._may_fail(self.write_errors):
                if self.loses_writes:
                    node.lose_writes(self.world.chance)
                raise _error(errno.EIO, opened.path)
            if not self.lies:
                node.make_durable(until)

    def _may_fail(self, probability: float) -> bool:
        return probability > 0 and self.world.chance.random() < probability

    def _first_step(self, offset: int, nbytes: int) -> int:
        """Return how many bytes of a transfer come first; the others follow a moment later."""
        pages = (offset + nbytes - 1) // PAGE_NBYTES - offset // PAGE_NBYTES
        if pages < 1 or self.world.chance.random() < 0.75:
            return nbytes
        return (offset // PAGE_NBYTES + self.world.chance.randint(1, pages)) * PAGE_NBYTES - offset

    def _transfer_s(self, opened: OpenFile, nbytes: int) -> float:
        return (_DIRECT_S if opened.flags & os.O_DIRECT else _CACHED_S) + nbytes / _BYTES_PER_S

    @contextmanager
    def _operation(self, seconds: float) -> Iterator[None]:
        """Take the time of an operation, partly before and partly after its effect, which is the context's body."""
        chance = self.world.chance
        seconds *= 0.5 + chance.random()
        if chance.random() < _SLOW_MOMENT:
            seconds *= 20
        before = chance.random()
        self._wait(seconds * before)
        yield
        self._wait(seconds * (1 - before))

    def _wait(self, seconds: float) -> None:
        thread = self.world.current
        if thread is None:
            return
        self.world.park(seconds * self.slow)
        while self._stalled:
            self._waiting.append(thread)
            self.world.park()


def _status(node: File | StoredFolder) -> os.stat_result:
    is_file = isinstance(node, File)
    mode = (stat.S_IFREG if is_file else stat.S_IFDIR) | node.mode
    size, num_pages = (node.size, node.num_pages) if isinstance(node, File) else (PAGE_NBYTES, 1)
    fields = (mode, node.number, _DEVICE, 1 if is_file else 2, os.geteuid(), os.getegid(), size, 0, 0, 0)
    more = {"st_blocks": num_pages * PAGE_NBYTES // 512, "st_blksize": PAGE_NBYTES}
    return os.stat_result(fields, more)

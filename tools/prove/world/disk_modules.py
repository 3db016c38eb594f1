"""Replacements of the modules through which roles use files; `MODULES` is for `imports.install`.

Paths below the mount of the running process's host, and descriptors of files there, go to its disk; everything else
goes to the system. The standard library's own Python code (pathlib, shutil, os.path, most of os) runs as it is, with
the system calls below it replaced. Outside of simulated threads there are no simulated disks.

"""

from __future__ import annotations

import builtins
import errno
import fcntl as real_fcntl
import functools
import genericpath as real_genericpath
import glob as real_glob
import importlib.machinery
import importlib.util
import io as real_io
import os as real_os
import pathlib as real_pathlib
import posixpath as real_posixpath
import shutil as real_shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from tools.prove.world import scheduler
from tools.prove.world.disk import FIRST_FD, SimDisk
from tools.prove.world.scheduler import ProcessState

_FIRST_PID = 1 << 23  # greater than the system's


def running_process() -> ProcessState | None:
    """Return the simulated process that runs; None in the scheduler and outside of the simulation."""
    thread = None if scheduler._current is None else scheduler._current.current
    return None if thread is None else thread.process


def running_disk() -> SimDisk | None:
    """Return the disk of the running process's host; None if it has none."""
    process = running_process()
    return None if process is None else process.world.disks.get(process.host)


def _disk_of(fd: int) -> SimDisk:
    disk = running_disk()
    if disk is None:
        raise OSError(errno.EBADF, real_os.strerror(errno.EBADF))
    return disk


def _is_simulated(fd: Any) -> bool:
    return isinstance(fd, int) and fd >= FIRST_FD


def _locate(path: Any, dir_fd: int | None = None) -> tuple[SimDisk, str] | None:
    """Return the disk with this path, and the absolute path; None if it is none of a simulated disk."""
    disk = running_disk()
    if disk is None or isinstance(path, int):
        return None
    name = real_os.fsdecode(path)
    if dir_fd is not None and not name.startswith("/"):
        if dir_fd >= FIRST_FD:
            name = f"{disk.path_of(dir_fd)}/{name}"
        elif disk.mount.endswith(f"/{name}"):  # perhaps the mount, from the folder above it
            name = real_posixpath.join(real_os.readlink(f"/proc/self/fd/{dir_fd}"), name)
    if name != disk.mount and not name.startswith(f"{disk.mount}/"):
        return None
    return disk, real_posixpath.normpath(name)


# os


def _by_path(name: str) -> Callable[..., Any]:
    real = getattr(real_os, name)

    @functools.wraps(real)
    def call(path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
        found = _locate(path, dir_fd)
        if found is None:
            if _is_simulated(path):
                return getattr(os, f"f{name}")(path, *args)
            return real(path, *args, **options, **({} if dir_fd is None else {"dir_fd": dir_fd}))
        return getattr(found[0], name)(found[1], *args, **options)

    return call


def _by_fd(name: str) -> Callable[..., Any]:
    real = getattr(real_os, name)

    @functools.wraps(real)
    def call(fd: int, *args: Any, **options: Any) -> Any:
        return getattr(_disk_of(fd), name)(fd, *args, **options) if fd >= FIRST_FD else real(fd, *args, **options)

    return call


def _rename(source: Any, target: Any, **options: Any) -> None:
    found, other = _locate(source), _locate(target)
    if found is None and other is None:
        real_os.rename(source, target, **options)
    elif found is None or other is None:
        raise OSError(errno.EXDEV, real_os.strerror(errno.EXDEV))
    else:
        found[0].rename(found[1], other[1])


def _preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
    if fd < FIRST_FD:
        return real_os.preadv(fd, buffers, offset, flags)
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    data = _disk_of(fd).pread(fd, sum(map(len, views)), offset)
    left = data
    for view in views:
        part, left = left[: len(view)], left[len(view) :]
        view[: len(part)] = part
    return len(data)


class _FolderEntry:
    """Entry of a folder, as of `os.scandir`."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, real_posixpath.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        """Return the status of the file or folder."""
        return os.stat(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a folder."""
        return stat.S_ISDIR(self.stat().st_mode)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return True for a file."""
        return stat.S_ISREG(self.stat().st_mode)

    def is_symlink(self) -> bool:
        """Return False: there are no symbolic links on simulated disks."""
        return False

    def is_junction(self) -> bool:
        """Return False, as on every POSIX system."""
        return False


class _Entries:
    """Iterator of `os.scandir`."""

    def __init__(self, entries: list[_FolderEntry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_FolderEntry]:
        return self._entries

    def __next__(self) -> _FolderEntry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def close(self) -> None:
        """Nothing is open."""


def _scandir(path: Any = ".") -> Any:
    found = _locate(path)
    if found is None:
        return real_os.scandir(path)
    return _Entries([_FolderEntry(real_os.fsdecode(path), name) for name in found[0].listdir(found[1])])


def _getpid() -> int:
    process = running_process()
    return real_os.getpid() if process is None else _FIRST_PID + process.world.processes.index(process)


def _kill(pid: int, number: int) -> None:
    process = running_process()
    if process is None:
        raise RuntimeError("nothing but a simulated process may be killed here")
    if not 0 <= pid - _FIRST_PID < len(process.world.processes):
        raise ProcessLookupError(errno.ESRCH, real_os.strerror(errno.ESRCH))
    process.world.processes[pid - _FIRST_PID].end(f"killed by signal {int(number)}")


def _exit(status: int) -> None:
    process = running_process()
    if process is None:
        raise RuntimeError("nothing but a simulated process may exit here")
    process.end(f"exits at once with status {status}")


def _with_new_globals(module: ModuleType, **replaced: Any) -> ModuleType:
    """Return a copy of a module of functions, which use each other's copies and the replacements."""
    copy = ModuleType(module.__name__, module.__doc__)
    names = vars(copy)
    names.update({name: value for name, value in vars(module).items() if not name.startswith("__")})
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__globals__ is vars(module):
            function = FunctionType(value.__code__, names, name, value.__defaults__, value.__closure__)
            function.__kwdefaults__ = value.__kwdefaults__
            names[name] = function
    names.update(replaced)
    return copy


_PATH_CALLS = ("chmod", "listdir", "lstat", "mkdir", "open", "remove", "rmdir", "stat", "statvfs", "unlink")
_FD_CALLS = (
    *("close", "dup", "fchmod", "fdatasync", "fstat", "fsync", "ftruncate"),
    *("lseek", "posix_fallocate", "pread", "pwrite", "read", "write"),
)

os = _with_new_globals(
    real_os,
    **{name: _by_path(name) for name in _PATH_CALLS},
    **{name: _by_fd(name) for name in _FD_CALLS},
    rename=_rename,
    replace=_rename,
    preadv=_preadv,
    scandir=_scandir,
    getpid=_getpid,
    kill=_kill,
    _exit=_exit,
    setpriority=lambda which, who, priority: None,  # numbers of simulated threads are those of other real ones
    nice=lambda increment: 0,
)
"""The simulated `os`: files, and what concerns the process itself."""

_genericpath = _with_new_globals(real_genericpath, os=os)
path = _with_new_globals(real_genericpath, os=os)
_path_functions = {
    name: value for name, value in vars(_genericpath).items() if getattr(real_posixpath, name, None) is not value
}
path = _with_new_globals(
    real_posixpath,
    os=os,
    genericpath=_genericpath,
    **{name: vars(_genericpath)[name] for name in real_genericpath.__all__},
)
os.path = path  # type: ignore[attr-defined]


# Files as objects


class DiskFile(real_io.RawIOBase):
    """File object without a buffer. Once its process has ended, nothing reaches the disk."""

    def __init__(self, fd: int, mode: str, close_fd: bool) -> None:
        super().__init__()
        self._fd, self.mode, self._close_fd = fd, mode, close_fd
        self._owner = running_process()
        self.name: Any = fd

    @property
    def _is_lost(self) -> bool:
        return self._owner is None or self._owner.is_dead or running_process() is not self._owner

    def fileno(self) -> int:
        return self._fd

    def readable(self) -> bool:
        return "r" in self.mode or "+" in self.mode

    def writable(self) -> bool:
        return self.mode.strip("bt") != "r"

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = os.read(self._fd, len(view))
        view[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes if self._is_lost else int(os.write(self._fd, data))

    def seek(self, position: int, whence: int = 0) -> int:
        return int(os.lseek(self._fd, position, whence))

    def truncate(self, size: int | None = None) -> int:
        nbytes = self.tell() if size is None else size
        os.ftruncate(self._fd, nbytes)
        return nbytes

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self._close_fd and not self._is_lost:
                os.close(self._fd)


_OPEN_FLAGS = {
    "r": real_os.O_RDONLY,
    "w": real_os.O_WRONLY | real_os.O_CREAT | real_os.O_TRUNC,
    "a": real_os.O_WRONLY | real_os.O_CREAT | real_os.O_APPEND,
    "x": real_os.O_WRONLY | real_os.O_CREAT | real_os.O_EXCL,
}


def open_file(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """As the built-in `open`."""
    if not _is_simulated(file) and _locate(file) is None:
        return open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    kind = next(letter for letter in mode if letter in "rwax")
    if not _is_simulated(file):
        flags = _OPEN_FLAGS[kind] | real_os.O_CLOEXEC
        if "+" in mode:
            flags = flags & ~real_os.O_ACCMODE | real_os.O_RDWR
        file = os.open(file, flags, 0o666) if opener is None else opener(file, flags)
    raw = DiskFile(file, mode, closefd)
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else real_io.DEFAULT_BUFFER_SIZE
    buffered: Any
    if "+" in mode:
        buffered = real_io.BufferedRandom(raw, size)
    else:
        buffered = real_io.BufferedReader(raw, size) if kind == "r" else real_io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffered
    return real_io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)


io = _with_new_globals(real_io, open=open_file)
"""The simulated `io`."""


def _run_again(module: ModuleType, replaced: Mapping[str, ModuleType]) -> ModuleType:
    """Return a copy of a module of the standard library that imports the replacements; of a package, with its modules.

    pathlib is a package from Python 3.13 on.
    """
    known = dict(replaced)

    def import_(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        whole = importlib.util.resolve_name("." * level + name, (globals or {})["__package__"]) if level else name
        package, _, last = whole.rpartition(".")
        if package == module.__name__ and whole not in known:
            setattr(known[package], last, run(whole))
        return known[whole] if whole in known else builtins.__import__(name, globals, locals, fromlist, level)

    def run(name: str) -> ModuleType:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        copy = known[name] = importlib.util.module_from_spec(spec)
        copy.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_, "open": open_file}
        spec.loader.exec_module(copy)
        return copy

    return run(module.__name__)


def _flock(fd: Any, operation: int) -> None:
    number = fd if isinstance(fd, int) else fd.fileno()
    if number >= FIRST_FD:
        _disk_of(number).flock(number, operation)
    else:
        real_fcntl.flock(number, operation)


_builtins = ModuleType("builtins", builtins.__doc__)
vars(_builtins).update(vars(builtins), open=open_file)

_glob = _run_again(real_glob, {"os": os})

MODULES: dict[str, ModuleType] = {
    "builtins": _builtins,
    "fcntl": _with_new_globals(real_fcntl, flock=_flock),
    "glob": _glob,
    "io": io,
    "os": os,
    "os.path": path,
    "pathlib": _run_again(real_pathlib, {"os": os, "io": io, "glob": _glob, "posixpath": path}),
    "shutil": _run_again(real_shutil, {"os": os, "io": io}),
}
"""Replacements by name."""

"""Digests of checkpoints that were hashed before, so that a start of a worker need not hash all weights again.

A wrong digest would let KV of one model be used with another, so an entry counts only if nothing speaks against it:

- The files are the same ones, by path, device and inode, and unchanged by size, modification time and *change time*.
  The latter cannot be set, and the kernel renews it with every write and rename.
- Their file system keeps these times itself (`_TRUSTED`). Those of a network or of a program in user space may be
  somebody else's, and in a tmpfs a mapping can be written at any time without renewing them.
- They had not changed for `LEAST_AGE_S` when they were hashed: within the resolution of the times, or while a mapped
  page waits to be written back, a file can change without a new time. And they did not change while they were read.
- The entry has the right check sum, and is a file that only this user can write, in a folder that only this user can
  enter. Root and this user can forge it, as they can replace the weights.

Everything else means hashing again. What a disk silently returns wrongly is noticed by hashing only.
"""

import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from rpc.private_folder import open_private

log = logging.getLogger(__name__)

LEAST_AGE_S: Final = 60  # the kernel writes mapped pages back, and then notices further writes, after 30 to 35 s
_TRUSTED: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "overlay"})
_FORMAT: Final = 1
_MOST_NBYTES: Final = 1 << 20
_MOUNTS: Final = Path("/proc/self/mountinfo")


def default_folder() -> Path:
    """Return the folder of this user's entries. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moonpool" / "digests"


@dataclass(frozen=True)
class FileState:
    """A file and everything by which a change of it is noticed. `path` has no symbolic links."""

    path: str
    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Return the state of the file now. Raises OSError."""
        real = os.path.realpath(path)
        found = os.stat(real)
        return cls(real, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class CheckpointState:
    """The files of a checkpoint and the names of the tensors that are read, which the digest covers."""

    files: tuple[FileState, ...]
    tensors: str  # hex, hash of the names
    observed_ns: int  # Unix time before the files were looked at

    @classmethod
    def of(cls, paths: Iterable[Path], tensors: Iterable[str]) -> "CheckpointState":
        """Return the state of the files now. Raises OSError."""
        observed_ns = time.time_ns()
        files = tuple(FileState.of(path) for path in sorted(paths))
        return cls(files, blake3("\0".join(sorted(tensors)).encode()).hexdigest(), observed_ns)

    def changed_file(self) -> str | None:
        """Return the path of a file that has changed since; None if none has."""
        for file in self.files:
            try:
                is_same = FileState.of(Path(file.path)) == file
            except OSError:
                is_same = False
            if not is_same:
                return file.path
        return None

    @property
    def is_trusted(self) -> bool:
        """True if an unchanged state means unchanged contents, from now on."""
        newest_ns = max((max(file.modified_ns, file.changed_ns) for file in self.files), default=self.observed_ns)
        if self.observed_ns - newest_ns < LEAST_AGE_S * 10**9:
            return False
        mounts = _mounts()
        return all(_file_system(file.path, mounts) in _TRUSTED for file in self.files)

    def plain(self) -> dict[str, Any]:
        """Return what an entry must have in common with the checkpoint."""
        files = [[f.path, f.device, f.inode, f.nbytes, f.modified_ns, f.changed_ns] for f in self.files]
        return {"format": _FORMAT, "files": files, "tensors": self.tensors}

    @property
    def entry_name(self) -> str:
        """File name of the entry; that of changed files replaces the earlier one."""
        parts = [self.tensors, *(file.path for file in self.files)]
        return blake3("\0".join(parts).encode()).hexdigest(length=16) + ".json"


class DigestCache:
    """Entries in one folder. A folder that cannot be used safely has none and keeps none."""

    def __init__(self, folder: Path | None = None) -> None:
        self._given = folder

    @property
    def _folder(self) -> Path:
        return self._given or default_folder()

    def find(self, state: CheckpointState) -> bytes | None:
        """Return the digest of the checkpoint's tensors; None if it must be computed."""
        try:
            if not state.is_trusted:
                return None
            entry = json.loads(self._read(state.entry_name))
            digest, check = bytes.fromhex(entry.pop("digest")), entry.pop("check")
            if entry != state.plain() or len(digest) != blake3.digest_size or check != _check(state, digest):
                return None
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.info("the weights are hashed, since their cached digest cannot be used: %s", error)
            return None
        return digest

    def store(self, state: CheckpointState, digest: bytes) -> None:
        """Keep the digest of tensors that were hashed while the files had this state, if it can be trusted."""
        entry = {**state.plain(), "digest": digest.hex(), "check": _check(state, digest)}
        try:
            if state.is_trusted:
                self._write(state.entry_name, json.dumps(entry).encode())
        except (OSError, RuntimeError, ValueError) as error:
            log.info("the digest of the weights is not kept: %s", error)

    def _read(self, name: str) -> bytes:
        folder = open_private(self._folder)
        try:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
        with open(file, "rb") as stream:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(f"{self._folder / name} must be a file of this user with mode 0600")
            if found.st_size > _MOST_NBYTES:
                raise ValueError(f"{self._folder / name} has {found.st_size} bytes, expected at most {_MOST_NBYTES}")
            return stream.read()

    def _write(self, name: str, data: bytes) -> None:
        folder = open_private(self._folder, create=True)
        temporary = f".{name}.{os.getpid()}.{time.monotonic_ns()}"
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                with open(file, "wb") as stream:
                    stream.write(data)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(temporary, dir_fd=folder)
                raise
        finally:
            os.close(folder)


def _check(state: CheckpointState, digest: bytes) -> str:
    """Return the check sum of an entry."""
    return blake3(json.dumps(state.plain(), sort_keys=True).encode() + digest).hexdigest()


def _mounts() -> list[tuple[str, str]]:
    """Return (mount point, type of the file system) of all mounts, later ones over earlier ones. Raises OSError."""
    found = []
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        found.append((point, after.split()[0]))
    return found


def _file_system(path: str, mounts: Iterable[tuple[str, str]]) -> str:
    """Return the type of the file system that holds the path."""
    longest, kind = "", ""
    for point, of_type in mounts:
        if len(point) >= len(longest) and (path == point or path.startswith(point.rstrip("/") + "/")):
            longest, kind = point, of_type
    return kind

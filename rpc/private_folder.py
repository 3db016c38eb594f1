"""Folders and files that no other local user can read, prepare or replace.

A path is walked from the root, one directory descriptor at a time, so that what was checked is what is used. Every
folder on it must belong to root or to this user, and others may write to it only if its sticky bit keeps them from
replacing what they do not own, as in /tmp. A symbolic link is followed only if root or this user made it.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

_FOLDER: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS: Final = 40
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class UnsafePath(OSError):
    """Another user could read or replace what is at a path."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EPERM, text)

    def __str__(self) -> str:
        return str(self.strerror)


def open_trusted(folder: Path) -> int:
    """Return a descriptor of a folder in which only this user and root can change files. Raises OSError, UnsafePath."""
    return _walk(folder, create=False, private=False)


def open_private(folder: Path, *, create: bool = False) -> int:
    """Return a descriptor of a folder that only this user can enter. Raises OSError, UnsafePath.

    With `create`, missing folders on the path are created with mode 0700.
    """
    return _walk(folder, create=create, private=True)


def check_private(status: os.stat_result, folder: Path) -> None:
    """Raise UnsafePath unless the status, as of `lstat`, is that of a folder of this user with mode 0700."""
    if stat.S_ISLNK(status.st_mode):
        raise UnsafePath(f"{folder} is a symbolic link: remove it, or name the folder to which it points")
    if status.st_uid != os.geteuid():
        raise UnsafePath(
            f"{folder} belongs to user {status.st_uid}, not to user {os.geteuid()} of this process: have it removed"
        )
    if status.st_mode & _OTHERS:
        raise UnsafePath(
            f"{folder} has mode {stat.S_IMODE(status.st_mode):04o}, so that other users can enter it: look at what is "
            f"inside, then `chmod 700 {folder}`"
        )


def create_private(path: Path) -> int:
    """Create a file of mode 0600 in a private folder, in place of one of that name; return a descriptor to write to."""
    folder = open_private(path.parent)
    try:
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return os.open(
            path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
    finally:
        os.close(folder)


def _walk(folder: Path, *, create: bool, private: bool) -> int:
    left = list(reversed(folder.absolute().parts[1:]))
    here, passed, num_links = os.open("/", _FOLDER), Path("/"), 0
    try:
        while left:
            name = left.pop()
            status = _status(name, here, create=create)
            if stat.S_ISLNK(status.st_mode):
                if private and not left:
                    check_private(status, passed / name)
                if status.st_uid not in (0, os.geteuid()):
                    raise UnsafePath(f"{passed / name} is a symbolic link of user {status.st_uid}: have it removed")
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
                target = Path(os.readlink(name, dir_fd=here))
                if target.is_absolute():
                    here, passed = _step("/", here), Path("/")
                left += reversed([part for part in target.parts if part != "/"])
                continue
            here, passed = _step(name, here), passed / name
            if private and not left:
                check_private(os.fstat(here), passed)
            else:
                _check_trusted(os.fstat(here), passed)
    except BaseException:
        os.close(here)
        raise
    return here


def _status(name: str, here: int, *, create: bool) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        if not create:
            raise
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=here)
        return os.stat(name, dir_fd=here, follow_symlinks=False)


def _step(name: str, here: int) -> int:
    """Return a descriptor of the folder `name` in the folder `here`, which is closed."""
    there = os.open(name, _FOLDER, dir_fd=here)
    os.close(here)
    return there


def _check_trusted(status: os.stat_result, folder: Path) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise UnsafePath(f"{folder} belongs to user {status.st_uid}, who can replace what is inside: have it removed")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX and not _is_of_pod(status):
        raise UnsafePath(
            f"{folder} has mode {stat.S_IMODE(status.st_mode):04o}: every user can replace what is inside; set its "
            f"sticky bit (`chmod +t {folder}`)"
        )


def _is_of_pod(status: os.stat_result) -> bool:
    """Return True for a volume of a Kubernetes pod: an emptyDir has mode 0777, and only the pod's containers see it."""
    return status.st_uid == 0 and "KUBERNETES_SERVICE_HOST" in os.environ

"""Unix socket paths: removes a dead owner's socket, never a live one's."""

import os
import socket
import stat
from pathlib import Path

from rpc.errors import AddressInUse, BindFailed

MAX_UNIX_PATH_NBYTES = 107


def claim_socket(path: Path) -> None:
    """Make `path` free to bind. Raises AddressInUse if a process listens there, BindFailed if it cannot be bound."""
    if len(os.fsencode(path)) > MAX_UNIX_PATH_NBYTES:
        raise BindFailed(
            f"{path} is longer than a unix socket's {MAX_UNIX_PATH_NBYTES} bytes: take a shorter directory"
        )
    if not path.parent.is_dir():
        raise BindFailed(f"cannot listen at {path}: {path.parent} is not a directory")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise AddressInUse(f"cannot listen at {path}: a file that is no socket has this path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            # Its backlog is full, so it is alive.
            pass
    raise AddressInUse(f"cannot listen at {path}: another process listens there; stop it or take another path")


def identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the socket at `path`, None if there is none; distinguishes our socket from a
    successor's."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino

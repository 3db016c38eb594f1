"""Unix socket paths: removal of a dead owner's socket, never of a live one's."""

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
            f"path of a unix socket must be at most {MAX_UNIX_PATH_NBYTES} bytes, got {path}: choose a shorter one"
        )
    if not path.parent.is_dir():
        raise BindFailed(f"cannot listen at {path}: {path.parent} is not a directory")
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise AddressInUse(f"cannot listen at {path}: the path exists and is not a socket")
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
    raise AddressInUse(f"cannot listen at {path}: another process listens there; stop it, or choose another path")


def identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the socket at `path`, which identify it; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino

"""Unix sockets: removal of a dead owner's path, never of a live one's, and the user at the other end."""

import os
import socket
import stat
import struct
from pathlib import Path

from rpc.errors import AddressInUse, BindFailed

MAX_UNIX_PATH_NBYTES = 107
_CREDENTIALS = struct.Struct("@iII")  # unix(7): pid, uid, gid


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


def require_own_user(sock: socket.socket) -> None:
    """Raise PermissionError unless the process that connected to, or listens at, the other end runs as this user."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"the process at the other end runs as user {uid}, but only user {os.geteuid()} may")


def identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the socket at `path`, which identify it; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino

"""Run directory: the folder of a cluster's sockets, logs and ready file, and the lock on it."""

import fcntl
import os
import tempfile
from pathlib import Path
from types import TracebackType

from moonpool.errors import ConfigError, RunDirInUse
from rpc.private_folder import UnsafePath, open_private
from settings.node import SUPERVISOR_SOCKET

OBJECTIVES = "objectives"  # folder of the objectives' versions, in the run directory or the state folder
LONGEST_SOCKET_NAME = 40  # bytes for file names inside; a unix socket's path has at most 107
_MAX_SOCKET_PATH_NBYTES = 107


def default_run_dir(name: str) -> Path:
    """Return moonpool-UID/NAME in XDG_RUNTIME_DIR or the temporary folder: the same in every run."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"moonpool-{os.getuid()}" / name


def make_run_dir(path: Path) -> Path:
    """Create `path`, which only this user can enter, unless it exists.

    Raises RunDirInUse if another user made it or a folder on the way, or could do so; ConfigError for a bad path.
    """
    path = path.absolute()
    if len(os.fsencode(path)) + 1 + LONGEST_SOCKET_NAME > _MAX_SOCKET_PATH_NBYTES:
        raise ConfigError(
            f"the run directory {path} is too long for unix sockets; give a shorter --run-dir, "
            f"at most {_MAX_SOCKET_PATH_NBYTES - 1 - LONGEST_SOCKET_NAME} bytes"
        )
    try:
        os.close(open_private(path, create=True))
    except UnsafePath as error:
        raise RunDirInUse(f"the run directory {path} cannot be used: {error}; or give another --run-dir") from error
    except OSError as error:
        raise ConfigError(f"cannot make the run directory {path}: {error}") from error
    return path


def supervisor_target(run_dir: Path) -> str:
    """Return the gRPC address at which the cluster of this run directory accepts changes."""
    return f"unix:{run_dir / SUPERVISOR_SOCKET}"


class RunDirLock:
    """Lock on a run directory; the kernel releases it when the process ends."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "serve.lock"
        self._file = -1

    def __enter__(self) -> "RunDirLock":
        folder = open_private(self._path.parent)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(self._path.name, flags, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._file, 32, 0).decode().strip()
            os.close(self._file)
            raise RunDirInUse(
                f"the run directory {self._path.parent} is in use by the cluster of process {owner}; "
                "stop it, or give another --run-dir"
            ) from None
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

"""Listening socket that several frontends of one host inherit; the one that holds a lock accepts connections.

The socket belongs to the supervisor, so that the port has a listener as long as the cluster runs: connections wait in
its backlog while no frontend accepts. The kernel releases the lock at the death of the process that holds it, and the
next frontend takes it at once.
"""

import asyncio
import fcntl
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from frontend.errors import FrontendConfigError


class SharedListener:
    """One frontend's part in the shared socket. Call `close` after use."""

    def __init__(self, descriptor: int, lock_path: Path) -> None:
        """Take over the inherited descriptor. Raises FrontendConfigError if it is not a listening socket."""
        try:
            self.socket = socket.socket(fileno=descriptor)
            is_listening = bool(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        except OSError as error:
            raise FrontendConfigError(f"descriptor {descriptor} cannot be used as a socket: {error}") from error
        if not is_listening:
            self.socket.close()
            raise FrontendConfigError(f"descriptor {descriptor} must be a listening socket")
        self.socket.set_inheritable(False)
        self.socket.setblocking(False)
        # A POSIX lock, not flock: it belongs to this process alone, even if a child still has the descriptor.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(lock_path, flags, 0o600)

    def try_take(self) -> bool:
        """Take the lock and return True; return False if another frontend holds it."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    async def take(self) -> None:
        """Wait until this process holds the lock. The waiting thread ends with the process."""
        loop = asyncio.get_running_loop()
        taken = asyncio.Event()

        def wait() -> None:
            fcntl.lockf(self._lock, fcntl.LOCK_EX)
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(taken.set)

        threading.Thread(target=wait, name="stand-by", daemon=True).start()
        await taken.wait()

    def close(self) -> None:
        """Close the socket. The lock is kept until the process ends: requests may still be running."""
        self.socket.close()

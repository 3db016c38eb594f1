"""The pool node's door for processes of its host: hands over the arena and its index, takes puts, touches, reports.

A unix socket of mode 0600 in the node's socket folder. All runs in the node's event loop, without gRPC, so that a put
is one short round trip; only long copies run in threads. A caller that breaks the protocol is told so and sent away;
the node takes no harm from what callers send.
"""

import asyncio
import errno
import hashlib
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvpool.local.connection import LANDING_NBYTES, Connection
from kvpool.local.intake import Intake
from kvpool.local.mapping import Mapped
from kvpool.local.shared_index import SharedIndex
from kvpool.node import PoolNode
from rpc import unix_path
from rpc.errors import BindFailed

__all__ = ["Door", "open_door"]

_log = logging.getLogger(__name__)

_MAX_CALLERS = 256
_COPY_THREADS = 2
_AGAIN_S = 1.0  # after which callers are taken again when there was no room for another descriptor


async def open_door(node: PoolNode) -> "Door | None":
    """A started node's door, in the folder of its messenger's socket; None where it has none (tcp alone).

    Raises AddressInUse or BindFailed.
    """
    shm_socket = node.messenger.endpoint.shm_socket
    if not shm_socket:
        return None
    door = Door(node, await asyncio.to_thread(_ready_index, node.incarnation), Path(shm_socket).parent)
    door.open()
    return door


class Door:
    """Serves one PoolNode, from `open` to `close`."""

    def __init__(self, node: PoolNode, index: SharedIndex, folder: Path) -> None:
        self.node = node
        self.index = index
        name = hashlib.blake2b(node.config.node_id.encode(), digest_size=8).hexdigest()
        self.path = folder / f"d-{name}.sock"
        self.threads = ThreadPoolExecutor(_COPY_THREADS, "moonpool-door")
        self.intake = Intake(node, Mapped.of(node.memory.array), self.threads)
        self.callers: set[Connection] = set()
        self._landing = memoryview(bytearray(LANDING_NBYTES))
        self._identity: tuple[int, int] | None = None

    def open(self) -> None:
        """Listen. Raises AddressInUse or BindFailed."""
        unix_path.claim(self.path)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.setblocking(False)
            before = os.umask(0o177)
            try:
                self._listener.bind(os.fspath(self.path))
            finally:
                os.umask(before)
            self._listener.listen(64)
        except OSError as error:
            self._listener.close()
            raise BindFailed(f"cannot listen at {self.path}: {error}") from error
        self._identity = unix_path.identity(self.path)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
        self.node.index, self.node.door = self.index, os.fspath(self.path)
        self.node.tell()

    async def close(self) -> None:
        """Send everybody away; readers see at once that the index is closed."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        if unix_path.identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        callers = list(self.callers)
        for caller in callers:
            caller.close()
        await asyncio.gather(*(caller.putting for caller in callers if caller.putting is not None))
        self.node.index, self.node.door = None, ""
        self.index.close()
        await asyncio.to_thread(self.threads.shutdown)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED):
                _log.warning("the host door could not take a caller: %s", error)
                self._pause()
            return
        if len(self.callers) >= _MAX_CALLERS:
            _log.warning("the host door turned a caller away: %d are here", len(self.callers))
            sock.close()
            return
        self.callers.add(Connection(sock, self.node, self.index, self.intake, self._landing, self.callers.discard))

    def _pause(self) -> None:
        """Whoever waits to be taken would wake the loop again at once."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(_AGAIN_S, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)


def _ready_index(incarnation: int) -> SharedIndex:
    """An empty index, with all that the door needs compiled: that takes a moment once per installation."""
    from kvpool.local.copy_kernels import copy_kernel

    copy_kernel()
    return SharedIndex(incarnation)

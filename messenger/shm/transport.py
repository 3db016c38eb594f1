"""The shm transport: peers of one host map each other's regions, read-only, and every process writes its own memory.

A region's descriptor crosses the unix socket once per connection. Then a write is a short frame, and the owner copies
out of the caller's region into its own; a read asks the owner's leave (which brings the mapping the first time), copies
out of the owner's region, and asks again: leave given after the copy means that the key was good all along, and the
first answer is kept, so that later reads under the key ask only once.

Thus nothing but the owner ever changes its memory: a writer that is stopped or killed in the middle holds up no revoke,
a revoke need not wait for readers (they learn that what they copied is void), and a caller whose deadline passed reads
nothing into its memory later. What a mapping can outlive is the peer: bytes read after that are not confirmed.
"""

import contextlib
import hashlib
import os
import socket
import tempfile
from pathlib import Path

from messenger.config import Endpoint
from messenger.link import Link
from messenger.shm.requester import ShmRequester
from messenger.shm.responder import ShmResponder
from messenger.sockets import SocketLink
from messenger.transport import Door, Requester, Responder, Transport
from rpc import unix_path
from rpc.errors import BindFailed


class ShmTransport(Transport, Door):
    """`path` is the unix socket's. It is a node's own, so a successor takes its place, and a double is found out."""

    name = "shm"

    def __init__(self, run_dir: Path | None, node_id: str) -> None:
        self._own_dir = Path(tempfile.mkdtemp(prefix="moonpool-")) if run_dir is None else None
        self.path = (
            run_dir or self._own_dir or Path()
        ) / f"m-{hashlib.blake2b(node_id.encode(), digest_size=8).hexdigest()}.sock"
        self._identity: tuple[int, int] | None = None

    def listen(self, backlog: int) -> socket.socket:
        # Numba takes long to import: a process without shm does not wait for it.
        from messenger.copying import copy_rows

        self._copy_rows = copy_rows()
        unix_path.claim(self.path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(os.fspath(self.path))
            os.chmod(self.path, 0o600)
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            raise BindFailed(f"cannot listen at {self.path}: {error}") from error
        self._identity = unix_path.identity(self.path)
        return listener

    def unlisten(self) -> None:
        if unix_path.identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        if self._own_dir is not None:
            with contextlib.suppress(FileNotFoundError):  # whatever tidies temporary folders was there first
                self._own_dir.rmdir()

    def address_of(self, endpoint: Endpoint) -> str:
        return endpoint.shm_socket

    def new_socket(self, endpoint: Endpoint) -> socket.socket:
        return socket.socket(socket.AF_UNIX)

    def connect(self, sock: socket.socket, endpoint: Endpoint) -> None:
        sock.connect(endpoint.shm_socket)

    def requester(self, link: Link) -> Requester:
        return ShmRequester(_of_sockets(link), self._copy_rows)

    def responder(self, link: Link) -> Responder:
        return ShmResponder(_of_sockets(link), self._copy_rows)


def _of_sockets(link: Link) -> SocketLink:
    assert isinstance(link, SocketLink)
    return link

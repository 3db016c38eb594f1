"""Contender of benchmarks/messenger.py: a straightforward Python socket stream.

Each slice has a header of 17 bytes; bytes are sent with sendall and received with recv_into, and one byte acknowledges
the whole batch; a read sends only headers. Both sides use TCP_NODELAY.
"""

import socket
import struct
import sys

import numpy as np
from contest import REGION_NBYTES, Contender, Owner, Rows, Start, Wait, random_bytes, ready, serve

HEADER = struct.Struct("<QQ?")  # offset, bytes (marked by READ for reads), True for the last slice of the batch
READ = 1 << 63


class PlainStream(Contender):
    def __init__(self) -> None:
        self._owner = Owner(__file__)
        self._sock = socket.create_connection(("127.0.0.1", self._owner.told["port"]))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.local = np.empty(REGION_NBYTES, np.uint8)
        random_bytes(self.local)
        self._view = memoryview(self.local)  # type: ignore[arg-type]

    def prepare(self, rows: Rows, *, write: bool) -> Start:
        local = [self._view[offset : offset + nbytes] for offset, _, nbytes in rows]
        last = len(rows) - 1
        headers = [
            HEADER.pack(remote, nbytes | (0 if write else READ), i == last)
            for i, (_, remote, nbytes) in enumerate(rows)
        ]
        together = b"".join(headers)

        def send() -> Wait:
            for header, view in zip(headers, local, strict=True):
                self._sock.sendall(header)
                self._sock.sendall(view)
            return self._acknowledged

        def ask() -> Wait:
            self._sock.sendall(together)
            return take

        def take() -> None:
            for view in local:
                receive(self._sock, view)

        return send if write else ask

    def _acknowledged(self) -> None:
        if not self._sock.recv(1):
            raise ConnectionError("the plain stream's owner ended")

    def close(self) -> None:
        self._sock.close()
        self._owner.close()


def receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        received = sock.recv_into(view)
        if not received:
            raise ConnectionError("the plain stream's other side ended")
        view = view[received:]


def own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready({"port": listener.getsockname()[1]})
        sock, _ = listener.accept()
    array = np.empty(REGION_NBYTES, np.uint8)
    random_bytes(array)
    memory = memoryview(array)  # type: ignore[arg-type]
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(header := sock.recv(HEADER.size, socket.MSG_WAITALL)) == HEADER.size:
            offset, nbytes, last = HEADER.unpack(header)
            if nbytes & READ:
                sock.sendall(memory[offset : offset + (nbytes ^ READ)])
                continue
            receive(sock, memory[offset : offset + nbytes])
            if last:
                sock.sendall(b"a")


if __name__ == "__main__":
    own() if sys.argv[1:] == ["owner"] else serve(PlainStream())

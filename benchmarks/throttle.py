"""TCP proxy that forwards at a bounded rate: a slow network for benchmarks, without privileges.

It listens on another loopback address than the server, with the same port, so that a node that advertises that address
is reached only through it.
"""

import contextlib
import socket
import threading
import time

_PIECE_NBYTES = 64 << 10
_CATCH_UP_S = 0.002  # late wake-ups are made up for by at most this


class ThrottledProxy:
    """Proxy from `listen` to `server`, which share a port. All connections share `bytes_per_s`, in each direction."""

    def __init__(self, listen: str, server: str, port: int) -> None:
        self.bytes_per_s = 0.0  # 0: as fast as possible
        self._server = (server, port)
        self._locks = (threading.Lock(), threading.Lock())
        self._carried = [0, 0]  # bytes per direction
        self._free_at = [0.0, 0.0]  # per direction, time.monotonic() instant at which the wire is free
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server((listen, port))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def carried_bytes(self) -> int:
        """Bytes forwarded so far, in both directions."""
        return sum(self._carried)

    def close(self) -> None:
        """Close the listener and all connections."""
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._server)
            except OSError:
                near.close()
                continue
            self._sockets |= {near, far}
            for direction, (source, target) in enumerate(((near, far), (far, near))):
                target.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._forward, args=(direction, source, target), daemon=True).start()

    def _forward(self, direction: int, source: socket.socket, target: socket.socket) -> None:
        piece = bytearray(_PIECE_NBYTES)
        view = memoryview(piece)
        with contextlib.suppress(OSError):
            while count := source.recv_into(piece):
                self._take_turn(direction, count)
                target.sendall(view[:count])
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _take_turn(self, direction: int, nbytes: int) -> None:
        """Wait until the wire has carried `nbytes` bytes."""
        with self._locks[direction]:
            self._carried[direction] += nbytes
            if not self.bytes_per_s:
                return
            begin = max(self._free_at[direction], time.monotonic() - _CATCH_UP_S)
            self._free_at[direction] = end = begin + nbytes / self.bytes_per_s
        left_s = end - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)

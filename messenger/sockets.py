"""Links over a plain socket: frames, scattered payloads and passed descriptors, by system calls without the GIL.

Threads and lifetimes are those of `messenger.link`.
"""

import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from messenger.errors import ProtocolError
from messenger.frames import ACK_NBYTES, Frame, Message, encode
from messenger.link import BufferedLink, LinkClosed
from messenger.memory import Region

if TYPE_CHECKING:
    from messenger.native.socket_io import NativeReceiver

__all__ = ["SocketLink"]

# Linux's IOV_MAX, less one for the header.
_MAX_VIEWS = 1023
_MAX_PASSED_FDS = 64
_ANCILLARY_NBYTES = socket.CMSG_SPACE(4 * _MAX_PASSED_FDS)


class SocketLink(BufferedLink):
    """Link over unencrypted tcp or a unix socket."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        super().__init__(sock, address)
        self._fds: deque[int] = deque()
        self._rest: list[memoryview] = []
        self._receiver: NativeReceiver | None = None

    def send(self, message: Message | Frame, views: Sequence[memoryview] = (), fd: int | None = None) -> None:
        """Send a frame, then the views' bytes; `fd` is passed with the frame's first byte. Raises OSError when cut."""
        header = encode(message)
        if fd is not None:
            # The descriptor goes with a single byte, so that a partial send cannot pass it twice.
            socket.send_fds(self._sock, [header[:1]], [fd])
            self._sock.sendall(header[1:])
        elif not views:
            self._sock.sendall(header)
        else:
            pending = [memoryview(header), *views]
            for first in range(0, len(pending), _MAX_VIEWS):
                self._send_views(pending[first : first + _MAX_VIEWS])

    def begin(self, frame: Frame, views: Sequence[memoryview] = ()) -> bool:
        if not views:
            try:
                sent = self._sock.send(frame, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            if sent == len(frame):
                return True
            self._rest = [memoryview(frame)[sent:]]
            return False
        pending = [memoryview(frame), *views]
        while pending:
            chunk = pending if len(pending) <= _MAX_VIEWS else pending[:_MAX_VIEWS]
            try:
                sent = self._sock.sendmsg(chunk, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._rest = pending
                return False
            pending = [*_advanced(chunk, sent), *pending[len(chunk) :]]
        return True

    def finish(self) -> None:
        pending, self._rest = self._rest, []
        for first in range(0, len(pending), _MAX_VIEWS):
            self._send_views(pending[first : first + _MAX_VIEWS])

    def receive_rows(self, region: Region, rows: bytes, nbytes: int) -> None:
        self._native().receive(region.address, rows, nbytes)

    @property
    def is_unix(self) -> bool:
        """True for a unix socket."""
        return self._is_unix

    def keep_fds(self, fds: Sequence[int]) -> None:
        """Keep received descriptors for `take_fd`. Raises ProtocolError if there are too many."""
        self._fds.extend(fds)
        if len(self._fds) > _MAX_PASSED_FDS:
            raise ProtocolError(f"received more than {_MAX_PASSED_FDS} descriptors without an offer")

    def take_fd(self) -> int:
        """Return the next received descriptor, which the caller then owns. Raises ProtocolError if there is none."""
        if not self._fds:
            raise ProtocolError("received an offer of memory without its descriptor")
        return self._fds.popleft()

    def close(self, *, reset: bool = False) -> None:
        super().close(reset=reset)
        while self._fds:
            os.close(self._fds.popleft())

    def _send_views(self, views: list[memoryview]) -> None:
        while views:
            sent = self._sock.sendmsg(views)
            views = _advanced(views, sent)

    def _receive_views(self, views: list[memoryview]) -> None:
        # On a unix socket, descriptors may come with the next frame, and would be lost without room for them.
        if not self._is_unix and 0 < len(views) < _MAX_VIEWS:
            views = self._receive_with_next(views)
        for first in range(0, len(views), _MAX_VIEWS):
            pending = views[first : first + _MAX_VIEWS]
            while pending:
                received = self._sock.recvmsg_into(pending, 0, socket.MSG_WAITALL)[0]
                if not received:
                    raise LinkClosed(f"{self.address} closed in the middle of a payload")
                pending = _advanced(pending, received)

    def _receive_with_next(self, views: list[memoryview]) -> list[memoryview]:
        """Receive what is there, including the next frame's first bytes. Returns the unfilled rest of the views."""
        nbytes = sum(map(len, views))
        received = self._sock.recvmsg_into([*views, self._buffer[:ACK_NBYTES]])[0]
        if not received:
            raise LinkClosed(f"{self.address} closed in the middle of a payload")
        if received < nbytes:
            return _advanced(views, received)
        self._start, self._end = 0, received - nbytes
        return []

    def _native(self) -> "NativeReceiver":
        if self._receiver is None:
            from messenger.native.socket_io import NativeReceiver

            self._receiver = NativeReceiver(self, is_unix=self._is_unix)
        return self._receiver

    def _receive_some(self, view: memoryview) -> int:
        if self.polls and self._until_s is None:
            received, fds = (self._receiver or self._native()).receive_some(self._buffer, self._end, len(view))
            if fds:
                self.keep_fds(fds)
            return received
        if not self._is_unix:
            return self._sock.recv_into(view)
        received, ancillary, _, _ = self._sock.recvmsg_into([view], _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.keep_fds(struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4]))
        return received


def _advanced(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return the rest of the views after their first `nbytes` bytes."""
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return []

"""One connected socket: frames, scattered payloads and passed descriptors, by blocking calls outside the GIL.

One thread receives and one thread sends at a time; `cut` may be called from any thread and ends both.
"""

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from messenger.errors import ProtocolError
from messenger.frames import Message, decode_body, decode_prefix, encode
from messenger.framing import PREFIX
from messenger.link import Link, LinkClosed

__all__ = ["SocketLink"]

_BUFFER_NBYTES = 16 << 10
_SCRATCH_NBYTES = 64 << 10
# Linux's IOV_MAX, less one for the header.
_MAX_VIEWS = 1023
_MAX_PASSED_FDS = 64
_ANCILLARY_NBYTES = socket.CMSG_SPACE(4 * _MAX_PASSED_FDS)
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class SocketLink(Link):
    """Takes over `sock`; `address` names the other side in errors and logs."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.address = address
        self._sock = sock
        self._is_unix = sock.family == socket.AF_UNIX
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))
        self._start = 0
        self._end = 0
        self._fds: deque[int] = deque()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLRDHUP)
        if not self._is_unix:
            _tune_tcp(sock)

    def set_timeout(self, timeout_s: float | None) -> None:
        """For the handshake only: payloads are moved by calls that block without limit, which `cut` ends."""
        self._sock.settimeout(timeout_s)

    def connect(self, connect: Callable[[socket.socket], None]) -> None:
        """Connect the socket, within the time limit."""
        connect(self._sock)

    def send(self, message: Message, views: Sequence[memoryview] = (), fd: int | None = None) -> None:
        """Send a frame, then the views' bytes; `fd` travels with the frame's first byte. Raises OSError when cut."""
        header = encode(message)
        if fd is not None:
            # The descriptor goes with the one byte, so a partial send cannot pass it twice.
            socket.send_fds(self._sock, [header[:1]], [fd])
            self._sock.sendall(header[1:])
        elif not views:
            self._sock.sendall(header)
        else:
            pending = [memoryview(header), *views]
            for first in range(0, len(pending), _MAX_VIEWS):
                self._send_views(pending[first : first + _MAX_VIEWS])

    def receive(self) -> Message:
        """The next frame. Raises ProtocolError for bytes that are none, LinkClosed or OSError when the link ended."""
        self._fill(PREFIX.size)
        kind, length = decode_prefix(self._buffer[self._start : self._start + PREFIX.size])
        self._start += PREFIX.size
        if length <= _BUFFER_NBYTES:
            self._fill(length)
            body = self._buffer[self._start : self._start + length]
            self._start += length
            return decode_body(kind, body)
        large = memoryview(bytearray(length))
        self.receive_into([large])
        return decode_body(kind, large)

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """Fill the views in order with the bytes that follow the last frame."""
        pending = list(views)
        taken = 0
        while taken < len(pending) and self._start < self._end:
            view = pending[taken]
            buffered = min(len(view), self._end - self._start)
            view[:buffered] = self._buffer[self._start : self._start + buffered]
            self._start += buffered
            if buffered < len(view):
                pending[taken] = view[buffered:]
            else:
                taken += 1
        for first in range(taken, len(pending), _MAX_VIEWS):
            self._receive_views(pending[first : first + _MAX_VIEWS])

    def drain(self, nbytes: int) -> None:
        """Read and forget the next bytes."""
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_NBYTES)))
        while nbytes:
            step = min(nbytes, len(scratch))
            self.receive_into([scratch[:step]])
            nbytes -= step

    def take_fd(self) -> int:
        """The next descriptor that came with a frame; the caller owns it."""
        if not self._fds:
            raise ProtocolError("an offer of memory came without its descriptor")
        return self._fds.popleft()

    def peer_is_gone(self) -> bool:
        """Whether the other side closed, cut or died, even though bytes of it may still be unread."""
        return bool(self._poll.poll(0))

    def cut(self) -> None:
        """End the link: blocked calls of any thread return with an error. The descriptor stays until `close`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self, *, reset: bool = False) -> None:
        """Free the socket once no thread uses it; `reset` also discards what the kernel has not sent yet."""
        if reset and not self._is_unix:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            except OSError:
                pass
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    def _send_views(self, views: list[memoryview]) -> None:
        while views:
            sent = self._sock.sendmsg(views)
            views = _advanced(views, sent)

    def _receive_views(self, views: list[memoryview]) -> None:
        while views:
            received = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            if not received:
                raise LinkClosed(f"{self.address} closed in the middle of a payload")
            views = _advanced(views, received)

    def _fill(self, nbytes: int) -> None:
        """Have at least so many bytes in the buffer."""
        if self._end - self._start >= nbytes:
            return
        if self._start:
            unread = self._end - self._start
            self._buffer[:unread] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, unread
        while self._end < nbytes:
            received = self._receive_some(self._buffer[self._end :])
            if not received:
                raise LinkClosed(f"{self.address} closed the connection")
            self._end += received

    def _receive_some(self, view: memoryview) -> int:
        if not self._is_unix:
            return self._sock.recv_into(view)
        received, ancillary, _, _ = self._sock.recvmsg_into([view], _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds.extend(struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4]))
        if len(self._fds) > _MAX_PASSED_FDS:
            raise ProtocolError(f"more than {_MAX_PASSED_FDS} descriptors came without an offer")
        return received


def _advanced(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the views after so many bytes."""
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return []


def _tune_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A peer whose machine vanished is found in half a minute even when nothing is being sent.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

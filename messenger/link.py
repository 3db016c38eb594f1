"""What a connection gives to both of its sides, whatever it is made of: frames, and an end that anyone can make.

How much of a large payload its receiver sleeps through: arithmetic, and no system calls.

A receiver that wakes for every segment costs its sender, who has to wake it, as much as the copying does, and itself
as much again. So for large payloads the socket's low-water mark (SO_RCVLOWAT, socket(7)) is raised: half a payload, or
1 MiB, is copied while the rest arrives. It is at most a quarter of the receive buffer, so that the window never closes
for it; the buffer grows with what the way holds (tcp(7), tcp_moderate_rcvbuf), which this does not touch.

One connected socket: its life, its limits, and frames and payloads read from it. How bytes move is its subclasses'.

One thread receives and one thread sends at a time; `cut` may be called from any thread and ends both.
"""

import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from messenger.errors import ProtocolError
from messenger.frames import ACK_NBYTES, PREFIX, Frame, Message, ack_at, decode_body, decode_prefix
from messenger.memory import Region, views


class LinkClosed(ConnectionError):
    """The other side closed, or this side cut the link."""


class Cuttable(Protocol):
    """Moves bytes of an access to granted memory, and can be made to stop at once."""

    def cut(self) -> None: ...


class Link(ABC):
    """One thread receives and one thread sends at a time; `cut` may be called from any thread and ends both."""

    address: str
    """Names the other side in errors and logs."""

    @abstractmethod
    def set_timeout(self, timeout_s: float | None) -> None:
        """All that follows may take so long, for the handshake; None: calls block without limit, which `cut` ends."""

    def open(self) -> None:  # noqa: B027  (most links have nothing to agree on)
        """Agree on what comes before the first frame, on both sides. Raises ProtocolError or OSError when it fails."""

    @abstractmethod
    def send(self, message: Message | Frame, views: Sequence[memoryview] = (), fd: int | None = None) -> None:
        """Send a frame, then the views' bytes; `fd` travels with the frame where the transport passes descriptors.

        Raises OSError when cut.
        """

    @abstractmethod
    def receive(self) -> Message:
        """The next frame. Raises ProtocolError for bytes that are none, LinkClosed or OSError when the link ended."""

    def try_receive(self) -> Message | None:
        """The next frame if it is here already, as a whole; a link that cannot tell has none."""
        return None

    @abstractmethod
    def peer_is_gone(self) -> bool:
        """Whether the other side closed, cut or died, even though bytes of it may still be unread."""

    @abstractmethod
    def cut(self) -> None:
        """End the link: blocked calls of any thread return with an error. What it holds stays until `close`."""

    @abstractmethod
    def close(self, *, reset: bool = False) -> None:
        """Free what the link holds once no thread uses it; `reset` also discards what has not been sent yet."""


LOW_WATER_MIN_NBYTES = 512 << 10
"""Smaller payloads are taken as they come: it takes as many calls to wait for their parts."""
_LOW_WATER_MAX_NBYTES = 1 << 20


def low_water_mark(nbytes: int, buffer_nbytes: int) -> int:
    """For a payload of so many bytes and a receive buffer (SO_RCVBUF) of so many; 0: wake for whatever comes."""
    return 0 if nbytes < LOW_WATER_MIN_NBYTES else min(nbytes // 2, _LOW_WATER_MAX_NBYTES, buffer_nbytes // 4)


_BUFFER_NBYTES = 16 << 10
_SCRATCH_NBYTES = 64 << 10
_GREETING_NBYTES = 64 << 10
DEAD_AFTER_S = 30
_ROW = struct.Struct("@qq")
_LENGTH, _LENGTH_AT = struct.Struct("<I"), PREFIX.size - 4
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class BufferedLink(Link):
    """Takes over `sock`; `address` names the other side in errors and logs. A payload follows its frame."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.address = address
        self._sock = sock
        self._is_unix = sock.family == socket.AF_UNIX
        self._poll = select.poll()
        self._poll.register(sock, select.POLLRDHUP)
        # A poll object is one thread's at a time, and knows a number that somebody else's file has after the closing.
        self._looking = threading.Lock()
        if not self._is_unix:
            _tune_tcp(sock)
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))
        self._start = 0
        self._end = 0
        self._until_s: float | None = None
        self._begun: tuple[Frame, Sequence[memoryview]] | None = None

    def set_timeout(self, timeout_s: float | None) -> None:
        """For the handshake only: payloads are moved by calls that block without limit, which `cut` ends."""
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._sock.settimeout(timeout_s)

    def connect(self, connect: Callable[[socket.socket], None]) -> None:
        """Connect the socket, within the time limit."""
        connect(self._sock)

    def begin(self, frame: Frame, views: Sequence[memoryview] = ()) -> bool:
        """As `send`, without waiting for room: whether all of it went. If not, `finish` is what is sent next."""
        self._begun = frame, views
        return False

    def finish(self) -> None:
        """Send the rest of what was begun. Raises OSError when cut."""
        assert self._begun is not None
        (frame, views), self._begun = self._begun, None
        self.send(frame, views)

    def fileno(self) -> int:
        """The socket's descriptor, for waiting."""
        return self._sock.fileno()

    def receive(self) -> Message:
        """The next frame. Raises ProtocolError for bytes that are none, LinkClosed or OSError when the link ended."""
        self._fill(PREFIX.size)
        message = self.try_receive()
        return self._receive_frame() if message is None else message

    def receive_before_payload(self) -> Message:
        """As `receive`, taking in little beyond the frame: what follows goes to its place without another copy."""
        self._fill(PREFIX.size, ACK_NBYTES)
        return self.receive()

    def try_receive(self) -> Message | None:
        ack = ack_at(self._buffer, self._start, self._end)
        if ack is not None:
            self._start += ACK_NBYTES
            return ack
        body_nbytes = self._end - self._start - PREFIX.size
        if body_nbytes < 0 or body_nbytes < _LENGTH.unpack_from(self._buffer, self._start + _LENGTH_AT)[0]:
            return None
        return self._receive_frame()

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
        self._receive_views(pending[taken:])

    def receive_rows(self, region: Region, rows: bytes, nbytes: int) -> None:
        """As `receive_into`: `nbytes` bytes into the region's rows, int64 [n, 2] of (offset, bytes)."""
        self.receive_into(views(region, _ROW.iter_unpack(rows)))

    def lend_buffer(self, nbytes: int = 0) -> tuple[memoryview, int, int]:
        """The buffer, of at least so many bytes, and where in it what was received and not taken starts and ends.

        For a compiled loop that goes on receiving into it; `return_buffer` says where the loop has left it.
        """
        if nbytes > len(self._buffer):
            larger = memoryview(bytearray(nbytes))
            larger[: self._end - self._start] = self._buffer[self._start : self._end]
            self._buffer, self._start, self._end = larger, 0, self._end - self._start
        return self._buffer, self._start, self._end

    def return_buffer(self, start: int, end: int) -> None:
        """What was received and not taken is [start, end) of the buffer now."""
        self._start, self._end = start, end

    def drain(self, nbytes: int) -> None:
        """Read and forget the next bytes."""
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_NBYTES)))
        while nbytes:
            step = min(nbytes, len(scratch))
            self.receive_into([scratch[:step]])
            nbytes -= step

    def peer_is_gone(self) -> bool:
        """Whether the other side closed, cut or died, even though bytes of it may still be unread."""
        with self._looking:
            return self._sock.fileno() < 0 or bool(self._poll.poll(0))

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
        with self._looking:
            self._sock.close()

    def _receive_frame(self) -> Message:
        """The frame of which at least the prefix is in the buffer."""
        kind, length = decode_prefix(self._buffer[self._start : self._start + PREFIX.size])
        self._start += PREFIX.size
        if self._until_s is not None:
            # Who has not greeted yet holds no more memory than this, and no longer than the limit: `_fill` watches it.
            if length > _GREETING_NBYTES:
                raise ProtocolError(f"a frame of {length} bytes is none of a greeting's, {_GREETING_NBYTES} at most")
            self.lend_buffer(length)
        if length <= len(self._buffer):
            self._fill(length)
            body = self._buffer[self._start : self._start + length]
            self._start += length
            return decode_body(kind, body)
        large = memoryview(bytearray(length))
        self.receive_into([large])
        return decode_body(kind, large)

    def _fill(self, nbytes: int, most_nbytes: int | None = None) -> None:
        """Have at least so many bytes in the buffer, and not more than so many if it has less yet."""
        if self._end - self._start >= nbytes:
            return
        if self._start:
            unread = self._end - self._start
            self._buffer[:unread] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, unread
        while self._end < nbytes:
            if self._until_s is not None:
                self._sock.settimeout(self._left_s(self._until_s))
            received = self._receive_some(self._buffer[self._end : most_nbytes])
            if not received:
                raise LinkClosed(f"{self.address} closed the connection")
            self._end += received

    def _left_s(self, until_s: float) -> float:
        """Of the handshake, which is one limit for all of it: a side that sends a byte now and then ends too."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{self.address} has not greeted in time")
        return left_s

    @abstractmethod
    def _receive_some(self, view: memoryview) -> int:
        """At least one byte into the view, and how many; 0 when the other side closed."""

    @abstractmethod
    def _receive_views(self, views: list[memoryview]) -> None:
        """Fill the views. Raises LinkClosed when the other side closed before."""


def _tune_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A peer whose machine vanished is found within the time, whether or not something is being sent. One that lives and
    # takes nothing for as long is taken for hung, too: its streams connect again.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_AFTER_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_AFTER_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_AFTER_S // 6)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

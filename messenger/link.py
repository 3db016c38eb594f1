"""Connections of both sides: the interface of all links, and the base of links over one socket.

A link carries frames and payloads, and any thread can cut it. Threads of one link:

    sender      one thread at a time: send, begin, finish
    receiver    one thread at a time: receive, try_receive, receive_into, receive_rows, drain, and the buffer
    any         cut (ends the blocking calls of both), peer_is_gone

Lifetime: `cut` only shuts the socket down; its descriptor stays valid until `close`, which is called once no thread
uses the link. `_poll_lock` keeps `peer_is_gone` from polling a descriptor number that `close` has freed.
"""

import contextlib
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from messenger.errors import ProtocolError
from messenger.frames import ACK_NBYTES, PREFIX, Frame, Message, ack_at, decode_body, decode_prefix
from messenger.memory import Region, views


class LinkClosed(ConnectionError):
    """The other side closed the link, or this side cut it."""


class Cuttable(Protocol):
    """Object that moves the bytes of an access to granted memory, and can be stopped at once."""

    def cut(self) -> None: ...


class Delivered(NamedTuple):
    """Bytes that a connection has delivered in both directions, as far as this side's kernel knows; its round trip."""

    nbytes: int
    round_trip_s: float


class Link(ABC):
    """Connection to a peer; the module's docstring describes its threads."""

    address: str
    """Name of the other side in errors and logs."""

    @abstractmethod
    def set_timeout(self, timeout_s: float | None) -> None:
        """Limit the total time of the following calls (the handshake). None: no limit, and only `cut` ends them."""

    def open(self) -> None:  # noqa: B027  (most links have nothing to agree on)
        """Negotiate what precedes the first frame, on both sides. Raises ProtocolError or OSError if it fails."""

    @abstractmethod
    def send(self, message: Message | Frame, views: Sequence[memoryview] = (), fd: int | None = None) -> None:
        """Send a frame, then the views' bytes, and the descriptor `fd` if the transport can pass one.

        Blocks. Raises OSError when the link ended.
        """

    @abstractmethod
    def receive(self) -> Message:
        """Return the next message; blocks. Raises ProtocolError for invalid bytes, LinkClosed or OSError at the end."""

    def try_receive(self) -> Message | None:
        """Return the next message if it is known to have arrived completely, else None."""
        return None

    def progress(self) -> Delivered:
        """Return what the connection has delivered so far. Any thread, before `close`."""
        return Delivered(0, 0.0)

    @abstractmethod
    def peer_is_gone(self) -> bool:
        """Return True if the other side closed, cut or died, even if bytes of it are still unread."""

    @abstractmethod
    def cut(self) -> None:
        """End the link: blocking calls of all threads return with an error. Resources are kept until `close`."""

    @abstractmethod
    def close(self, *, reset: bool = False) -> None:
        """Free the link's resources, once no thread uses it; `reset` also discards unsent bytes."""


LOW_WATER_MIN_NBYTES = 512 << 10
"""Smaller payloads are received as they arrive: waiting for parts of them would take as many calls."""
_LOW_WATER_MAX_NBYTES = 1 << 20


def low_water_mark(nbytes: int, buffer_nbytes: int) -> int:
    """Return the low-water mark (SO_RCVLOWAT, socket(7)) for receiving a payload; 0 means leave it unchanged.

    `nbytes` is the payload's size and `buffer_nbytes` the receive buffer's (SO_RCVBUF). Waking a receiver for every
    segment costs the sender as much time as the copying, and the receiver as much again. With the mark, half a payload,
    or 1 MiB, is copied while the rest arrives. The mark is at most a quarter of the receive buffer, so that the window
    never closes because of it; the buffer's automatic growth (tcp(7), tcp_moderate_rcvbuf) is not affected.
    """
    return 0 if nbytes < LOW_WATER_MIN_NBYTES else min(nbytes // 2, _LOW_WATER_MAX_NBYTES, buffer_nbytes // 4)


_BUFFER_NBYTES = 16 << 10
_SCRATCH_NBYTES = 64 << 10
_GREETING_NBYTES = 64 << 10
DEAD_AFTER_S = 30
_CUT_S = 1e-3  # of each call on a socket that was cut before it was connected
_ROW = struct.Struct("@qq")
_LENGTH, _LENGTH_AT = struct.Struct("<I"), PREFIX.size - 4
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
# Linux's struct tcp_info: tcpi_rtt; tcpi_bytes_acked and tcpi_bytes_received (since Linux 4.1).
_TCP_INFO_NBYTES = 136
_RTT, _RTT_AT = struct.Struct("@I"), 68
_DELIVERED, _DELIVERED_AT = struct.Struct("@QQ"), 120


class BufferedLink(Link):
    """Link over one connected socket, which it owns; payloads follow their frames. Subclasses move the bytes."""

    polls = False
    """True if a thread that waits for a frame polls the socket before it sleeps, on links that can do so."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.address = address
        self._sock = sock
        self._is_unix = sock.family == socket.AF_UNIX
        self._poll = select.poll()
        self._poll.register(sock, select.POLLRDHUP)
        # A poll object may be used by one thread at a time, and keeps the descriptor number after it was closed.
        self._poll_lock = threading.Lock()
        if not self._is_unix:
            _tune_tcp(sock)
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))
        self._start = 0
        self._end = 0
        self._until_s: float | None = None
        self._is_cut = False
        self._begun: tuple[Frame, Sequence[memoryview]] | None = None

    def set_timeout(self, timeout_s: float | None) -> None:
        """Limit the time of the handshake. Calls that move payloads block without limit, and `cut` ends them."""
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._is_cut:
            self._sock.settimeout(timeout_s)

    def connect(self, connect: Callable[[socket.socket], None]) -> None:
        """Connect the socket within the time limit."""
        connect(self._sock)

    def begin(self, frame: Frame, views: Sequence[memoryview] = ()) -> bool:
        """Send without blocking. Returns True if all was sent; if not, `finish` must precede any other sending."""
        self._begun = frame, views
        return False

    def finish(self) -> None:
        """Send the rest of what `begin` began; blocks. Raises OSError when cut."""
        assert self._begun is not None
        (frame, views), self._begun = self._begun, None
        self.send(frame, views)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 once it is closed."""
        return self._sock.fileno()

    def receive(self) -> Message:
        """Return the next message; blocks. Raises ProtocolError for invalid bytes, LinkClosed or OSError at the end."""
        self._fill(PREFIX.size)
        message = self.try_receive()
        return self._receive_frame() if message is None else message

    def receive_before_payload(self) -> Message:
        """Receive a frame and little beyond it, so that its payload is received in place without another copy."""
        self._fill(PREFIX.size, ACK_NBYTES)
        return self.receive()

    def try_receive(self) -> Message | None:
        if self._start == self._end:
            return None
        ack = ack_at(self._buffer, self._start, self._end)
        if ack is not None:
            self._start += ACK_NBYTES
            return ack
        body_nbytes = self._end - self._start - PREFIX.size
        if body_nbytes < 0 or body_nbytes < _LENGTH.unpack_from(self._buffer, self._start + _LENGTH_AT)[0]:
            return None
        return self._receive_frame()

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """Fill the views in order with the bytes that follow the last frame; blocks."""
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
        """Receive `nbytes` bytes into the region's rows, int64 [n, 2] of (offset, bytes); blocks."""
        self.receive_into(views(region, _ROW.iter_unpack(rows)))

    def lend_buffer(self, nbytes: int = 0) -> tuple[memoryview, int, int]:
        """Return the buffer, grown to at least `nbytes`, and the (start, end) of the bytes not consumed yet.

        A compiled loop then receives into it; `return_buffer` records the state in which it left the buffer.
        """
        if nbytes > len(self._buffer):
            larger = memoryview(bytearray(nbytes))
            larger[: self._end - self._start] = self._buffer[self._start : self._end]
            self._buffer, self._start, self._end = larger, 0, self._end - self._start
        return self._buffer, self._start, self._end

    def return_buffer(self, start: int, end: int) -> None:
        """Set the range [start, end) of the buffer that was received and not consumed."""
        self._start, self._end = start, end

    def drain(self, nbytes: int) -> None:
        """Receive and discard the next bytes."""
        scratch = memoryview(bytearray(min(nbytes, _SCRATCH_NBYTES)))
        while nbytes:
            step = min(nbytes, len(scratch))
            self.receive_into([scratch[:step]])
            nbytes -= step

    def progress(self) -> Delivered:
        if self._is_unix:
            return Delivered(0, 0.0)
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        except OSError:
            return Delivered(0, 0.0)
        (round_trip_us,), (acked, received) = (
            _RTT.unpack_from(info, _RTT_AT),
            _DELIVERED.unpack_from(info, _DELIVERED_AT),
        )
        return Delivered(acked + received, round_trip_us / 1e6)

    def peer_is_gone(self) -> bool:
        """Return True if the other side closed, cut or died, even if bytes of it are still unread."""
        with self._poll_lock:
            return self._sock.fileno() < 0 or bool(self._poll.poll(0))

    def cut(self) -> None:
        """End the link: blocking calls of all threads return with an error. The descriptor stays open until `close`."""
        self._is_cut = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it may not have begun to connect, which would then take its whole time limit
            with contextlib.suppress(OSError):
                self._sock.settimeout(_CUT_S)

    def close(self, *, reset: bool = False) -> None:
        """Close the socket, once no thread uses it; `reset` also discards bytes that the kernel has not sent."""
        if reset and not self._is_unix:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            except OSError:
                pass
        with self._poll_lock:
            self._sock.close()

    def _receive_frame(self) -> Message:
        """Receive the frame whose prefix is in the buffer."""
        kind, length = decode_prefix(self._buffer[self._start : self._start + PREFIX.size])
        self._start += PREFIX.size
        if self._until_s is not None:
            # A caller that has not greeted may use no more memory than this, and no more time than `_fill` allows.
            if length > _GREETING_NBYTES:
                raise ProtocolError(f"a frame of a greeting has {length} bytes, at most {_GREETING_NBYTES} are allowed")
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
        """Receive until the buffer holds at least `nbytes`, and at most `most_nbytes` (None: its size)."""
        if self._end - self._start >= nbytes:
            return
        if self._start:
            unread = self._end - self._start
            self._buffer[:unread] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, unread
        while self._end < nbytes:
            if self._until_s is not None and not self._is_cut:
                self._sock.settimeout(self._left_s(self._until_s))
            received = self._receive_some(self._buffer[self._end : most_nbytes])
            if not received:
                raise LinkClosed(f"{self.address} closed the connection")
            self._end += received

    def _left_s(self, until_s: float) -> float:
        """Return the time left for the whole handshake; a peer that sends single bytes does not extend it."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{self.address} has not greeted in time")
        return left_s

    @abstractmethod
    def _receive_some(self, view: memoryview) -> int:
        """Receive at least one byte into the view, which begins at `_end` of the buffer.

        Returns the number; 0 when the other side closed.
        """

    @abstractmethod
    def _receive_views(self, views: list[memoryview]) -> None:
        """Fill the views; blocks. Raises LinkClosed if the other side closed before."""


def _tune_tcp(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A peer whose machine vanished is detected within this time, whether or not something is being sent. A live peer
    # that accepts nothing for as long is treated as hung, too: its streams connect again.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * DEAD_AFTER_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_AFTER_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_AFTER_S // 6)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

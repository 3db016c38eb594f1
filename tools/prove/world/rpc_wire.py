"""One HTTP/2 connection of gRPC over the simulated network, and the streams on it.

Modelled is what a caller or a servicer can notice: frames arrive in the order in which they were sent, a stream whose
reader does not read blocks its writer, keepalive pings find a peer that is gone. Everything runs on the event loop of
one process; the network's callbacks only hand over to it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-not-found]

from tools.prove.world.network import End

WINDOW_NBYTES = 64 << 10
"""Bytes of messages that one side of a stream may send before the other side has read them."""
_ACKNOWLEDGE_NBYTES = WINDOW_NBYTES // 4
_HEADERS_NBYTES = 100
_FRAME_NBYTES = 9
_MESSAGE_NBYTES = 5  # gRPC's prefix of each message
_DEFAULT_MAX_RECEIVE_NBYTES = 4 << 20


class Frame(NamedTuple):
    """Frame from one side to the other. Stream 0 is the connection itself.

    Kinds: settings, goaway, ping, pong; headers, message, half (the client has sent all), initial (metadata), trailers,
    reset, window (bytes that were read).
    """

    kind: str
    stream: int
    value: Any = None


class RpcConnection:
    """One connection. `on_frame` gets the frames that belong to none of its streams; `on_lost` the reason of its end.

    `options` are those of the channel or server. `on_lost` is not called after `close`.
    """

    def __init__(
        self,
        end: End,
        loop: asyncio.AbstractEventLoop,
        options: Mapping[str, int],
        on_frame: Callable[[RpcConnection, Frame], None],
        on_lost: Callable[[RpcConnection, str], None],
    ) -> None:
        self.end, self.streams = end, dict[int, RpcStream]()
        self.is_over = False
        self._loop, self._on_frame, self._on_lost = loop, on_frame, on_lost
        self._silence_s = options.get("grpc.keepalive_time_ms", math.inf) / 1e3
        self._patience_s = options.get("grpc.keepalive_timeout_ms", 20_000) / 1e3
        self._pings_always = bool(options.get("grpc.keepalive_permit_without_calls", 0))
        self._number = -1
        self._heard_s = loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._wait(self._silence_s, self._ping)
        end.listen(self._item_came, self._end_came)

    def _item_came(self, frame: Frame) -> None:
        self._loop.call_soon_threadsafe(self._received, frame)

    def _end_came(self, error: OSError | None) -> None:
        self._loop.call_soon_threadsafe(self.lose, "Socket closed" if error is None else str(error))

    def new_number(self) -> int:
        """Return the number of the client's next stream."""
        self._number += 2
        return self._number

    def send(self, kind: str, stream: int = 0, value: Any = None, nbytes: int = 0) -> None:
        """Send a frame; it is dropped if the connection is over."""
        if not self.is_over:
            self.end.send(Frame(kind, stream, value), _FRAME_NBYTES + nbytes)

    def close(self) -> None:
        """Send what was to be sent, and end the connection. Its streams are not told."""
        if not self.is_over:
            self.is_over = True
            if self._timer is not None:
                self._timer.cancel()
            self.end.close()

    def lose(self, reason: str) -> None:
        """End the connection, and with it all calls on it."""
        if self.is_over:
            return
        self.close()
        streams, self.streams = self.streams, {}
        self._on_lost(self, reason)
        for stream in streams.values():
            stream.connection_lost(reason)

    def _received(self, frame: Frame) -> None:
        if self.is_over:
            return
        self._heard_s = self._loop.time()
        if frame.kind == "ping":
            self.send("pong")
        elif frame.stream in self.streams:
            self.streams[frame.stream].came(frame)
        elif frame.kind != "pong":
            self._on_frame(self, frame)

    # Keepalive

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        if seconds < math.inf:
            self._timer = self._loop.call_later(seconds, then)

    def _ping(self) -> None:
        left_s = self._heard_s + self._silence_s - self._loop.time()
        if left_s > 0 or not (self.streams or self._pings_always):
            self._wait(left_s if left_s > 0 else self._silence_s, self._ping)
            return
        asked_s = self._loop.time()

        def look() -> None:
            if self._heard_s < asked_s:
                self.lose("keepalive watchdog timeout")
            else:
                self._ping()

        self.send("ping")
        self._wait(self._patience_s, look)


class RpcStream:
    """Messages of one call in both directions, with flow control. The two sides' calls are its subclasses.

    Messages that are sent before `attach` wait for it.
    """

    _side: str  # in errors

    def __init__(self, loop: asyncio.AbstractEventLoop, options: Mapping[str, int]) -> None:
        self.connection: RpcConnection | None = None
        self.number = 0
        self._loop = loop
        self._max_send_nbytes = options.get("grpc.max_send_message_length", -1)
        self._max_receive_nbytes = options.get("grpc.max_receive_message_length", _DEFAULT_MAX_RECEIVE_NBYTES)
        self._outgoing: deque[tuple[Frame, int, asyncio.Future[None]]] = deque()
        self._is_unwritable = False
        self._unread_nbytes = 0  # sent, and not yet read by the other side
        self._overdrawn: list[asyncio.Future[None]] = []  # writes that have sent more than the window has room for
        self._incoming: deque[bytes] = deque()
        self._has_all = False  # no more messages come
        self._reader: asyncio.Future[bytes | None] | None = None
        self._unannounced_nbytes = 0  # read, and the other side does not know

    # By the subclasses

    def came(self, frame: Frame) -> None:
        """Handle a frame of this stream. Subclasses handle what is not about messages."""
        if frame.kind == "window":
            self._unread_nbytes -= frame.value
            self._pump()
        elif frame.kind == "message":
            self._deliver(frame.value)

    def connection_lost(self, reason: str) -> None:
        """The connection has ended."""
        raise NotImplementedError

    def _too_large(self, details: str) -> None:
        """End the call with RESOURCE_EXHAUSTED."""
        raise NotImplementedError

    def _message_was_read(self) -> None:
        """Called when a message has been given to a reader."""

    # Life

    def attach(self, connection: RpcConnection, number: int) -> None:
        """Belong to a connection from now on, and send what waits."""
        self.connection, self.number = connection, number
        connection.streams[number] = self
        self._pump()

    def detach(self) -> None:
        """Neither send nor receive any more. Pending and later writes fail."""
        if self.connection is not None:
            self.connection.streams.pop(self.number, None)
        self._is_unwritable = True
        pending = [*self._overdrawn, *(sent for _, _, sent in self._outgoing)]
        self._overdrawn.clear()
        self._outgoing.clear()
        for each in pending:
            if not each.done():
                each.set_exception(_failed())

    def end_reads(self, *, drop: bool) -> None:
        """Readers get None from now on, after the messages that are here unless `drop`."""
        self._has_all = True
        if drop:
            self._incoming.clear()
        if self._reader is not None:
            reader, self._reader = self._reader, None
            if not reader.done():
                reader.set_result(None)

    # Sending

    def send_message(self, message: bytes) -> asyncio.Future[None]:
        """Send a message. The result is done when there is room for the next, or ExecuteBatchError if the stream ends.

        If its waiter is cancelled, the message is sent all the same, as in gRPC.
        """
        if 0 <= self._max_send_nbytes < len(message):
            self._too_large(f"{self._side}: Sent message larger than max ({len(message)} vs. {self._max_send_nbytes})")
        return self.enqueue("message", message, _MESSAGE_NBYTES + len(message))

    def enqueue(self, kind: str, value: Any = None, nbytes: int = 0) -> asyncio.Future[None]:
        """Send a frame behind the messages that are to be sent before. The result is done when it is under way."""
        sent: asyncio.Future[None] = self._loop.create_future()
        if self._is_unwritable:
            sent.set_exception(_failed())
        else:
            self._outgoing.append((Frame(kind, 0, value), nbytes, sent))
            self._pump()
        return sent

    def _pump(self) -> None:
        if self.connection is None:
            return
        # A message that exceeds the window is sent as a whole, but what is behind it waits, also the status.
        while self._outgoing and self._unread_nbytes <= WINDOW_NBYTES:
            frame, nbytes, sent = self._outgoing.popleft()
            if frame.kind == "message":
                self._unread_nbytes += nbytes
                self._overdrawn.append(sent)
            elif not sent.done():
                sent.set_result(None)
            self.connection.send(frame.kind, self.number, frame.value, nbytes)
        if self._unread_nbytes <= WINDOW_NBYTES:
            for each in self._overdrawn:
                if not each.done():
                    each.set_result(None)
            self._overdrawn.clear()

    # Receiving

    async def receive_message(self) -> bytes | None:
        """Return the next message; None if none comes any more.

        If cancelled, the next message is lost, and other readers get None until then: the operation stays pending in
        gRPC, which accepts one at a time.
        """
        if self._incoming:
            message = self._incoming.popleft()
            self._read(message)
            return message
        if self._has_all or self._reader is not None:
            return None
        self._reader = self._loop.create_future()
        return await self._reader

    def _deliver(self, message: bytes) -> None:
        if 0 <= self._max_receive_nbytes < len(message):
            sizes = f"{len(message)} vs. {self._max_receive_nbytes}"
            self._too_large(f"{self._side}: Received message larger than max ({sizes})")
        elif self._reader is not None:
            reader, self._reader = self._reader, None
            if not reader.done():
                reader.set_result(message)
            self._read(message)
        else:
            self._incoming.append(message)

    def _read(self, message: bytes) -> None:
        self._unannounced_nbytes += _MESSAGE_NBYTES + len(message)
        if self._unannounced_nbytes >= _ACKNOWLEDGE_NBYTES and self.connection is not None:
            self.connection.send("window", self.number, self._unannounced_nbytes)
            self._unannounced_nbytes = 0
        self._message_was_read()


def headers_nbytes(metadata: Any) -> int:
    """Return the approximate size of a frame with these headers."""
    return _HEADERS_NBYTES + sum(len(key) + len(value) for key, value in metadata)


def _failed() -> ExecuteBatchError:
    return ExecuteBatchError('Failed "execute_batch": the call has ended')

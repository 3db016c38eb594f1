"""The simulated gRPC channel. Calls are grpc.aio's own call classes over `ClientCall`, which replaces their C part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc._cython.cygrpc import ExecuteBatchError, UsageError  # type: ignore[import-not-found]
from grpc.aio import _call

from tools.prove.world.addresses import host_at
from tools.prove.world.network import End
from tools.prove.world.rpc_wire import Frame, RpcConnection, RpcStream, headers_nbytes
from tools.prove.world.scheduler import ProcessState, world

_GROWTH, _JITTER = 1.6, 0.2
_Metadata = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class CallStatus:
    """End of a call, as grpc.aio's call classes read it from the C part."""

    status_code: grpc.StatusCode
    text: str
    metadata: _Metadata = ()

    def code(self) -> int:
        """Return the number of the code."""
        return int(self.status_code.value[0])

    def details(self) -> str:
        """Return the details."""
        return self.text

    def trailing_metadata(self) -> _Metadata:
        """Return the metadata that came with the status."""
        return self.metadata

    def debug_error_string(self) -> str:
        """Return the details: there are no others."""
        return self.text


class ClientCall(RpcStream):
    """One call of a client; takes the place of `cygrpc._AioCall`, and has what grpc.aio's call classes use of it."""

    _side = "CLIENT"

    def __init__(self, channel: Channel, method: str, deadline_s: float | None, waits: bool) -> None:
        super().__init__(channel.loop, channel.options)
        self.method, self.waits = method, waits  # `waits`: for a connection, instead of failing
        self._channel = channel
        self._name = f"call {world().next_number()} of {method} at {channel.target}"
        self._deadline_s = deadline_s
        self._metadata: _Metadata = ()
        self._status: CallStatus | None = None
        self._initial_metadata: _Metadata | None = None
        self._is_locally_cancelled = self._is_over = False
        self._trailers: CallStatus | None = None  # received, but there are messages to be read before
        self._connected: asyncio.Future[None] = channel.loop.create_future()
        self._waiters: list[asyncio.Future[None]] = []
        self._metadata_waiters: list[asyncio.Future[None]] = []
        self._done_callbacks: list[Callable[[], None]] = []
        self._timer = None if deadline_s is None else channel.loop.call_at(deadline_s, self._time_is_over)

    # State

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self._status is not None

    def cancelled(self) -> bool:
        """Return True if the call has ended with CANCELLED."""
        return self._status is not None and self._status.status_code is grpc.StatusCode.CANCELLED

    def is_ok(self) -> bool:
        """Return True if the call has ended with OK."""
        return self._status is not None and self._status.status_code is grpc.StatusCode.OK

    def is_locally_cancelled(self) -> bool:
        """Return True if this side has cancelled the call."""
        return self._is_locally_cancelled

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without a deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._loop.time())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back at the end of the call."""
        if self.done():
            callback()
        else:
            self._done_callbacks.append(callback)

    async def status(self) -> CallStatus:
        """Wait for the end of the call, and return its status."""
        if self._status is None:
            self._waiters.append(self._loop.create_future())
            await self._waiters[-1]
        assert self._status is not None
        return self._status

    async def initial_metadata(self) -> _Metadata:
        """Wait for the server's initial metadata, and return it; empty if the call ended before."""
        if self._initial_metadata is None:
            self._metadata_waiters.append(self._loop.create_future())
            await self._metadata_waiters[-1]
        assert self._initial_metadata is not None
        return self._initial_metadata

    def cancel(self, details: str) -> None:
        """End the call with CANCELLED."""
        if not self._channel.process.is_dead:  # otherwise its objects are being collected
            self._is_locally_cancelled = True
            self.end(CallStatus(grpc.StatusCode.CANCELLED, details), resets=True)

    def set_internal_error(self, text: str) -> None:
        """Replace the status: a write has failed."""
        self._set_status(CallStatus(grpc.StatusCode.INTERNAL, "Internal error from Core"))

    # Course of the call

    def begin(self, connection: RpcConnection) -> None:
        """Send the call over a connection."""
        value = self.method, self._metadata, self.time_remaining()
        number = connection.new_number()
        connection.send("headers", number, value, headers_nbytes(self._metadata))
        self.attach(connection, number)
        _wake([self._connected])

    def end(self, status: CallStatus, *, resets: bool = False) -> None:
        """End the call unless it has ended. `resets`: the server is told."""
        if self._is_over:
            return
        self._is_over = True
        if resets and self.connection is not None and self._trailers is None:
            self.connection.send("reset", self.number)
        self._set_status(status)
        world().tell(self._channel.process.name, f"{self._name} ends with {status.status_code.name}: {status.text}")
        if self._timer is not None:
            self._timer.cancel()
        self._channel.forget(self)
        self.detach()
        self.end_reads(drop=True)
        _wake([self._connected])

    def _set_status(self, status: CallStatus) -> None:
        self._status = status
        self._set_initial_metadata(())
        _wake(self._waiters)
        callbacks, self._done_callbacks = self._done_callbacks, []
        for callback in callbacks:
            callback()

    def _set_initial_metadata(self, metadata: _Metadata) -> None:
        if self._initial_metadata is None:
            self._initial_metadata = metadata
            _wake(self._metadata_waiters)

    def came(self, frame: Frame) -> None:
        if frame.kind == "initial":
            self._set_initial_metadata(frame.value)
        elif frame.kind == "trailers":
            self._trailers = CallStatus(*frame.value)
            self._has_all = True
            self.detach()
            self._message_was_read()
        else:
            super().came(frame)

    def _message_was_read(self) -> None:
        if self._trailers is not None and not self._incoming:
            self.end(self._trailers)

    def connection_lost(self, reason: str) -> None:
        self.end(CallStatus(grpc.StatusCode.UNAVAILABLE, f"Stream removed ({reason})"))

    def _too_large(self, details: str) -> None:
        self.end(CallStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, details), resets=True)

    def _time_is_over(self) -> None:
        self.end(CallStatus(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), resets=True)

    async def _start(self, metadata: _Metadata) -> None:
        """Wait until the call is on a connection, or has ended."""
        if not self.done():
            self._metadata = metadata
            world().tell(self._channel.process.name, f"{self._name} begins")
            self._channel.begin(self)
            await self._connected

    async def _start_with(self, request: bytes, metadata: _Metadata) -> None:
        await self._start(metadata)
        if not self.done():
            # Nobody waits for these: the status tells how the call ends.
            self.send_message(request).add_done_callback(_ignore)
            self.enqueue("half").add_done_callback(_ignore)

    # What grpc.aio's call classes call

    async def unary_unary(self, request: bytes, metadata: _Metadata, context: object = None) -> bytes | None:
        """Perform a unary call. Returns the response if the status is OK."""
        await self._start_with(request, metadata)
        response = await self.receive_message()
        await self.status()
        return response if self.is_ok() else None

    async def initiate_unary_stream(self, request: bytes, metadata: _Metadata, context: object = None) -> None:
        """Send the request, and wait for the server's initial metadata."""
        await self._start_with(request, metadata)
        await self.initial_metadata()

    async def stream_unary(
        self, metadata: _Metadata, observer: Callable[[], None], context: object = None
    ) -> bytes | None:
        """Perform a call whose requests are written meanwhile. `observer` is called when they may be."""
        await self._start(metadata)
        observer()
        response = await self.receive_message()
        await self.status()
        return response if self.is_ok() else None

    async def initiate_stream_stream(
        self, metadata: _Metadata, observer: Callable[[], None], context: object = None
    ) -> None:
        """Begin a call, and wait for the server's initial metadata. `observer` is called when writes are possible."""
        await self._start(metadata)
        observer()
        await self.initial_metadata()

    async def receive_serialized_message(self) -> Any:
        """Return the next message, or EOF."""
        message = await self.receive_message()
        return grpc.aio.EOF if message is None else message

    async def send_serialized_message(self, message: bytes) -> None:
        """Send a message; blocks while the server does not read."""
        await self.send_message(message)

    async def send_receive_close(self) -> None:
        """Tell the server that no more messages come. Does nothing if the server has ended the call."""
        with contextlib.suppress(ExecuteBatchError):
            await self.enqueue("half")


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for each in waiters:
        if not each.done():
            each.set_result(None)
    waiters.clear()


def _ignore(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()


class Channel(grpc.aio.Channel):
    """Channel to one target, with one connection, which is made again with backoff."""

    def __init__(self, target: str, options: Iterable[tuple[str, Any]] = ()) -> None:
        thread = world().current
        assert thread is not None
        self.process: ProcessState = thread.process
        self.target, self.options = target, dict(options)
        self.loop = asyncio.get_running_loop()
        self._state = grpc.ChannelConnectivity.IDLE
        self._state_waiters: list[asyncio.Future[None]] = []
        self._calls: dict[Any, None] = {}  # that have not ended
        self._waiting: dict[ClientCall, None] = {}  # for a connection
        self._connecting: RpcConnection | None = None
        self._ready: RpcConnection | None = None
        self._leaving: dict[RpcConnection, None] = {}  # accept no new calls
        self._attempt = self._num_failed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0
        self._trouble = ""

    # Calls

    def _method(self, kind: type[Any], method: str, serializer: Any, deserializer: Any) -> Callable[..., Any]:
        def begin(
            request: Any = None,
            timeout: float | None = None,
            metadata: Any = None,
            credentials: Any = None,
            wait_for_ready: bool | None = None,
            compression: Any = None,
        ) -> Any:
            deadline_s = None if timeout is None else self.loop.time() + timeout
            headers = grpc.aio.Metadata(*(metadata or ()))
            about = method, serializer, deserializer, self.loop
            call = kind(request, deadline_s, headers, credentials, wait_for_ready, self, *about)
            self._calls[call] = None
            call.add_done_callback(lambda ended: self._calls.pop(ended, None))
            return call

        return begin

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **how: Any
    ) -> Any:
        return self._method(_call.UnaryUnaryCall, method, request_serializer, response_deserializer)

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **how: Any
    ) -> Any:
        return self._method(_call.UnaryStreamCall, method, request_serializer, response_deserializer)

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **how: Any
    ) -> Any:
        return self._method(_call.StreamUnaryCall, method, request_serializer, response_deserializer)

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **how: Any
    ) -> Any:
        return self._method(_call.StreamStreamCall, method, request_serializer, response_deserializer)

    def call(
        self, method: str, deadline_s: float | None, credentials: Any, waits: bool | None, handle: int
    ) -> ClientCall:
        """Create the lower part of a call; for grpc.aio's call classes. Raises UsageError after `close`."""
        if self._state is grpc.ChannelConnectivity.SHUTDOWN:
            raise UsageError("Channel is closed.")
        return ClientCall(self, method, deadline_s, bool(waits))

    def begin(self, call: ClientCall) -> None:
        """Send a call as soon as there is a connection. Fails at once while none can be made, unless the call waits."""
        if self._ready is not None:
            call.begin(self._ready)
        elif self._state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not call.waits:
            call.end(CallStatus(grpc.StatusCode.UNAVAILABLE, self._trouble))
        else:
            self._waiting[call] = None
            if self._state is grpc.ChannelConnectivity.IDLE:
                self._connect()

    def forget(self, call: ClientCall) -> None:
        """The call has ended."""
        self._waiting.pop(call, None)
        self._close_unused()

    # Connection

    def _set_state(self, state: grpc.ChannelConnectivity) -> None:
        if state is not self._state:
            self._state = state
            _wake(self._state_waiters)

    def _option_s(self, name: str, default_ms: int) -> float:
        return float(self.options.get(f"grpc.{name}_ms", default_ms)) / 1e3

    def _connect(self) -> None:
        first_s = self._option_s("initial_reconnect_backoff", 1_000)
        most_s = self._option_s("max_reconnect_backoff", 120_000)
        pause_s = min(most_s, first_s * _GROWTH**self._num_failed) * world().chance.uniform(1 - _JITTER, 1 + _JITTER)
        limit_s = max(pause_s, self._option_s("min_reconnect_backoff", 20_000))
        if self._state is grpc.ChannelConnectivity.IDLE:
            self._set_state(grpc.ChannelConnectivity.CONNECTING)
        self._attempt += 1
        self._next_s = self.loop.time() + pause_s
        attempt = self._attempt
        self._timer = self.loop.call_later(limit_s, self._failed, attempt, "connect deadline exceeded")
        host, address = resolve(self.process, self.target)

        def done(result: End | OSError) -> None:
            self.loop.call_soon_threadsafe(self._dialled, attempt, result)

        world().network.dial(self.process, host, address, done)

    def _dialled(self, attempt: int, result: End | OSError) -> None:
        if isinstance(result, OSError):
            self._failed(attempt, f"Failed to connect to remote host: {result.strerror}")
        elif attempt != self._attempt:
            result.close()
        else:  # the connection can be used once the server has said its first word
            self._connecting = RpcConnection(result, self.loop, self.options, self._received, self._lost)

    def _lost(self, connection: RpcConnection, reason: str) -> None:
        if connection is self._connecting:
            self._failed(self._attempt, reason)
        elif connection is self._ready:
            self._ready = None
            self._set_state(grpc.ChannelConnectivity.IDLE)
            world().tell(self.process.name, f"the connection to {self.target} is lost: {reason}")
        else:
            self._leaving.pop(connection)

    def _failed(self, attempt: int, reason: str) -> None:
        if attempt != self._attempt:
            return
        self._stop_attempt()
        self._num_failed += 1
        self._trouble = f"failed to connect to all addresses; last error: UNKNOWN: {self.target}: {reason}"
        self._set_state(grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        self._timer = self.loop.call_at(self._next_s, self._connect)
        for call in [each for each in self._waiting if not each.waits]:
            call.end(CallStatus(grpc.StatusCode.UNAVAILABLE, self._trouble))

    def _stop_attempt(self) -> None:
        self._attempt += 1
        if self._timer is not None:
            self._timer.cancel()
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    def _received(self, connection: RpcConnection, frame: Frame) -> None:
        if frame.kind == "settings":
            self._connecting, self._ready = None, connection
            self._stop_attempt()
            self._num_failed = 0
            self._set_state(grpc.ChannelConnectivity.READY)
            waiting, self._waiting = self._waiting, {}
            for call in waiting:
                call.begin(connection)
        elif frame.kind == "goaway" and connection is self._ready:
            self._ready = None
            self._leaving[connection] = None
            self._set_state(grpc.ChannelConnectivity.IDLE)
            self._close_unused()

    def _close_unused(self) -> None:
        for connection in [each for each in self._leaving if not each.streams]:
            del self._leaving[connection]
            connection.close()

    # State

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        if try_to_connect and self._state is grpc.ChannelConnectivity.IDLE:
            self._connect()
        return self._state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        while self._state is last_observed_state:
            self._state_waiters.append(self.loop.create_future())
            await self._state_waiters[-1]

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                raise UsageError("Channel is closed.")
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        if self._state is grpc.ChannelConnectivity.SHUTDOWN:
            return
        self._set_state(grpc.ChannelConnectivity.SHUTDOWN)
        self._stop_attempt()
        calls: Sequence[Any] = list(self._calls)
        if grace and calls:
            await asyncio.wait([self.loop.create_task(call.code()) for call in calls], timeout=grace)
        for call in calls:
            call.cancel()
        for connection in [*self._leaving, *([self._ready] if self._ready is not None else [])]:
            connection.close()
        self._leaving.clear()
        self._ready = None

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def resolve(process: ProcessState, target: str) -> tuple[str, tuple[str, str]]:
    """Return the host of a target and its address in the simulated network."""
    name, _, port = target.rpartition(":")
    host = process.host if name in ("localhost", "[::]", "[::1]") else host_at(name, process.host)
    return host, ("grpc", f"{host}:{port}")

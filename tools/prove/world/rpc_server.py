"""The simulated gRPC server: listens in the simulated network, and runs servicers on its process's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc
import grpc.aio
from grpc._cython.cygrpc import AbortError, ExecuteBatchError, UsageError  # type: ignore[import-not-found]

from tools.prove.world.addresses import free_port
from tools.prove.world.network import End
from tools.prove.world.rpc_client import resolve
from tools.prove.world.rpc_wire import Frame, RpcConnection, RpcStream, headers_nbytes
from tools.prove.world.scheduler import ProcessState, world

log = logging.getLogger("grpc._cython.cygrpc")  # gRPC's own, whose records telemetry.logs shortens

_DISPATCH_S = 200e-6  # longest time from a call's arrival to its servicer's start
_CANCEL_S = 50e-6  # longest time from the end of a servicer's reads to its cancellation

_Metadata = tuple[tuple[str, Any], ...]


class _CallDetails(NamedTuple):
    """Details of a call for interceptors and generic handlers."""

    method: str
    invocation_metadata: _Metadata


class ServerCall(RpcStream):
    """One call on the server's side, from its headers until its servicer has ended and the client knows."""

    _side = "SERVER"

    def __init__(
        self, server: SimServer, connection: RpcConnection, number: int, value: tuple[str, _Metadata, float | None]
    ) -> None:
        super().__init__(server.loop, server.options)
        self.method, self.metadata, timeout_s = value
        self.deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        self.code: grpc.StatusCode = grpc.StatusCode.OK
        self.details = ""
        self.trailing_metadata: _Metadata = ()
        self.status_sent = self.metadata_sent = False
        self.abort_error: BaseException | None = None
        self.done_callbacks: list[Callable[[], None]] = []
        self.request_deserializer: Any = None
        self.response_serializer: Any = None
        self.peer = f"ipv4:{connection.end.peer.process.host}:{connection.end.address}"
        self._server = server
        self._is_closed = False  # nothing more is sent or received
        self._task: asyncio.Task[None] | None = None
        self.attach(connection, number)
        self._timers = [self._loop.call_later(world().chance.uniform(0.0, _DISPATCH_S), self._begin)]
        if timeout_s is not None:
            self._timers.append(self._loop.call_later(timeout_s, self._cancelled))

    # Events

    def came(self, frame: Frame) -> None:
        if frame.kind == "half":
            self.end_reads(drop=False)
        elif frame.kind == "reset":
            self._cancelled()
        else:
            super().came(frame)

    def connection_lost(self, reason: str) -> None:
        self._cancelled()

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status, and cancel its servicer."""
        if not self._is_closed and self.connection is not None:
            self.connection.send("trailers", self.number, (code, details, ()), headers_nbytes(()))
            self._cancelled()

    def _too_large(self, details: str) -> None:
        self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, details)

    def _cancelled(self) -> None:
        """The call is over for the client: reads get None, writes fail, and then the servicer is cancelled."""
        if self._is_closed:
            return
        self._close()
        self.end_reads(drop=True)
        if self._task is not None and not self._task.done() and not self.status_sent:
            self._loop.call_later(world().chance.uniform(0.0, _CANCEL_S), self._task.cancel)

    def _close(self) -> None:
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        self.detach()
        self._forget()

    def _forget(self) -> None:
        if self._is_closed and (self._task is None or self._task.done()):
            self._server.forget(self)

    # The servicer

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run(), name=f"HandleExceptions[{self.method}]")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        for callback in self.done_callbacks:
            callback()
        self._forget()

    async def _run(self) -> None:
        try:
            await self._serve()
            if self.abort_error is not None:
                log.error("Abort error unexpectedly suppressed: %r", self.abort_error)
        except AbortError:
            return
        except asyncio.CancelledError:
            log.debug("RPC cancelled for servicer method [%s]", self.method)
        except ExecuteBatchError:
            if not self._is_closed:
                log.exception("ExecuteBatchError raised in core by servicer method [%s]", self.method)
        except Exception as error:
            log.exception("Unexpected [%s] raised by servicer method [%s]", type(error).__name__, self.method)
            if not self.status_sent and not self._is_closed:
                code = grpc.StatusCode.UNKNOWN if self.code is grpc.StatusCode.OK else self.code
                with contextlib.suppress(ExecuteBatchError):
                    await self.send_status(code, f"Unexpected {type(error)}: {error}")

    async def _serve(self) -> None:
        handler = await self._server.find_handler(_CallDetails(self.method, self.metadata))
        if handler is None:
            await self.send_status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return
        context = ServicerCall(self)
        self.request_deserializer, self.response_serializer = handler.request_deserializer, handler.response_serializer
        asked = "stream" if handler.request_streaming else "unary"
        answered = "stream" if handler.response_streaming else "unary"
        behaviour = getattr(handler, f"{asked}_{answered}")
        request: Any = _Requests(context)
        if not handler.request_streaming:
            request = await context.read()
            if request is grpc.aio.EOF:  # cancelled at once
                return
        responses = behaviour(request, context)
        if not handler.response_streaming:
            response = await responses if inspect.isawaitable(responses) else responses
            self.raise_if_ended()
            if self.code is grpc.StatusCode.OK:
                self._send(response).add_done_callback(_ignore)  # the status waits behind it
        elif inspect.isawaitable(responses):
            await responses
        elif hasattr(responses, "__aiter__"):
            async for response in responses:
                await context.write(response)
        else:
            for response in responses:
                await context.write(response)
        if self.abort_error is not None:
            raise self.abort_error
        await self.send_status(self.code, self.details)

    def raise_if_ended(self) -> None:
        """Raise if the servicer has aborted the call, or its status is sent."""
        if self.abort_error is not None:
            raise self.abort_error
        if self.status_sent:
            raise UsageError("RPC already finished.")

    def _send(self, message: Any) -> asyncio.Future[None]:
        serialized = message if self.response_serializer is None else self.response_serializer(message)
        self.send_initial_metadata(())
        return self.send_message(serialized)

    async def write(self, message: Any) -> None:
        """Send a message; blocks while the client does not read."""
        await self._send(message)

    def send_initial_metadata(self, metadata: _Metadata) -> None:
        """Send the initial metadata, once."""
        if not self.metadata_sent:
            self.metadata_sent = True
            self.enqueue("initial", metadata, headers_nbytes(metadata)).add_done_callback(_ignore)

    async def send_status(self, code: grpc.StatusCode, details: str) -> None:
        """Send the status behind all messages, and wait until it is under way."""
        self.status_sent = True
        await self.enqueue("trailers", (code, details, self.trailing_metadata), headers_nbytes(self.trailing_metadata))
        self._close()


def _ignore(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()


class _Requests:
    """Iterator over a stream's requests; all loops over it share one generator, as in gRPC."""

    def __init__(self, context: ServicerCall) -> None:
        self._context = context
        self._messages: AsyncIterator[Any] | None = None

    async def _read(self) -> AsyncIterator[Any]:
        while (message := await self._context.read()) is not grpc.aio.EOF:
            yield message

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._messages is None:
            self._messages = self._read()
        return self._messages

    async def __anext__(self) -> Any:
        return await anext(self.__aiter__())


class ServicerCall(grpc.aio.ServicerContext[Any, Any]):
    """Context of a call for its servicer."""

    def __init__(self, call: ServerCall) -> None:
        self._call = call

    async def read(self) -> Any:
        call = self._call
        call.raise_if_ended()
        raw = await call.receive_message()
        call.raise_if_ended()
        if raw is None:
            return grpc.aio.EOF
        return raw if call.request_deserializer is None else call.request_deserializer(raw)

    async def write(self, message: Any) -> None:
        self._call.raise_if_ended()
        await self._call.write(message)

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self._call.raise_if_ended()
        if self._call.metadata_sent:
            raise UsageError("Send initial metadata failed: already sent")
        self._call.send_initial_metadata(tuple(initial_metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        call = self._call
        if call.abort_error is not None:
            raise UsageError("Abort already called!")
        call.abort_error = error = AbortError("Locally aborted.")
        call.trailing_metadata = tuple(trailing_metadata) or call.trailing_metadata
        call.code, call.details = code, details or call.details
        await call.send_status(code, call.details)
        raise error

    async def abort_with_status(self, status: Any) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._call.trailing_metadata = tuple(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self._call.trailing_metadata

    def invocation_metadata(self) -> Any:
        return self._call.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._call.code = code

    def code(self) -> grpc.StatusCode:
        return self._call.code

    def set_details(self, details: str) -> None:
        self._call.details = details

    def details(self) -> str:
        return self._call.details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Messages are not compressed."""

    def disable_next_message_compression(self) -> None:
        """Messages are not compressed."""

    def peer(self) -> str:
        return self._call.peer

    def peer_identities(self) -> Iterable[bytes] | None:
        return None

    def peer_identity_key(self) -> str | None:
        return None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def time_remaining(self) -> Any:
        deadline_s = self._call.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._call._loop.time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.done_callbacks.append(functools.partial(callback, self))

    def cancelled(self) -> bool:
        return self._call.code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._call.status_sent


class SimServer(grpc.aio.Server):
    """Server of one process."""

    def __init__(
        self,
        handlers: Sequence[Any] = (),
        interceptors: Sequence[Any] = (),
        options: Iterable[tuple[str, Any]] = (),
    ) -> None:
        thread = world().current
        assert thread is not None
        self.process: ProcessState = thread.process
        self.options, self.loop = dict(options), asyncio.get_running_loop()
        self._generic, self._interceptors = list(handlers), tuple(interceptors)
        self._registered: dict[str, Any] = {}
        self._addresses: list[tuple[str, str]] = []
        self._early: list[End] = []  # accepted by the kernel before `start`
        self._state = "ready"
        self._connections: dict[RpcConnection, None] = {}
        self._calls: dict[ServerCall, None] = {}
        self._terminated: asyncio.Future[None] = self.loop.create_future()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        self._generic.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        self._registered.update({f"/{service_name}/{name}": handler for name, handler in method_handlers.items()})

    def add_insecure_port(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port) or free_port()
        _, at = resolve(self.process, f"{host}:{number}")

        def accept(end: End) -> None:
            self.loop.call_soon_threadsafe(self._accept, end)

        try:
            world().network.listen(self.process, at, accept)
        except OSError as error:
            raise RuntimeError(f"Failed to bind to address {address}: {error.strerror}") from error
        self._addresses.append(at)
        return number

    def add_secure_port(self, address: str, server_credentials: Any) -> int:
        raise NotImplementedError("the simulated gRPC has no TLS")

    async def find_handler(self, details: Any) -> Any:
        """Return the handler of a call, or None. Interceptors come first."""

        async def ask(position: int, asked: Any) -> Any:
            if position == len(self._interceptors):
                return self._handler(asked)
            return await self._interceptors[position].intercept_service(functools.partial(ask, position + 1), asked)

        return await ask(0, details)

    def _handler(self, details: Any) -> Any:
        found = self._registered.get(details.method)
        others = (handler.service(details) for handler in self._generic)
        return found if found is not None else next((each for each in others if each is not None), None)

    # Connections and calls

    def _accept(self, end: End) -> None:
        if self._state == "ready":
            self._early.append(end)
        elif self._state == "running":
            connection = RpcConnection(end, self.loop, self.options, self._received, self._lost)
            self._connections[connection] = None
            connection.send("settings")
        else:
            end.close()

    def _received(self, connection: RpcConnection, frame: Frame) -> None:
        if frame.kind != "headers":
            return  # of a call that has ended
        if self._state == "running":
            self._calls[ServerCall(self, connection, frame.stream, frame.value)] = None
        else:
            status = grpc.StatusCode.UNAVAILABLE, "the server is shutting down", ()
            connection.send("trailers", frame.stream, status, headers_nbytes(()))

    def _lost(self, connection: RpcConnection, reason: str) -> None:
        self._connections.pop(connection, None)

    def forget(self, call: ServerCall) -> None:
        """The call has ended."""
        self._calls.pop(call, None)
        self._terminate_if_idle()

    def _terminate_if_idle(self) -> None:
        if self._state == "stopping" and not self._calls:
            self._state = "stopped"
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._terminated.set_result(None)

    # Life

    async def start(self) -> None:
        if self._state == "running":
            return
        if self._state != "ready":
            raise UsageError("SimServer not in ready state")
        self._state = "running"
        for end in self._early:
            self._accept(end)
        self._early.clear()

    async def stop(self, grace: float | None) -> None:
        for address in self._addresses:
            world().network.stop_listening(self.process, address)
        if self._state in ("ready", "stopped"):
            return
        if self._state == "running":
            self._state = "stopping"
            for connection in self._connections:
                connection.send("goaway")
            self._terminate_if_idle()
        if grace is not None:
            await asyncio.wait([self._terminated], timeout=grace)
        for call in list(self._calls):
            call.fail(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls")
        await asyncio.shield(self._terminated)

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        done, _ = await asyncio.wait([self._terminated], timeout=timeout)
        return not done

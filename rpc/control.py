"""gRPC servers, channels, calls with deadlines, and the main loop of every role. Contains no service.

Targets are gRPC's: "unix:/dir/name.sock" or "host:port". After `secure`, host:port traffic uses mutual TLS; after
`admit_by`, every call sends a join token and every server requires one.
"""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import uvloop

from rpc import gateway, unix_socket
from rpc.errors import (
    AddressInUse,
    BindFailed,
    CallRefused,
    ControlDeadlineExceeded,
    ControlError,
    InvalidArgument,
    Unavailable,
)
from rpc.grpc_tls import MembersOnly, TlsChannel, server_credentials
from rpc.join_tokens import JoinTokens, TokenChannel, TokensOnly
from rpc.tls import Identity, TlsFiles, identity

__all__ = [
    "AddressInUse",
    "BindFailed",
    "CallRefused",
    "ControlDeadlineExceeded",
    "ControlError",
    "ControlServer",
    "Unavailable",
    "admit_by",
    "call",
    "check_target",
    "open_channel",
    "outgoing",
    "run",
    "secure",
    "start_public_server",
    "start_server",
]

log = logging.getLogger(__name__)

MAX_MESSAGE_NBYTES = 256 << 20

_MESSAGE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_NBYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_MESSAGE_OPTIONS,
    # Otherwise two servers could share a port, and each would get half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
_CHANNEL_OPTIONS = [
    *_MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # All targets are in the cluster, so the environment's proxy must not be used.
    ("grpc.enable_http_proxy", 0),
    # Two channels to one target must not share a connection that is in back-off.
    ("grpc.use_local_subchannel_pool", 1),
]

T = TypeVar("T")

_identity: Identity | None = None
_tokens: JoinTokens | None = None


def secure(files: TlsFiles | None) -> None:
    """Encrypt host:port traffic of all servers and channels that this process creates from now on; None: do not.

    A process has one identity, so that no call can miss it. Raises InvalidArgument for unusable files.
    """
    global _identity
    _identity = None if files is None else identity(files)


def admit_by(tokens: JoinTokens | None) -> None:
    """Require one of `tokens` from callers of servers started later, and send the newest on channels opened later.

    None disables both. Unix sockets are included.
    """
    global _tokens
    _tokens = tokens


class ControlServer:
    """A started gRPC server. `target`: its address, with the real port."""

    def __init__(self, server: grpc.aio.Server, target: str) -> None:
        self.target = target
        self._server = server
        self._path = _unix_path(target)
        self._identity = unix_socket.identity(self._path) if self._path else None

    async def stop(self, grace: float | None = None) -> None:
        """Accept no new calls, give running ones `grace` seconds, then cancel them."""
        await self._server.stop(grace)
        # A successor may listen at the same path already: only our own socket is removed.
        if self._path is not None and self._identity is not None and unix_socket.identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)

    async def wait_for_termination(self) -> None:
        """Wait until `stop` has completed."""
        await self._server.wait_for_termination()


async def start_server(listen_target: str, add: Callable[[grpc.aio.Server], None]) -> ControlServer:
    """Start a server at `listen_target`; `add` registers the servicers. Port 0 picks a free port.

    Raises AddressInUse if another process listens there, BindFailed if the address cannot be bound, InvalidArgument if
    the target is malformed.
    """
    path = _unix_path(listen_target)
    own = _identity if path is None else None
    guards: list[grpc.aio.ServerInterceptor] = [TokensOnly(_tokens)] if _tokens else []
    if own is not None:
        guards.append(MembersOnly(own.files.name))
    elif _tokens is not None and path is None:
        log.warning(
            "%s requires join tokens without encryption: they can be read on the network between hosts; set "
            "tls_cert, tls_key and tls_ca, too",
            listen_target,
        )
    return await _start(listen_target, add, guards, server_credentials(own) if own is not None else None)


async def start_public_server(
    listen_target: str, add: Callable[[grpc.aio.Server], None], credentials: grpc.ServerCredentials | None
) -> ControlServer:
    """Start a server as `start_server` does, for callers that are no members of the cluster, such as a gateway.

    They need neither a join token nor a certificate. The server shows `credentials`; None: no encryption.
    """
    return await _start(listen_target, add, [], credentials)


async def _start(
    listen_target: str,
    add: Callable[[grpc.aio.Server], None],
    guards: list[grpc.aio.ServerInterceptor],
    credentials: grpc.ServerCredentials | None,
) -> ControlServer:
    path = _unix_path(listen_target)
    host_port = _split_host_port(listen_target) if path is None else None
    if path is not None:
        unix_socket.claim_socket(path)
    server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=guards)
    add(server)
    try:
        if credentials is None:
            port = server.add_insecure_port(listen_target)
            if path is not None:
                path.chmod(0o600)
        else:
            port = server.add_secure_port(listen_target, credentials)
    except RuntimeError as error:
        await server.stop(None)
        raise _bind_error(listen_target, host_port, error) from error
    await server.start()
    return ControlServer(server, listen_target if host_port is None else f"{host_port[0]}:{port}")


def target_to_dial(listened: str, advertise: str) -> str:
    """Return the target by which others reach a server listening at `listened`: `advertise`, unless empty.

    Port 0 in `advertise` stands for the port listened at. Raises InvalidArgument for a malformed target.
    """
    if not advertise:
        return listened
    if _unix_path(advertise) is not None:
        return advertise
    host, port = _split_host_port(advertise)
    if port:
        return advertise
    if _unix_path(listened) is not None:
        raise InvalidArgument(f"target must have a port, since the server listens at {listened}, got {advertise!r}")
    return f"{host}:{_split_host_port(listened)[1]}"


def check_target(target: str) -> None:
    """Raise InvalidArgument unless `target` is a valid gRPC target."""
    if _unix_path(target) is None:
        _split_host_port(target)


def open_channel(target: str) -> grpc.aio.Channel:
    """Open a channel with keepalive, 256 MiB messages and quick reconnects. The caller must close it.

    A target that is a URL is reached through an API server (`rpc.gateway`).
    """
    if gateway.is_forwarded(target):
        return gateway.open_gateway(target)
    check_target(target)
    channel: grpc.aio.Channel
    if _unix_path(target) is None and _identity is not None:
        channel = TlsChannel(target, _identity, _CHANNEL_OPTIONS)
    else:
        channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
    return channel if _tokens is None else TokenChannel(channel, _tokens)


async def call(rpc: Awaitable[T], *, what: str, target: str, deadline_s: float | None) -> T:
    """Await a unary call (or one `read`/`write` of a stream) and convert its failure to a ControlError.

    `what` names the call in the error, e.g. "Conductor.Schedule". The call is cancelled at the deadline.
    """
    try:
        async with asyncio.timeout(deadline_s):
            return await rpc
    except TimeoutError as error:
        raise ControlDeadlineExceeded(
            f"no answer within {deadline_s:.3g} s", what=what, target=target, code="DEADLINE_EXCEEDED"
        ) from error
    except grpc.aio.AioRpcError as error:
        raise control_error(error, what=what, target=target) from error


async def outgoing(messages: AsyncIterator[T], *, what: str, target: str) -> AsyncIterator[T]:
    """Yield the messages of a client's stream. An exception in producing the next one is logged and ends the stream.

    Otherwise gRPC would turn the exception into a cancellation of the caller, which looks like a shutdown.
    """
    try:
        async for message in messages:
            yield message
    except Exception:
        log.exception("%s of %s: producing the next message failed, the stream ends", what, target)


def end_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled.

    For loops that reopen a broken stream: if it breaks during the cancellation, gRPC raises only its own error.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def control_error(error: grpc.aio.AioRpcError, *, what: str, target: str) -> ControlError:
    """Convert gRPC's error to a ControlError; for loops over streams, which cannot use `call`."""
    code = error.code()
    kinds: dict[grpc.StatusCode, type[ControlError]] = {
        grpc.StatusCode.UNAVAILABLE: Unavailable,
        grpc.StatusCode.CANCELLED: Unavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: ControlDeadlineExceeded,
    }
    details = error.details() or "no details given"
    if _identity is None and "failed to connect" in details and "Socket closed" in details:
        details += "; it closed the connection at once: if it uses TLS, set tls_cert, tls_key and tls_ca here, too"
    if _identity is not None and "WRONG_VERSION_NUMBER" in details:
        details += (
            "; it does not use TLS, but this side does: set tls_cert, tls_key and tls_ca on both sides or neither"
        )
    return kinds.get(code, CallRefused)(details, what=what, target=target, code=code.name)


def run(main: Coroutine[Any, Any, T], *, stop: asyncio.Event | None = None) -> T | None:
    """Run `main` on a fresh uvloop until it returns.

    SIGINT and SIGTERM set `stop`, from which `main` is expected to return; a second signal, or the first one when no
    `stop` is given, cancels `main`, and None is returned.
    """

    async def supervised() -> T | None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(main)
        signalled = False

        def on_signal() -> None:
            nonlocal signalled
            if stop is None or stop.is_set():
                signalled = True
                task.cancel()
            else:
                stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        try:
            return await task
        except asyncio.CancelledError:
            if signalled:
                return None
            raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(supervised())


def _unix_path(target: str) -> Path | None:
    if not target.startswith("unix:"):
        return None
    path = target.removeprefix("unix:")
    path = "/" + path.lstrip("/") if path.startswith("//") else path
    if not path:
        raise InvalidArgument(f"target must be unix:/dir/name.sock, got {target!r}")
    return Path(path)


def _split_host_port(target: str) -> tuple[str, int]:
    host, colon, port = target.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"target must be unix:/dir/name.sock or host:port, got {target!r}")
    return host, int(port)


def _bind_error(target: str, host_port: tuple[str, int] | None, error: RuntimeError) -> AddressInUse | BindFailed:
    """Find the cause of a failed bind from the kernel; gRPC reports only "Failed to bind"."""
    if host_port is not None:
        host, port = host_port
        try:
            infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in infos:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                    probe.listen(1)
        except OSError as cause:
            if cause.errno == errno.EADDRINUSE:
                return AddressInUse(f"cannot listen at {target}: the port is in use; stop its owner, or choose another")
            return BindFailed(f"cannot listen at {target}: {cause}")
    return BindFailed(f"cannot listen at {target}: {error}")

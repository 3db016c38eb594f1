"""The frontend as a server: listening socket, HTTP server, startup and shutdown."""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, cast

import uvicorn

from frontend.api.app import build_app
from frontend.config import FrontendConfig
from frontend.errors import FrontendConfigError, HttpPortInUse
from frontend.http.acceptor import HttpAcceptor
from frontend.http.connections import BoundedProtocol, ConnectionLimits, ConnectionMonitor, HttpConnection
from frontend.http.shared_listener import SharedListener
from frontend.http.tls import Certificate, certificate_of
from frontend.service import Service, load_tokenizers

_log = logging.getLogger(__name__)

_BACKLOG: Final = 2048
_CONNECTIONS_END_S: Final = 2


async def serve_frontend(
    config: FrontendConfig,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    on_rest: Callable[[], None] = lambda: None,
    shared: SharedListener | None = None,
) -> None:
    """Serve HTTP until `stop` is set; then reject new requests, wait for running ones up to the grace period, and
    return.

    `on_ready(url)` is called once connections are answered, even if the cluster is not ready yet; `on_rest` whenever
    the last request in flight has ended. With a `shared` listener, a frontend that finds another one serving calls
    `on_ready("")` and stands by until that one has ended. Raises HttpPortInUse, FrontendConfigError or ModelFilesError
    before serving begins.
    """
    certificate = certificate_of(config.http.http_tls_cert, config.http.http_tls_key)
    listener = bind(config.http.host, config.http.port) if shared is None else shared.socket
    try:
        service = Service(config, await load_tokenizers(config.models), on_rest)
        if certificate is not None:
            service.access_metrics.watch_certificate(certificate.left_s)
        try:
            await service.start()
            server = _server_of(service, certificate)
            if shared is None or await _is_first(shared, stop, on_ready):
                await _serve(server, listener, stop, on_ready)
        finally:
            await service.close()
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises HttpPortInUse, or FrontendConfigError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise FrontendConfigError(f"cannot listen at {host}:{port}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listen at once: two sockets may be bound to the same port as long as neither listens.
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise HttpPortInUse(
                f"cannot listen at {host}:{port}: the port is in use; stop its process or choose another port"
            ) from error
        raise FrontendConfigError(f"cannot listen at {host}:{port}: {error}") from error
    return listener


async def _is_first(shared: SharedListener, stop: asyncio.Event, on_ready: Callable[[str], None]) -> bool:
    """Wait until no other frontend serves at the listener; return False if `stop` is set before."""
    if shared.try_take():
        return True
    _log.info("standing by: another frontend serves")
    on_ready("")
    taken, stopping = asyncio.create_task(shared.take()), asyncio.create_task(stop.wait())
    await asyncio.wait((taken, stopping), return_when=asyncio.FIRST_COMPLETED)
    is_first = taken.done() and not stop.is_set()
    for task in (taken, stopping):
        task.cancel()
    if is_first:
        _log.warning("the frontend that served has ended: serving in its place")
    return is_first


def _server_of(service: Service, certificate: Certificate | None) -> "_Server":
    return _Server(
        service,
        certificate,
        uvicorn.Config(
            build_app(service),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=service.config.access_log,
            proxy_headers=service.config.access_log,  # only the access log uses the client's address
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_CONNECTIONS_END_S,
        ),
    )


async def _serve(
    server: "_Server", listener: socket.socket, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    service = server.service
    serving = asyncio.create_task(server.serve([listener]), name="http")
    up, stopping = asyncio.create_task(server.is_up.wait()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, up), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            url = url_of(listener, server.scheme)
            _log.info("serving %s at %s", ", ".join(model.name for model in service.models), url)
            on_ready(url)
            service.loop_watch.start()
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            await service.drain()
    finally:
        server.should_exit = True
        server.connections.close()
        for task in (up, stopping):
            task.cancel()
        await serving


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the listener's URL for a client on this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn server that reports when it is up, uses `HttpAcceptor`, and leaves signals to the process."""

    def __init__(self, service: Service, certificate: Certificate | None, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.service = service
        self.scheme = "http" if certificate is None else "https"
        self._certificate = certificate
        self.is_up = asyncio.Event()
        limits = ConnectionLimits(service.config.http.max_connections, service.config.http.header_timeout_s)
        self.connections = ConnectionMonitor(limits, self._open_now, service.access_metrics.turned_away)
        service.access_metrics.watch_connections(lambda: len(self.server_state.connections))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        protocol = partial(BoundedProtocol, self.config, self.server_state, self.lifespan.state, self.connections)
        acceptor = partial(
            HttpAcceptor,
            protocol=protocol,
            has_room=self.connections.has_room,
            certificate=self._certificate,
            refused=self.connections.refused,
        )
        self.servers = [acceptor(listener) for listener in sockets or ()]  # type: ignore[misc]
        self.connections.start()
        self.is_up.set()

    def _open_now(self) -> set[HttpConnection]:
        return cast("set[HttpConnection]", self.server_state.connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

"""Acceptor of client connections that takes only a few per iteration of the event loop.

By default an event loop accepts all waiting connections, reads all their requests and starts all their responses in one
iteration. A burst of clients would delay the tokens of running requests.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final

from frontend.http.tls import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S, Certificate

_log = logging.getLogger(__name__)

_PER_ITERATION: Final = 8  # each takes some tenths of a millisecond
_PAUSE_S: Final = 0.5  # after an error such as having no file descriptor left


class HttpAcceptor:
    """Acceptor of a listening socket's connections. It replaces the asyncio server that uvicorn expects."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool] = lambda num_opening: True,
        certificate: Certificate | None = None,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`has_room(num_opening)` decides whether one more connection is taken beside those being opened.

        With a certificate, connections use TLS; `refused(reason)` is called if the handshake fails.
        """
        self._certificate = certificate
        self._refused = refused
        self._listener = listener
        self._protocol = protocol
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], None] = {}  # ordered by age, the oldest first
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accept no more connections; accepted ones continue."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Wait until every accepted connection has its protocol."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        # The event loop calls this again in its next iteration while connections wait.
        for _ in range(_PER_ITERATION):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                _log.error("accepting no connections for %g s: %s", _PAUSE_S, error)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._listen)
                return
            if not self._has_room(len(self._opening)):
                connection.close()
                self._end_oldest_handshake()
                continue
            connection.setblocking(False)
            opening = self._loop.create_task(self._open(connection))
            self._opening[opening] = None
            opening.add_done_callback(partial(self._opened, connection))

    async def _open(self, connection: socket.socket) -> None:
        try:
            if self._certificate is None:
                await self._loop.connect_accepted_socket(self._protocol, connection)
            else:
                await self._loop.connect_accepted_socket(
                    self._protocol,
                    connection,
                    ssl=self._certificate.context(),
                    ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                    ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S,
                )
        except OSError as error:
            if isinstance(error, ssl.SSLError | ConnectionAbortedError):  # the latter is a handshake timeout
                self._refused("tls_handshake")
            _log.debug("a connection ended while it was opened: %s", error)
            connection.close()

    def _opened(self, connection: socket.socket, opening: asyncio.Task[None]) -> None:
        del self._opening[opening]
        if opening.cancelled():  # possibly before it began
            connection.close()

    def _end_oldest_handshake(self) -> None:
        # Clients that leave handshakes unfinished must not lock out other clients.
        if self._certificate is not None and self._opening:
            self._refused("tls_handshake")
            next(iter(self._opening)).cancel()

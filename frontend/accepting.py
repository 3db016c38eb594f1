"""Letting clients in a few at a time, so that a crowd does not hold the event loop: others' tokens go out in between.

By itself an event loop takes all connections that wait, reads all their requests and begins to answer all of them
before it comes round again.
"""

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from frontend.http.tls import HANDSHAKE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S, Certificate

_log = logging.getLogger(__name__)
_PER_TURN: Final = 8  # each takes some tenths of a millisecond
_PAUSE_S: Final = 0.5  # when the process has no file descriptor left


class Accepting:
    """Accepts connections of a listening socket until `close`. Stands where uvicorn expects a server of asyncio's."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool] = lambda num_opening: True,
        certificate: Certificate | None = None,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`has_room` is asked, with the number of those on their way in, before each: it is turned away where not.

        With a certificate TLS is spoken, without it not; `refused` is called where that does not come about.
        """
        self._certificate = certificate
        self._refused = refused
        self._listener = listener
        self._protocol = protocol
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Take no more connections; those that were taken go on."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Until each connection that was taken has its protocol."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Called again in the next turn of the loop while somebody waits."""
        for _ in range(_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                _log.error("no connection can be taken for %g s: %s", _PAUSE_S, error)
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
            if isinstance(error, ssl.SSLError | ConnectionAbortedError):  # the latter: not in time
                self._refused("tls_handshake")
            _log.debug("a client left as it came: %s", error)
            connection.close()

    def _opened(self, connection: socket.socket, opening: asyncio.Task[None]) -> None:
        del self._opening[opening]
        if opening.cancelled():  # perhaps before it began
            connection.close()

    def _end_oldest_handshake(self) -> None:
        """Whoever begins handshakes and does not end them must not keep the others out."""
        if self._certificate is not None and self._opening:
            self._refused("tls_handshake")
            next(iter(self._opening)).cancel()


class Turnstile:
    """Lets so many pass per turn of the event loop; the others wait for theirs in order."""

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turns = False  # it is known that the loop comes round

    async def take(self) -> None:
        """Return in one's turn."""
        self._await_turn()
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _await_turn(self) -> None:
        if not self._turns:
            self._turns = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turns, self._left = False, self._per_turn
        while self._waiting and self._left > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            self._await_turn()

"""Letting clients in a few at a time, so that a crowd does not hold the event loop: others' tokens go out in between.

By itself an event loop takes all connections that wait, reads all their requests and begins to answer all of them
before it comes round again.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

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
    ) -> None:
        """`has_room` is asked, with the number of those on their way in, before each: it is turned away where not."""
        self._listener = listener
        self._protocol = protocol
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Take no more connections; those that were taken go on."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    async def wait_closed(self) -> None:
        """Until each connection that was taken has its protocol."""
        await asyncio.gather(*self._opening)

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
                continue
            connection.setblocking(False)
            opening = self._loop.create_task(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError as error:
            _log.info("a client left as it came: %s", error)
            connection.close()


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

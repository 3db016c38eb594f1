"""HTTP connections: the protocol with limits on requests' heads, and the monitor of open connections.

Time is counted in ticks of a sweep over all connections, so that a request needs no timer and does not read the clock.
"""

import asyncio
import json
import logging
import math
import resource
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from frontend.http.read_pace import ReadPace

_log = logging.getLogger(__name__)

_LONGEST_TICK_S: Final = 1.0
_TICKS_OF_TIMEOUT: Final = 4
_LEAVING_PART: Final = 16
_STUCK_TIMEOUTS: Final = 4
_TOLD_EVERY_S: Final = 60.0
_DROPPED_NBYTES_PER_S: Final = 128 << 20
_DROPPED_BURST_S: Final = 0.25


class HttpConnection(Protocol):
    """Interface of one connection, as the monitor uses it."""

    since_tick: int
    """Tick at which it was opened, began to send a request's head, or finished its last response."""

    @property
    def is_serving(self) -> bool:
        """True while a request is in flight or a response is not completely sent."""

    def unsent_since(self, tick: int) -> int:
        """Return the tick since which the client has read none of its pending data; `tick` (now) if none is pending."""

    def leave(self) -> None:
        """Close the connection immediately."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the connections of one frontend."""

    max_connections: int = 10_000
    header_timeout_s: float = 15.0
    """Time from the connection's start, or a further request's first byte, to the end of the request's headers; also
    for the rest of a refused request's body. A client that does not read its response is closed after four times this.
    """
    max_header_nbytes: int = 64 << 10
    """Size of the request line and all headers."""
    max_headers: int = 128
    max_pipelined: int = 16
    """Number of requests sent before the response to the first."""


class ConnectionMonitor:
    """Monitor that closes idle and stuck connections within a tick. Call `start` before use and `close` after it."""

    def __init__(
        self, limits: ConnectionLimits, open_now: Callable[[], set[HttpConnection]], count: Callable[[str], None]
    ) -> None:
        """`count(reason)` is called for each connection that is refused or closed by a limit."""
        self.limits = limits
        self.tick = 0
        self.drops = ReadPace(_DROPPED_NBYTES_PER_S, _DROPPED_BURST_S)  # of the rest of refused requests
        self._open_now = open_now
        self._count = count
        self._tick_s = min(_LONGEST_TICK_S, limits.header_timeout_s / _TICKS_OF_TIMEOUT)
        self._patience = math.ceil(limits.header_timeout_s / self._tick_s)
        self._most = min(limits.max_connections, _descriptors_for_connections())
        self._timer: asyncio.TimerHandle | None = None
        self._untold: dict[str, int] = {}
        self._told_tick = -math.inf

    def start(self) -> None:
        """Start sweeping."""
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._sweep)

    def close(self) -> None:
        """Stop sweeping."""
        if self._timer is not None:
            self._timer.cancel()
        self._log_closed()

    def refused(self, reason: str) -> None:
        """Count a refused connection; the log reports the counts in summary."""
        self._count(reason)
        self._untold[reason] = self._untold.get(reason, 0) + 1

    def has_room(self, num_opening: int) -> bool:
        """Return True if one more connection may be opened besides the `num_opening` being opened.

        If the limit is reached, the connections that have been idle longest are closed, so that idle connections cannot
        lock out new clients.
        """
        open_now = self._open_now()
        if len(open_now) + num_opening < self._most:
            return True
        waiting = sorted((each for each in open_now if not each.is_serving), key=lambda each: each.since_tick)
        for each in waiting[: max(1, self._most // _LEAVING_PART)]:
            self.refused("no_room")
            each.leave()
        if not waiting:
            self.refused("no_room")
        # They are gone in the event loop's next iteration; the new connection may take the place of one of them.
        return bool(waiting)

    def _sweep(self) -> None:
        self.tick += 1
        late, stuck = self.tick - self._patience, self.tick - self._patience * _STUCK_TIMEOUTS
        for each in list(self._open_now()):
            if each.unsent_since(self.tick) < stuck:
                self.refused("answer_not_read")
                each.leave()
            elif each.since_tick < late and not each.is_serving:
                self.refused("header_timeout")
                each.leave()
        if (self.tick - self._told_tick) * self._tick_s >= _TOLD_EVERY_S:
            self._log_closed()
        self.start()

    def _log_closed(self) -> None:
        # One line for any number of connections: a flood of them must not fill the disk.
        if self._untold:
            what = ", ".join(f"{count} {reason}" for reason, count in sorted(self._untold.items()))
            _log.warning("connections refused or closed since the last report: %s", what)
            self._untold.clear()
            self._told_tick = self.tick


def _descriptors_for_connections() -> int:
    """Return three quarters of the open-file limit; the rest is for workers, conductors and logs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft * 3 // 4


_PROBLEMS: Final = {
    "malformed": (400, "malformed HTTP/1.1 request"),
    "tls_to_plain": (
        400,
        "this port uses plain HTTP, but the client began a TLS handshake: use http:// instead of https://",
    ),
    "header_size": (431, "the request line and headers must have at most {0.max_header_nbytes} bytes"),
    "header_count": (431, "the request must have at most {0.max_headers} headers"),
    "pipelined": (429, "at most {0.max_pipelined} requests may be pipelined before the first one's response"),
}
_TLS_HANDSHAKE: Final = b"\x16\x03"


class _Refused(Exception):
    """Signal raised through the parser to stop it."""


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 protocol with limits on a request's head, which uvicorn lacks.

    A request over a limit gets an error response and is not read further. A response in progress is never interrupted
    by an error response.
    """

    QUOTA_REASONS: ClassVar[tuple[str, ...]] = tuple(_PROBLEMS)

    def __init__(
        self, config: uvicorn.Config, state: ServerState, app_state: dict[str, Any], connections: ConnectionMonitor
    ) -> None:
        super().__init__(config, state, app_state)
        self.since_tick = connections.tick
        self._watch = connections
        self._limits = connections.limits
        self._unparsed_nbytes = 0  # received since the parser last reported a head or a piece of a body
        self._has_told = False
        self._had_head = False
        self._reason = "malformed"
        self._is_leaving = False
        self._unsent_nbytes = 0
        self._taken_tick = 0

    @property
    def is_serving(self) -> bool:
        """True while a request is in flight or a response is not completely sent."""
        return self._is_answering or (not self._is_leaving and self.transport.get_write_buffer_size() > 0)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def unsent_since(self, tick: int) -> int:
        """Return the tick since which the client has read none of its pending data; `tick` (now) if none is pending."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent_nbytes:
            self._unsent_nbytes, self._taken_tick = unsent, tick
        return self._taken_tick

    def leave(self) -> None:
        """Close the connection immediately."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client."""
        self._unset_keepalive_if_required()
        if self._is_leaving:
            self._drop(len(data))
            return
        self._has_told = False
        self._unparsed_nbytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if not self._had_head and data.startswith(_TLS_HANDSHAKE):
                self._reason = "tls_to_plain"
            self._refuse()
        except httptools.HttpParserUpgrade:
            pass  # the upgrade is ignored; the request is answered as HTTP/1.1
        else:
            if self._has_told:
                self._unparsed_nbytes = 0
            elif self._unparsed_nbytes > self._limits.max_header_nbytes:
                self._reason = "header_size"
                self._refuse()

    def on_message_begin(self) -> None:
        """Note the start of a request."""
        self.since_tick = self._watch.tick
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Check a complete request head against the limits."""
        self._has_told = self._had_head = True
        limits = self._limits
        if len(self.headers) > limits.max_headers:
            self._reason = "header_count"
            raise _Refused
        if self._unparsed_nbytes > limits.max_header_nbytes and self._head_nbytes() > limits.max_header_nbytes:
            self._reason = "header_size"
            raise _Refused
        if len(self.pipeline) >= limits.max_pipelined:
            self._reason = "pipelined"
            raise _Refused
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note a piece of a request's body."""
        self._has_told = True
        if self.cycle.response_complete:
            self._drop(len(body))
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Start the time limit for the next request's head or the rest of this body."""
        self.since_tick = self._watch.tick
        super().on_response_complete()

    def _drop(self, nbytes: int) -> None:
        """Pause reading what is dropped, as all connections together drop at a bounded pace."""
        pause_s = self._watch.drops.pause_s(nbytes, self.loop.time())
        if pause_s and not self.flow.read_paused:
            self.flow.pause_reading()
            self.loop.call_later(pause_s, self.flow.resume_reading)

    def _head_nbytes(self) -> int:
        return len(self.url) + sum([len(name) + len(value) for name, value in self.headers])

    def _refuse(self) -> None:
        """Send the error response and half-close the connection.

        Further data is read and dropped, and the sweep closes the connection at the latest. Closing it immediately
        could discard the response before the client reads it.
        """
        self._watch.refused(self._reason)
        if self._is_answering:
            self.leave()
            return
        self._is_leaving = True
        self.since_tick = self._watch.tick
        status, problem = _PROBLEMS[self._reason]
        self.transport.write(_answer(status, problem.format(self._limits)))
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _answer(status: int, problem: str) -> bytes:
    kind = "rate_limit_error" if status == HTTPStatus.TOO_MANY_REQUESTS else "invalid_request_error"
    body = json.dumps({"error": {"message": problem, "type": kind, "param": None, "code": None}}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body

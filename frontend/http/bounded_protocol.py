"""HTTP/1.1 of one connection with bounds, of which uvicorn sets none to a request's head nor to the time it takes."""

import json
from http import HTTPStatus
from typing import Any, ClassVar, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from frontend.http.connections import Connections

_PROBLEMS: Final = {
    "malformed": (400, "this is no HTTP/1.1 request"),
    "tls_to_plain": (400, "this port speaks plain HTTP, and TLS was begun: use http:// instead of https://"),
    "header_size": (431, "the request line and headers have more than {0.max_header_nbytes} bytes"),
    "header_count": (431, "the request has more than {0.max_headers} headers"),
    "pipelined": (429, "more than {0.max_pipelined} requests were sent ahead of the first one's answer"),
}
_TLS_HANDSHAKE: Final = b"\x16\x03"


class _Refused(Exception):
    """Raised into the parser."""


class BoundedProtocol(HttpToolsProtocol):
    """What is over a bound is answered, and then not read any more; answers under way are never broken into."""

    REASONS: ClassVar[tuple[str, ...]] = tuple(_PROBLEMS)

    def __init__(
        self, config: uvicorn.Config, state: ServerState, app_state: dict[str, Any], connections: Connections
    ) -> None:
        super().__init__(config, state, app_state)
        self.since_tick = connections.tick
        self._watch = connections
        self._limits = connections.limits
        self._unparsed_nbytes = 0  # received since the parser last told of a head or of a piece of a body
        self._has_told = False
        self._had_head = False
        self._reason = "malformed"
        self._is_leaving = False
        self._unsent_nbytes = 0
        self._taken_tick = 0

    @property
    def is_serving(self) -> bool:
        """Whether a request is in flight, or an answer not sent whole."""
        return self._is_answering or (not self._is_leaving and self.transport.get_write_buffer_size() > 0)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def unsent_since(self, tick: int) -> int:
        """The tick since which the client has taken nothing of what waits for it; `tick`, now, while nothing waits."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent_nbytes:
            self._unsent_nbytes, self._taken_tick = unsent, tick
        return self._taken_tick

    def leave(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        self._unset_keepalive_if_required()
        if self._is_leaving:
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
            pass  # it was answered as if nothing else were spoken here
        else:
            if self._has_told:
                self._unparsed_nbytes = 0
            elif self._unparsed_nbytes > self._limits.max_header_nbytes:
                self._reason = "header_size"
                self._refuse()

    def on_message_begin(self) -> None:
        """The first bytes of a request."""
        self.since_tick = self._watch.tick
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request's head is whole."""
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
        """A piece of a request's body."""
        self._has_told = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        """From here the next request's head, or the rest of this one's body, is waited for."""
        self.since_tick = self._watch.tick
        super().on_response_complete()

    def _head_nbytes(self) -> int:
        return len(self.url) + sum([len(name) + len(value) for name, value in self.headers])

    def _refuse(self) -> None:
        """Answer and let the client go. What it still sends is read and dropped, and the connection closed by the sweep
        at the latest: closed at once, it would take the answer with it."""
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

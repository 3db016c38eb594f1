"""Server-sent events."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.api.presence import Expiry, Presence
from frontend.errors import ApiError, ClientGone
from telemetry import logs

_log = logging.getLogger(__name__)
_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
_DONE: Final = b"data: [DONE]\n\n"


def encode(value: Any) -> bytes:
    """JSON as sent to clients."""
    return _JSON.encode(value).encode()


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends the server-sent events that `more` gives until `is_over`, the client leaves, or one of `aborts` is done.

    `first` goes out with the headers; what `more` gives once `is_over` goes out with the stream's end. An ApiError of
    `more` is sent as an error event. `close` is awaited in any case, perhaps twice. `deadline_s()` (monotonic clock),
    which may recede, bounds a client that neither reads nor leaves.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        more: Callable[[], Awaitable[bytes]],
        *,
        presence: Presence,
        request_id: str,
        is_over: Callable[[], bool],
        aborts: Sequence["asyncio.Future[None]"],
        close: Callable[[], Awaitable[None]],
        deadline_s: Callable[[], float],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # set by Response for its empty body
        self._first = first
        self._more = more
        self._presence = presence
        self._request_id = request_id
        self._is_over = is_over
        self._aborts = aborts
        self._close = close
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        expiry = Expiry(self._deadline_s)
        with logs.request(self._request_id):
            try:
                await self._presence.during(self._pump(send), expiry.reached, *self._aborts)
            except ClientGone:
                pass  # nobody reads what could be said
            finally:
                expiry.close()
                await asyncio.shield(self._end())

    async def _end(self) -> None:
        await self._presence.close()
        await self._close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            events = self._first
            while not self._is_over():
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                events = await self._more()
        except ApiError as error:
            _log.warning("told in the stream: %s", error)
            events = event(encode(error.body()))
        # Before the last word, so that whoever has read it finds the request counted and nothing held.
        await self._close()
        await send({"type": "http.response.body", "body": events + _DONE, "more_body": False})

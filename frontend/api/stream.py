"""Server-sent events, and noticing that a client has gone."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from time import monotonic
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.errors import ApiError, ClientGone

_log = logging.getLogger(__name__)
_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
_DONE: Final = b"data: [DONE]\n\n"
T = TypeVar("T")


def encode(value: Any) -> bytes:
    """JSON as sent to clients."""
    return _JSON.encode(value).encode()


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; when the client leaves first, `work` is cancelled and ClientGone raised."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client left before its answer was ready")
        return task.result()
    finally:
        await _end(task, gone)


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
        self._is_over = is_over
        self._aborts = aborts
        self._close = close
        self._deadline_s = deadline_s
        self._context = copy_context()  # what is logged while it is sent names the same request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send), context=self._context)
        gone = asyncio.create_task(_disconnected(receive))
        try:
            done: set[asyncio.Future[Any]] = set()
            while not done and (left_s := self._deadline_s() - monotonic()) > 0:
                done, _ = await asyncio.wait(
                    (pump, gone, *self._aborts), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
            if pump.done():
                pump.result()
        finally:
            await _end(pump, gone)
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

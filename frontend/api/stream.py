"""Server-sent events, and noticing that a client has gone."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from time import monotonic
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.errors import ApiError, ClientGone

_log = logging.getLogger(__name__)
T = TypeVar("T")


def encode(value: Any) -> bytes:
    """JSON as sent to clients."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


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
    """Sends what `more` gives as server-sent events until it gives None, the client leaves, or `abort` returns.

    An ApiError of `more` is sent as an error event. `close` is awaited in any case, perhaps twice. `deadline_s()`
    (monotonic clock), which may recede, bounds a client that neither reads nor leaves.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Sequence[Any],
        more: Callable[[], Awaitable[Sequence[Any] | None]],
        *,
        abort: Callable[[], Coroutine[Any, Any, None]],
        close: Callable[[], Awaitable[None]],
        deadline_s: Callable[[], float],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # set by Response for its empty body
        self._first = first
        self._more = more
        self._abort = abort
        self._close = close
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        watches = asyncio.create_task(_disconnected(receive)), asyncio.create_task(self._abort())
        try:
            done: set[asyncio.Task[Any]] = set()
            while not done and (left_s := self._deadline_s() - monotonic()) > 0:
                done, _ = await asyncio.wait((pump, *watches), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await _end(pump, *watches)
            await self._close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            chunks: Sequence[Any] | None = self._first
            while chunks is not None:
                for chunk in chunks:
                    await self._event(send, encode(chunk))
                chunks = await self._more()
        except ApiError as error:
            _log.warning("told in the stream: %s", error)
            await self._event(send, encode(error.body()))
        # Before the last word, so that whoever has read it finds the request counted and nothing held.
        await self._close()
        await self._event(send, b"[DONE]", last=True)

    @staticmethod
    async def _event(send: Send, data: bytes, *, last: bool = False) -> None:
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": not last})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

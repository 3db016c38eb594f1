"""Noticing that a client has gone, by one task for the whole of its request.

Server-sent events.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.errors import ApiError, ClientGone
from telemetry import logs

_log = logging.getLogger(__name__)

T = TypeVar("T")


class DisconnectWatch:
    """Of one client, from when its request was read on. `close` in any case."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.create_task(_disconnected(receive))

    async def run(self, work: Awaitable[T], *ends: "asyncio.Future[Any]") -> T:
        """What `work`, done in the task that calls, returns or raises.

        When the client leaves first, or one of `ends` is done, `work` is cancelled and ClientGone raised.
        """
        own = asyncio.current_task()
        assert own is not None
        already, interrupted, over = own.cancelling(), False, False

        def interrupt(_: object) -> None:
            nonlocal interrupted
            if not interrupted and not over:
                interrupted = True
                own.cancel()

        watched = (self._gone, *ends)
        for each in watched:
            each.add_done_callback(interrupt)
        try:
            return await work
        except asyncio.CancelledError:
            if interrupted and own.uncancel() <= already:
                raise ClientGone("the client left before its answer was ready") from None
            raise
        finally:
            over = True
            for each in watched:
                each.remove_done_callback(interrupt)

    async def close(self) -> None:
        """Leave no task behind."""
        self._gone.cancel()
        await asyncio.gather(self._gone, return_exceptions=True)


class RecedingDeadline:
    """A future that is done at a deadline which may recede: `deadline_s()`, of the monotonic clock."""

    def __init__(self, deadline_s: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_s
        self.reached: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._loop.call_at(deadline_s(), self._look)

    def close(self) -> None:
        """Leave no timer behind."""
        self._timer.cancel()

    def _look(self) -> None:
        deadline_s = self._deadline_s()
        if self._loop.time() < deadline_s:
            self._timer = self._loop.call_at(deadline_s, self._look)
        else:
            self.reached.set_result(None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)
_DONE: Final = b"data: [DONE]\n\n"


def encode(value: Any) -> bytes:
    """JSON as sent to clients."""
    return _JSON.encode(value).encode()


def event(data: bytes) -> bytes:
    """A server-sent event."""
    return b"data: " + data + b"\n\n"


class EventStreamResponse(Response):
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
        disconnect_watch: DisconnectWatch,
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
        self._presence = disconnect_watch
        self._request_id = request_id
        self._is_over = is_over
        self._aborts = aborts
        self._close = close
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        expiry = RecedingDeadline(self._deadline_s)
        with logs.request(self._request_id):
            try:
                await self._presence.run(self._pump(send), expiry.reached, *self._aborts)
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

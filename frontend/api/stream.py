"""Server-sent events, and detection of clients that disconnect."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.errors import ApiError, ClientGone
from telemetry import logs

_log = logging.getLogger(__name__)

T = TypeVar("T")


class DisconnectWatch:
    """Watch for one client's disconnect, from the end of its request's body on. Always call `close`."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.create_task(_disconnected(receive))

    async def run(self, work: Awaitable[T], *ends: "asyncio.Future[Any]") -> T:
        """Run `work` in the calling task; return its result or raise its error.

        If the client disconnects or one of `ends` is done first, `work` is cancelled and ClientGone is raised.
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
                raise ClientGone("the client disconnected before its answer was ready") from None
            raise
        finally:
            over = True
            for each in watched:
                each.remove_done_callback(interrupt)

    async def close(self) -> None:
        """Cancel the watching task."""
        self._gone.cancel()
        await asyncio.gather(self._gone, return_exceptions=True)


class RecedingDeadline:
    """Future that is resolved at `deadline_s()` (monotonic clock), a deadline that may move later."""

    def __init__(self, deadline_s: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_s
        self.reached: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._loop.call_at(deadline_s(), self._check)

    def close(self) -> None:
        """Cancel the timer."""
        self._timer.cancel()

    def _check(self) -> None:
        deadline_s = self._deadline_s()
        if self._loop.time() < deadline_s:
            self._timer = self._loop.call_at(deadline_s, self._check)
        else:
            self.reached.set_result(None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), check_circular=False)


def encode(value: Any) -> bytes:
    """Return `value` as JSON, as sent to clients."""
    return _JSON.encode(value).encode()


def event(data: bytes, name: str = "") -> bytes:
    """Return a server-sent event, which has the field `event` if it has a name."""
    return (f"event: {name}\ndata: ".encode() if name else b"data: ") + data + b"\n\n"


@dataclass(frozen=True)
class EventSource:
    """Source of a stream's events, and the conditions that end it.

    `more` returns the next events until `is_over`; events returned once it is over are sent with `end`, the stream's
    last bytes. `failure` returns the event of an error of `more`.
    The stream also ends when one of `aborts` is done. `close` is always awaited, possibly twice. `deadline_s()`
    (monotonic clock), which may move later, bounds a client that neither reads nor disconnects.
    """

    more: Callable[[], Awaitable[bytes]]
    failure: Callable[[ApiError], bytes]
    end: bytes
    is_over: Callable[[], bool]
    aborts: Sequence["asyncio.Future[None]"]
    close: Callable[[], Awaitable[None]]
    deadline_s: Callable[[], float]


class EventStreamResponse(Response):
    """Response that sends the source's server-sent events until it is over or aborted or the client disconnects.

    `first` is sent with the headers. An ApiError of the source is sent as an error event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        source: EventSource,
        *,
        disconnect_watch: DisconnectWatch,
        request_id: str,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # set by Response for its empty body
        self._first = first
        self._source = source
        self._disconnect_watch = disconnect_watch
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        expiry = RecedingDeadline(self._source.deadline_s)
        with logs.request(self._request_id):
            try:
                await self._disconnect_watch.run(self._pump(send), expiry.reached, *self._source.aborts)
            except ClientGone:
                pass  # the client is gone
            finally:
                expiry.close()
                await asyncio.shield(self._end())

    async def _end(self) -> None:
        await self._disconnect_watch.close()
        await self._source.close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            events = self._first
            while not self._source.is_over():
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                events = await self._source.more()
        except ApiError as error:
            _log.warning("error sent in the stream: %s", error)
            events = self._source.failure(error)
        # Close before the last event, so that a client that has read it finds the request counted and all resources
        # released.
        await self._source.close()
        await send({"type": "http.response.body", "body": events + self._source.end, "more_body": False})

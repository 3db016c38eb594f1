"""Noticing that a client has gone, by one task for the whole of its request."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.types import Receive

from frontend.errors import ClientGone

T = TypeVar("T")


class Presence:
    """Of one client, from when its request was read on. `close` in any case."""

    def __init__(self, receive: Receive) -> None:
        self._gone = asyncio.create_task(_disconnected(receive))

    async def during(self, work: Awaitable[T], *ends: "asyncio.Future[Any]") -> T:
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


class Expiry:
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

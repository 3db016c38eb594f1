"""What workers say about one attempt of one request, in order of arrival and bounded, and the wait for it."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from moonpool_proto.v1 import worker_pb2

_CLOCK_S: Final = 0.001  # the loop's timers are no finer


class TokenArrived(NamedTuple):
    """A token; `at_s` is when it was read from the worker's stream, on the monotonic clock. The one event that there
    are many of: a named tuple is made three times as fast as a frozen dataclass."""

    node_id: str
    token: worker_pb2.Token
    at_s: float


@dataclass(frozen=True)
class AttemptFailed:
    """The worker gave the attempt up."""

    node_id: str
    failure: worker_pb2.Failure


@dataclass(frozen=True)
class WorkerGone:
    """The worker's stream ended, or the worker hangs: whatever it had of the attempt is lost."""

    node_id: str
    reason: str


Event = TokenArrived | AttemptFailed | WorkerGone


class Inbox:
    """A queue whose writers never wait: at `capacity` tokens it overflows, once, and takes no more tokens.

    Failures are always taken: there are at most a few per attempt. One reader; `close` once it reads no more.
    """

    def __init__(self, capacity: int, on_overflow: Callable[[], None]) -> None:
        self._events: list[Event] = []
        self._capacity = capacity
        self._on_overflow = on_overflow
        self._waiter: asyncio.Future[None] | None = None
        # A timer per wait would cost more than the wait: one is left to ring, and set again if it rings too early.
        self._alarm: asyncio.Handle | None = None
        self._alarm_s = self._until_s = math.inf
        self.overflowed = False

    def put(self, event: Event) -> None:
        """Take an event now."""
        if type(event) is TokenArrived:
            if self.overflowed:
                return
            if len(self._events) >= self._capacity:
                self.overflowed = True
                self._on_overflow()
                self._wake()
                return
        self._events.append(event)
        self._wake()

    async def take(self, until_s: float = math.inf) -> list[Event]:
        """All events there are; waits for one. Empty only when the inbox overflowed.

        Raises TimeoutError at `until_s` (the monotonic clock), and when it is interrupted.
        """
        if not self._events and not self.overflowed:
            self._waiter = asyncio.get_running_loop().create_future()
            self._ring_at(until_s)
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events

    def interrupt(self) -> None:
        """Make the `take` that waits now, if one does, raise TimeoutError."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def close(self) -> None:
        """Leave no timer behind."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ring_at(self, until_s: float) -> None:
        self._until_s = until_s
        if self._alarm is not None and self._alarm_s > until_s:
            self.close()
        if self._alarm is None and until_s < math.inf:
            self._alarm, self._alarm_s = asyncio.get_running_loop().call_at(until_s, self._rings), until_s

    def _rings(self) -> None:
        self._alarm = None
        if self._waiter is None:
            return  # the next wait sets it
        if asyncio.get_running_loop().time() + _CLOCK_S >= self._until_s:
            self.interrupt()
        else:
            self._ring_at(self._until_s)

"""What workers say about one attempt of one request, in order of arrival and bounded. Pure but for one event."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from moonpool_proto.v1 import worker_pb2


@dataclass(frozen=True)
class TokenArrived:
    """A token; `at_s` is when it was read from the worker's stream, on the monotonic clock."""

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

    Failures are always taken: there are at most a few per attempt.
    """

    def __init__(self, capacity: int, on_overflow: Callable[[], None]) -> None:
        self._events: deque[Event] = deque()
        self._capacity = capacity
        self._on_overflow = on_overflow
        self._arrived = asyncio.Event()
        self.overflowed = False

    def put(self, event: Event) -> None:
        """Take an event now."""
        if isinstance(event, TokenArrived):
            if self.overflowed:
                return
            if len(self._events) >= self._capacity:
                self.overflowed = True
                self._on_overflow()
                self._arrived.set()
                return
        self._events.append(event)
        self._arrived.set()

    async def take(self) -> list[Event]:
        """All events there are; waits for one. Empty only when the inbox overflowed."""
        await self._arrived.wait()
        events = list(self._events)
        self._events.clear()
        if not self.overflowed:
            self._arrived.clear()
        return events

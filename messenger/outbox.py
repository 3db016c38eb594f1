"""What a stream still owes its callers: the parts queued and those in flight, in order. Pure; the stream locks it.

A part moves queued → in flight → gone, and back to the queue's front when its connection broke or it has a next step.
An operation with a failure is doomed: its queued parts are dropped, and it is settled when none of its parts is left.
The methods return the operations that are to be settled now, each exactly once.
"""

from collections import deque
from collections.abc import Callable, Iterable

from messenger.operation import Operation, Part


class Outbox:
    def __init__(self) -> None:
        self._queue: deque[Part] = deque()
        self._in_flight: deque[Part] = deque()
        self._next_seq = 1

    def __len__(self) -> int:
        return len(self._queue) + len(self._in_flight)

    @property
    def has_queued(self) -> bool:
        return bool(self._queue)

    @property
    def has_in_flight(self) -> bool:
        return bool(self._in_flight)

    def push(self, parts: Iterable[Part]) -> None:
        """Queue at the end."""
        self._queue.extend(parts)

    def only_queued(self) -> Part | None:
        """The part that is all there is; None when there are more, or one is in flight."""
        return self._queue[0] if len(self._queue) == 1 and not self._in_flight else None

    def begin(self) -> Part:
        """The oldest queued part, in flight from now on. A part that is sent again keeps its number."""
        part = self._queue.popleft()
        if not part.seq:
            part.seq = self._next_seq
            self._next_seq += 1
        self._in_flight.append(part)
        return part

    def oldest_in_flight(self) -> Part | None:
        return self._in_flight[0] if self._in_flight else None

    def carries(self, operation: Operation) -> bool:
        """Whether a part of the operation is in flight."""
        return any(part.operation is operation for part in self._in_flight)

    def done(self) -> list[Operation]:
        """The oldest part in flight was acknowledged."""
        part = self._in_flight.popleft()
        part.operation.acknowledged_nbytes += part.nbytes
        return self._forget(part)

    def refused(self, failure: Exception) -> list[Operation]:
        """The owner refused the oldest part in flight, which dooms its operation."""
        part = self._in_flight.popleft()
        part.operation.failure = part.operation.failure or failure
        return self._forget(part) + self.drop_doomed()

    def next_step(self) -> list[Operation]:
        """The oldest part in flight is to be sent once more, as a new request."""
        part = self._in_flight.popleft()
        part.seq = part.attempts = 0
        self._queue.appendleft(part)
        return self.drop_doomed()

    def connection_lost(self) -> list[Operation]:
        """What was in flight is queued again, before everything else."""
        for part in self._in_flight:
            part.copied = False
        self._queue.extendleft(reversed(self._in_flight))
        self._in_flight.clear()
        return self.drop_doomed()

    def doom_all(self, failure: Callable[[Operation], Exception]) -> list[Operation]:
        """Every operation fails, unless it has failed already."""
        for part in (*self._queue, *self._in_flight):
            part.operation.failure = part.operation.failure or failure(part.operation)
        return self.drop_doomed()

    def drop_doomed(self) -> list[Operation]:
        """Take the parts of doomed operations out of the queue."""
        settled: list[Operation] = []
        if any(part.operation.failure is not None for part in self._queue):
            queue, self._queue = self._queue, deque()
            for part in queue:
                if part.operation.failure is None:
                    self._queue.append(part)
                else:
                    settled += self._forget(part)
        return settled

    def _forget(self, part: Part) -> list[Operation]:
        part.operation.outstanding -= 1
        return [] if part.operation.outstanding else [part.operation]

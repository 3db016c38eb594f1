"""The parts that no stream to a peer has begun yet, by priority, and which of them a stream may begin next. Pure.

Within a priority, parts wait in three queues. Ordered: writes and notifications that go by the first stream, one after
the other. Spread: parts of large writes, for any write stream. Reads: for any read stream. What joins the queues again
are the notifications: none begins before every spread write that was submitted before it has landed or failed.

What one stream has begun: the parts in flight, in order, and those that are to be sent again. Pure.

A part that is sent again because its connection broke keeps its number, by which the owner recognises it.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from messenger.operation import READ, Operation, Part
from messenger.priority import BACKGROUND, Priority, Turns


class Way(IntEnum):
    """By which streams a part goes."""

    ORDERED = 0
    SPREAD = 1
    READS = 2


# As of messenger.operation.Kind.
ORDERED, SPREAD, READS = Way.ORDERED, Way.SPREAD, Way.READS


@dataclass(frozen=True)
class Role:
    """What one stream of a peer carries."""

    ordered: bool
    spread: bool
    reads: bool

    def carries(self, way: Way) -> bool:
        """Whether parts of this way may go by the stream."""
        return (self.ordered, self.spread, self.reads)[way]


class _Class:
    """One priority's queues."""

    def __init__(self) -> None:
        self.ordered: deque[Part] = deque()
        self.spread: deque[Part] = deque()
        self.reads: deque[Part] = deque()
        self.spreading: dict[Operation, int] = {}
        """Writes of which spread parts are queued or in flight, and how many; the oldest first."""

    def queues(self) -> tuple[deque[Part], deque[Part], deque[Part]]:
        return self.ordered, self.spread, self.reads

    def next_queue(self, role: Role) -> deque[Part] | None:
        """The queue whose head the stream may begin; of several the oldest."""
        best = self.ordered if role.ordered and self.ordered and self._may_begin(self.ordered[0]) else None
        for queue, carried in ((self.spread, role.spread), (self.reads, role.reads)):
            if carried and queue and (best is None or queue[0].operation.number < best[0].operation.number):
                best = queue
        return best

    def _may_begin(self, part: Part) -> bool:
        if part.notification is None or not self.spreading:
            return True
        # Its own parts first: threads that submit at once may be here in another order than by number.
        return part.operation not in self.spreading and next(iter(self.spreading)).number > part.operation.number


class Backlog:
    def __init__(self) -> None:
        self._classes = {priority: _Class() for priority in Priority}
        self._turns: dict[Role, Turns] = {}
        self._queued = 0

    def __len__(self) -> int:
        return self._queued

    def depths(self) -> list[int]:
        """Parts queued, by priority."""
        return [sum(len(queue) for queue in self._classes[priority].queues()) for priority in Priority]

    def push(self, way: Way, part: Part) -> None:
        """Queue a part behind those of its way and priority; all parts of an operation before any of them begins."""
        own = self._classes[part.operation.priority]
        if way is ORDERED:
            own.ordered.append(part)
        elif way is READS:
            own.reads.append(part)
        else:
            own.spread.append(part)
            own.spreading[part.operation] = own.spreading.get(part.operation, 0) + 1
        self._queued += 1

    def take(self, role: Role, *, background: bool) -> Part | None:
        """The next part for a stream of this role; of the lowest class only if `background`."""
        if not self._queued:
            return None
        queues = [
            self._classes[priority].next_queue(role) if background or priority is not BACKGROUND else None
            for priority in Priority
        ]
        chosen = self._turns.setdefault(role, Turns()).pick([queue is not None for queue in queues])
        if chosen is None:
            return None
        queue = queues[chosen]
        assert queue is not None
        self._queued -= 1
        return queue.popleft()

    def waits_for(self, role: Role, *, background: bool) -> bool:
        """Whether `take` would give a part."""
        return self._queued > 0 and any(
            self._classes[priority].next_queue(role) is not None
            for priority in Priority
            if background or priority is not BACKGROUND
        )

    def has_for(self, role: Role) -> bool:
        """Whether a part is queued that such a stream carries, even if it may not begin yet."""
        return self._queued > 0 and any(
            queue and carried
            for own in self._classes.values()
            for queue, carried in zip(own.queues(), (role.ordered, role.spread, role.reads), strict=True)
        )

    def spread_ended(self, part: Part) -> bool:
        """A part landed, failed or was dropped; True when that may let a notification begin."""
        spreading = self._classes[part.operation.priority].spreading
        left = spreading.get(part.operation)
        if left is None or part.transfer is None:
            return False
        if left > 1:
            spreading[part.operation] = left - 1
            return False
        del spreading[part.operation]
        return True

    def drop(self, operations: Iterable[Operation]) -> list[Part]:
        """Take what is queued of these operations out of the queues."""
        doomed = set(operations)
        dropped: list[Part] = []
        for own in self._classes.values():
            for queue in own.queues():
                mine = [part for part in queue if part.operation in doomed]
                if mine:
                    kept = [part for part in queue if part.operation not in doomed]
                    queue.clear()
                    queue.extend(kept)
                    dropped += mine
        self._queued -= len(dropped)
        return dropped

    def is_clear(self, priority: Priority) -> bool:
        """Whether a new part of any way may begin without being queued."""
        return not self._queued and not self._classes[priority].spreading

    def has_background(self) -> bool:
        """Whether anything of the lowest class is queued."""
        return any(self._classes[BACKGROUND].queues())


class Flight:
    def __init__(self) -> None:
        self.in_flight: deque[Part] = deque()
        """On the wire, the oldest first; they are answered in this order."""
        self.again: deque[Part] = deque()
        """To be begun before anything new."""
        self._next_seq = 1

    def begin(self, part: Part) -> None:
        """The part is in flight from now on."""
        if not part.seq:
            part.seq = self._next_seq
            self._next_seq += 1
        part.operation.flying += 1
        self.in_flight.append(part)

    def waiting(self, place: int = 0) -> Part | None:
        """The part that is answered after so many others. With or without the lock: the newest may be taken back."""
        try:
            return self.in_flight[place]
        except IndexError:
            return None

    def reads_next(self) -> bool:
        """Whether the part that is answered next reads. With or without the lock."""
        part = self.waiting()
        return part is not None and part.operation.kind is READ

    def answered(self) -> Part:
        """The oldest part was answered."""
        part = self.in_flight.popleft()
        part.operation.flying -= 1
        return part

    def ended(self, part: Part) -> None:
        """A part that was just begun ended without an answer."""
        assert self.in_flight.pop() is part
        part.operation.flying -= 1

    def one_step_more(self) -> None:
        """The oldest part was answered, and is to be sent once more as a new request."""
        part = self.answered()
        part.seq = 0
        self.again.appendleft(part)

    def connection_lost(self) -> None:
        """What was in flight is sent again, before everything else."""
        for part in self.in_flight:
            part.copied = False
            part.operation.flying -= 1
        self.again.extendleft(reversed(self.in_flight))
        self.in_flight.clear()

    def carries(self, operations: Collection[Operation]) -> bool:
        """Whether a part of one of them is in flight."""
        return any(part.operation in operations for part in self.in_flight)

    def drop(self, operations: Collection[Operation]) -> list[Part]:
        """Take the parts of these operations out of what is to be sent again."""
        dropped = [part for part in self.again if part.operation in operations]
        if dropped:
            self.again = deque(part for part in self.again if part.operation not in operations)
        return dropped

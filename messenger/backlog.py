"""Queues of one peer's parts: those that no stream has begun (Backlog), and those that a stream has begun (InFlight).

No I/O, no clock. Both are guarded by the peer's traffic lock.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from messenger.operation import READ, Operation, Part
from messenger.priority import BACKGROUND, Priority, PriorityPicker


class QueueKind(IntEnum):
    """Queue in which a part waits, which decides the streams that may carry it."""

    ORDERED = 0
    """Writes and notifications that go one after the other by the first stream."""
    SPREAD = 1
    """Parts of large writes, for any write stream."""
    READS = 2
    """Reads, for any read stream."""


# Module constants for hot paths; see messenger.operation.Kind.
ORDERED, SPREAD, READS = QueueKind.ORDERED, QueueKind.SPREAD, QueueKind.READS


@dataclass(frozen=True)
class StreamRole:
    """Queues that one stream of a peer serves."""

    ordered: bool
    spread: bool
    reads: bool

    def carries(self, kind: QueueKind) -> bool:
        """Return True if parts of this queue may go by the stream."""
        return (self.ordered, self.spread, self.reads)[kind]


class _PriorityQueues:
    """Queues of one priority."""

    def __init__(self) -> None:
        self.ordered: deque[Part] = deque()
        self.spread: deque[Part] = deque()
        self.reads: deque[Part] = deque()
        self.spreading: dict[Operation, int] = {}
        """Writes with spread parts that are queued or in flight, and the number of those parts; oldest first."""

    def queues(self) -> tuple[deque[Part], deque[Part], deque[Part]]:
        """Return the queues in the order of QueueKind."""
        return self.ordered, self.spread, self.reads

    def next_queue(self, role: StreamRole) -> deque[Part] | None:
        """Return the queue whose head the stream may begin; of several, the one with the oldest head."""
        best = self.ordered if role.ordered and self.ordered and self._may_begin(self.ordered[0]) else None
        for queue, carried in ((self.spread, role.spread), (self.reads, role.reads)):
            if carried and queue and (best is None or queue[0].operation.number < best[0].operation.number):
                best = queue
        return best

    def _may_begin(self, part: Part) -> bool:
        if part.notification is None or not self.spreading:
            return True
        # The operation's own parts precede it. Concurrent submitters may arrive out of the order of numbers.
        return part.operation not in self.spreading and next(iter(self.spreading)).number > part.operation.number


class Backlog:
    """Parts that no stream has begun yet, by priority and queue.

    Notifications join the queues of a priority: none begins before every spread write that was submitted before it has
    landed or failed.
    """

    def __init__(self) -> None:
        self._classes = tuple(_PriorityQueues() for _ in Priority)
        self._pickers: dict[StreamRole, PriorityPicker] = {}
        self.num_queued = 0
        """Number of parts in all queues."""

    def __len__(self) -> int:
        return self.num_queued

    def depths(self) -> list[int]:
        """Return the number of queued parts by priority."""
        return [sum(len(queue) for queue in self._classes[priority].queues()) for priority in Priority]

    def push(self, kind: QueueKind, part: Part) -> None:
        """Append a part to its queue. All parts of an operation must be pushed before any of them begins."""
        own = self._classes[part.operation.priority]
        if kind is ORDERED:
            own.ordered.append(part)
        elif kind is READS:
            own.reads.append(part)
        else:
            own.spread.append(part)
            own.spreading[part.operation] = own.spreading.get(part.operation, 0) + 1
        self.num_queued += 1

    def take(self, role: StreamRole, *, background: bool) -> Part | None:
        """Dequeue the next part for a stream of this role, a BACKGROUND one only if `background`; None without any."""
        if not self.num_queued:
            return None
        queues = [
            self._classes[priority].next_queue(role) if background or priority is not BACKGROUND else None
            for priority in Priority
        ]
        chosen = self._pickers.setdefault(role, PriorityPicker()).pick([queue is not None for queue in queues])
        if chosen is None:
            return None
        queue = queues[chosen]
        assert queue is not None
        self.num_queued -= 1
        return queue.popleft()

    def has_startable(self, role: StreamRole, *, background: bool) -> bool:
        """Return True if `take` would return a part."""
        return self.num_queued > 0 and any(
            self._classes[priority].next_queue(role) is not None
            for priority in Priority
            if background or priority is not BACKGROUND
        )

    def has_any(self, role: StreamRole) -> bool:
        """Return True if a part is queued that such a stream carries, even if it may not begin yet."""
        return self.num_queued > 0 and any(
            queue and carried
            for own in self._classes
            for queue, carried in zip(own.queues(), (role.ordered, role.spread, role.reads), strict=True)
        )

    def spread_ended(self, part: Part) -> bool:
        """Record that a part landed, failed or was dropped. Returns True if a notification may be able to begin now."""
        spreading = self._classes[part.operation.priority].spreading
        left = spreading.get(part.operation) if spreading else None
        if left is None or part.transfer is None:
            return False
        if left > 1:
            spreading[part.operation] = left - 1
            return False
        del spreading[part.operation]
        return True

    def drop(self, operations: Iterable[Operation]) -> list[Part]:
        """Remove and return the queued parts of these operations."""
        doomed = set(operations)
        dropped: list[Part] = []
        for own in self._classes:
            for queue in own.queues():
                mine = [part for part in queue if part.operation in doomed]
                if mine:
                    kept = [part for part in queue if part.operation not in doomed]
                    queue.clear()
                    queue.extend(kept)
                    dropped += mine
        self.num_queued -= len(dropped)
        return dropped

    def is_clear(self, priority: Priority) -> bool:
        """Return True if a new part of any queue may begin without being queued."""
        return not self.num_queued and not self._classes[priority].spreading

    def has_background(self) -> bool:
        """Return True if a part of BACKGROUND is queued."""
        return any(self._classes[BACKGROUND].queues())


class InFlight:
    """Parts that one stream has begun, in order.

    A part that is sent again because its connection broke keeps its number, by which the owner recognises it.
    """

    def __init__(self) -> None:
        self.sent: deque[Part] = deque()
        """Parts on the wire, oldest first; they are answered in this order."""
        self.repeats: deque[Part] = deque()
        """Parts to be sent again, before any new one."""
        self.nbytes = 0
        """Bytes of the parts on the wire."""
        self._next_seq = 1

    def begin(self, part: Part) -> None:
        """Add a part that is about to be sent."""
        if not part.seq:
            part.seq = self._next_seq
            self._next_seq += 1
        part.operation.num_in_flight += 1
        self.nbytes += part.nbytes
        self.sent.append(part)

    def waiting(self, index: int = 0) -> Part | None:
        """Return the part that is answered after `index` others; None if there is none.

        With or without the lock; without it, the newest part may be removed at any time.
        """
        try:
            return self.sent[index]
        except IndexError:
            return None

    def next_is_read(self) -> bool:
        """Return True if the part that is answered next is a read. With or without the lock."""
        part = self.waiting()
        return part is not None and part.operation.kind is READ

    def answered(self) -> Part:
        """Remove and return the oldest part, which was answered."""
        part = self.sent.popleft()
        part.operation.num_in_flight -= 1
        self.nbytes -= part.nbytes
        return part

    def ended(self, part: Part) -> None:
        """Remove the newest part, which ended without an answer."""
        assert self.sent.pop() is part
        part.operation.num_in_flight -= 1
        self.nbytes -= part.nbytes

    def next_step(self) -> None:
        """Queue the oldest part, which was answered, to be sent once more as a new request."""
        part = self.answered()
        part.seq = 0
        self.repeats.appendleft(part)

    def connection_lost(self) -> None:
        """Queue all parts on the wire to be sent again, before all others."""
        for part in self.sent:
            part.copied = False
            part.operation.num_in_flight -= 1
        self.repeats.extendleft(reversed(self.sent))
        self.sent.clear()
        self.nbytes = 0

    def carries(self, operations: Collection[Operation]) -> bool:
        """Return True if a part of one of these operations is on the wire."""
        return any(part.operation in operations for part in self.sent)

    def drop(self, operations: Collection[Operation]) -> list[Part]:
        """Remove and return the parts of these operations that wait to be sent again."""
        dropped = [part for part in self.repeats if part.operation in operations]
        if dropped:
            self.repeats = deque(part for part in self.repeats if part.operation not in operations)
        return dropped

"""Reads that take no request, since the owner's memory is mapped here: any thread copies them.

A short one is over when `read` returns. Parts of longer ones are queued: whoever waits in `result` copies those of its
own operation, and the thread of a stream copies what nobody waits for so, or what would have to wait. So no change of
threads lies on the way, and two cores copy where there is work for two.

All that is under way to one peer: what its streams share, from an operation's submission to its outcome.

The streams take parts from here as they have room. Whatever ends an operation early (a deadline, a cancel, a refusal, a
peer that is gone, the end of the messenger) dooms it: its queued parts are dropped, the links that carry others are
cut, and it is settled when none of its parts is left: from then on no byte of its local memory is read or written. In
the owner's memory, bytes that were under way may still land until it revokes the key (its own fence) or notices the
cut, which it does before it delivers a notify. Other requests of a link that was cut are repeated.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from messenger.alarms import AlarmClock, Deadlines
from messenger.backlog import ORDERED, READS, Backlog, Way
from messenger.config import Endpoint
from messenger.counters import Counters
from messenger.errors import (
    MessengerClosed,
    PeerLost,
    RemoteAccessError,
    TransferCancelled,
    TransferDeadlineExceeded,
    TransferError,
)
from messenger.operation import NOTIFY, READ, Carrier, Operation, Part, Transfer, TransferResult
from messenger.priority import BACKGROUND, MAX_BACKGROUND_PARTS, URGENT, Priority, Road

if TYPE_CHECKING:
    from messenger.stream import Stream


QUICK_NBYTES = 1 << 20
"""Reads of up to so much are copied by the thread that asks for them, at once: that takes it no longer than to hand
them over to another one."""
COPY_NBYTES = 2 << 20
"""Longer reads are copied in parts of so much."""
_ALONE_S = 0.002  # how long a part waits for somebody to wait for it


class Copies:
    """One peer's; its queue is under the traffic's lock."""

    def __init__(self, traffic: "Traffic") -> None:
        self._traffic = traffic
        self._streams: Sequence[Stream] = ()
        self._queue: deque[Part] = deque()
        self._taken: dict[Part, int] = {}  # by which thread; not copied yet

    def go_by(self, streams: "Sequence[Stream]") -> None:
        """Once: those that carry reads. The first one's thread copies what is left to it."""
        self._streams = streams

    # Callers.

    def done(self, transfer: Transfer) -> TransferResult | None:
        """Do a read at once, on this thread, where it takes no request."""
        started_s = time.monotonic()
        for stream in self._streams:
            if stream.copied(transfer):
                seconds = time.monotonic() - started_s
                with self._traffic.lock:
                    stream.count_copied_locked(transfer, seconds)
                return TransferResult(transfer.nbytes, seconds, stream.transport)
        return None

    def may_do(self, transfer: Transfer) -> bool:
        """Whether a read is likely to take no request."""
        return any(stream.may_copy(transfer) for stream in self._streams)

    def begin_locked(self, operation: Operation, parts: Sequence[Part]) -> None:
        """Queue all parts of a read that was admitted."""
        operation.copier = self
        self._queue.extend(parts)
        if len(self._queue) > 1:
            self._streams[0].wake_locked()
        else:
            self._traffic.kick_locked(operation.started_s + _ALONE_S)

    def copy_all_of(self, operation: Operation) -> None:
        """Copy what nobody has begun to copy of the operation, for which the calling thread waits."""
        try:
            while (part := self._take_of(operation)) is not None:
                self.copy(part)
        except BaseException:  # an interrupt, perhaps of a part that was taken and not copied
            self._give_back()
            raise

    def is_observed(self) -> None:
        """Somebody waits for an operation who does not copy."""
        with self._traffic.lock:
            if self._queue:
                self._streams[0].wake_locked()

    def _take_of(self, operation: Operation) -> Part | None:
        with self._traffic.lock:
            part = next((part for part in self._queue if part.operation is operation), None)
            if part is not None:
                self._take(part)
            return part

    def _give_back(self) -> None:
        """The calling thread leaves: what it had taken is anybody's, or has ended."""
        own = threading.get_ident()
        ended: list[Operation] = []
        with self._traffic.lock:
            for part in [part for part, taker in self._taken.items() if taker == own]:
                del self._taken[part]
                if part.operation.failure is not None:
                    ended += self._traffic.ended_locked(part, None)
                elif part not in self._queue:
                    self._queue.appendleft(part)
            if self._queue:
                self._streams[0].wake_locked()
        self._traffic.settle(ended)

    # Whoever copies.

    def copy(self, part: Part) -> None:
        """Copy a part that was taken to be copied; where that takes a request after all, queue it as one."""
        transfer, by = part.transfer, None
        assert transfer is not None
        ended: list[Operation] = []
        try:
            by = next((stream for stream in self._streams if stream.copied(transfer)), None)
        finally:  # also when a caller was interrupted
            with self._traffic.lock:
                now_s = time.monotonic()
                del self._taken[part]
                if by is not None:
                    by.count_copied_locked(transfer, now_s - part.operation.started_s)
                    ended = self._traffic.ended_locked(part, now_s)
                elif part.operation.failure is not None:
                    ended = self._traffic.ended_locked(part, None)
                else:
                    self._traffic.backlog.push(READS, part)
                    for stream in self._streams:
                        stream.wake_locked()
        self._traffic.settle(ended)

    # With the lock held.

    def __len__(self) -> int:
        return len(self._queue)

    def take_for(self, stream: "Stream") -> Part | None:
        """A part for the stream's thread to `copy`."""
        if not self._queue or stream is not self._streams[0]:
            return None
        part = self._queue[0]
        self._take(part)
        return part

    def _take(self, part: Part) -> None:
        self._taken[part] = threading.get_ident()  # first, so that an interrupt leaves it in one of them
        self._queue.remove(part)

    def has_for(self, stream: "Stream") -> bool:
        """Whether there may be a part for the stream's thread."""
        return bool(self._queue) and stream is self._streams[0]

    def drop(self, operations: Collection[Operation]) -> list[Part]:
        """Take what is queued of these operations out of the queue."""
        dropped = [part for part in self._queue if part.operation in operations]
        if dropped:
            self._queue = deque(part for part in self._queue if part.operation not in operations)
            for part in dropped:  # also of a thread that was interrupted as it took it
                self._taken.pop(part, None)
        return dropped


SILENT_S = 1.0
"""Of a peer that acknowledged nothing for so long, though something was due, all connections may be half-open."""


class Traffic:
    """`lock` guards all state of the peer's operations and streams; methods named `..._locked` are called with it."""

    def __init__(self, endpoint: Endpoint, clock: AlarmClock, counters: Counters, road: Road) -> None:
        self.lock = threading.Lock()
        self.backlog = Backlog()
        self.copies = Copies(self)
        self._endpoint = endpoint
        self._clock = clock
        self._counters = counters
        self._road = road
        self._open: dict[Operation, None] = {}
        self._deadlines = Deadlines(clock, self._expire)
        self._kicks = Deadlines(clock, self._kick)
        self._streams: Sequence[Stream] = ()
        self._ways: Sequence[Sequence[Stream]] = ()  # by Way
        self._next_reader = 0
        self.closing = False
        self._progressed_s = [0.0, 0.0]  # writes', reads': when the peer last acknowledged something
        self._last_background_s = 0.0

    def go_by(self, streams: "Sequence[Stream]") -> None:
        """Once, before anything is submitted; the first stream is the one that keeps the order."""
        self._streams = streams
        self._ways = [[stream for stream in streams if stream.role.carries(way)] for way in Way]
        self.copies.go_by(self._ways[READS])

    # Callers.

    def submit(self, operation: Operation, way: Way, parts: Sequence[Part]) -> None:
        """Queue the operation, or begin it on this thread where a stream has room; never blocks.

        Spread parts are all but one that carries a notification, which is ordered.
        """
        stream: Stream | None = None
        with self.lock:
            closed = self.closing
            if not closed:
                self._admit(operation)
                if len(parts) == 1 and self.backlog.is_clear(operation.priority):
                    stream = self._idle(way, operation.priority)
                if stream is not None:
                    stream.begin_locked(parts[0])
                else:
                    stream = self._queue(way, parts)
        if closed:
            self._settle_closed(operation)
        elif stream is not None:
            stream.send_as_caller()

    def submit_copies(self, operation: Operation, parts: Sequence[Part]) -> None:
        """As `submit`, of a read that `copies` may do."""
        with self.lock:
            closed = self.closing
            if not closed:
                self._admit(operation)
                self.copies.begin_locked(operation, parts)
        if closed:
            self._settle_closed(operation)

    def cancel(self, operation: Operation) -> bool:
        """Whether it will end with TransferCancelled, by this call or an earlier one."""
        with self.lock:
            if operation not in self._open:
                return False
            if operation.failure is not None:
                return isinstance(operation.failure, TransferCancelled)
            operation.failure = self._error(TransferCancelled, "it was cancelled", operation)
            self._counters.add("cancelled")
            ended = self._doom_locked([operation])
        self.settle(ended)
        return True

    def keeps_time_here(self) -> bool:
        """Whether the calling thread is the one on which deadlines ring, and calls back in the middle of that."""
        return self._clock.is_here()

    def is_ended_here(self) -> bool:
        """Whether operations end by the calling thread, which calls back in the middle of that."""
        return self.keeps_time_here() or any(stream.works_here() for stream in self._streams)

    def pending(self) -> int:
        """Requests queued or in flight."""
        with self.lock:
            return sum(operation.outstanding for operation in self._open)

    def queued(self) -> list[int]:
        """Requests that no stream has begun yet, by priority."""
        with self.lock:
            return self.backlog.depths()

    def close(self) -> None:
        """Fail what is pending with MessengerClosed."""
        with self.lock:
            self.closing = True
            address = self._streams[0].address
            ended = self._fail_all_locked(
                lambda _: MessengerClosed(f"the messenger was closed during an operation towards {address}")
            )
            self._deadlines.clear()
            self._kicks.clear()
        self.settle(ended)

    # Streams.

    def take_locked(self, stream: "Stream") -> Part | None:
        """The next part for a stream, which begins it."""
        if not len(self.backlog):
            return None
        part = self.backlog.take(stream.role, background=self._may_background(stream))
        if part is not None and part.operation.priority is BACKGROUND:
            self._last_background_s = time.monotonic()
        return part

    def kick_locked(self, due_s: float) -> None:
        """Have the streams look for work at this time, if nobody has done it."""
        self._kicks.watch(due_s)

    def waits_locked(self, stream: "Stream") -> bool:
        """Whether there is a part that the stream may begin now."""
        return len(self.backlog) > 0 and self.backlog.waits_for(stream.role, background=self._may_background(stream))

    def ended_locked(self, part: Part, landed_s: float | None) -> list[Operation]:
        """A part is over: it landed at this time, or failed. Returns what is to be settled."""
        operation = part.operation
        if landed_s is not None:
            operation.acknowledged_nbytes += part.nbytes
            self._progressed_s[operation.kind is READ] = landed_s
            if operation.priority is URGENT:
                self._road.moved(landed_s)
        operation.outstanding -= 1
        if self.backlog.spread_ended(part):
            self._streams[0].wake_locked()
        if operation.outstanding:
            return []
        del self._open[operation]
        return [operation]

    def refused_locked(self, part: Part, reason: str, kind: type[TransferError] = RemoteAccessError) -> list[Operation]:
        """The owner refused a part, or this side's transport, which dooms its operation."""
        operation = part.operation
        if operation.failure is None:
            operation.failure = self._error(kind, reason, operation)
        return self.ended_locked(part, None) or self._drop_locked([operation])

    def give_up_locked(self, operation: Operation, reason: str) -> None:
        """The operation breaks every connection: it is to fail once its parts are dropped."""
        if operation.failure is None:
            operation.failure = self._error(PeerLost, reason, operation)

    def drop_doomed_locked(self) -> list[Operation]:
        """Drop what is queued of operations that have failed; returns what is to be settled."""
        return self._drop_locked([operation for operation in self._open if operation.failure is not None])

    def lose(self, kind: type[PeerLost], reason: str) -> None:
        """The peer's process is gone: everything fails."""
        with self.lock:
            ended = self._fail_all_locked(lambda operation: self._error(kind, reason, operation))
        self.settle(ended)

    def settle(self, operations: Iterable[Operation]) -> None:
        """Give the futures their outcome; never with the lock held, since callbacks run here."""
        now_s = time.monotonic()
        for operation in operations:
            if operation.priority is URGENT:
                for call in self._road.closed():
                    call()
            if operation.failure is not None:
                operation.settle(None, operation.failure)
            elif operation.kind is NOTIFY:
                operation.settle(None, None)
            else:
                transport = self._carrier(operation).transport
                operation.settle(TransferResult(operation.nbytes, now_s - operation.started_s, transport), None)

    def _settle_closed(self, operation: Operation) -> None:
        operation.settle(None, MessengerClosed(f"the messenger was closed before its {operation.kind.value} began"))

    # With the lock held.

    def _admit(self, operation: Operation) -> None:
        operation.canceller = self
        started_s = operation.started_s
        if not self._open:
            self._progressed_s = [started_s, started_s]  # idleness before it is no stall
        self._open[operation] = None
        if operation.priority is URGENT:
            self._road.opened(started_s)
        self._deadlines.watch(self._due_s(operation))

    def _idle(self, way: Way, priority: Priority) -> "Stream | None":
        """A stream on which a part may begin at once."""
        if priority is BACKGROUND:
            return None
        streams = self._ways[way]
        for stream in streams:
            if stream.has_room_locked():
                return stream
        return None

    def _queue(self, way: Way, parts: Sequence[Part]) -> "Stream | None":
        """Queue the parts, and wake who may send them; returns the stream that the caller is to send by, if any."""
        for part in parts:
            self.backlog.push(way if part.transfer is not None else ORDERED, part)
        streams = self._ways[way]
        if way is READS and len(streams) > 1:
            self._next_reader += 1
            first = self._next_reader % len(streams)
            streams = [*streams[first:], *streams[:first]][: len(parts)]
        chosen: Stream | None = None
        for stream in streams:
            if chosen is None and stream.has_room_locked():
                first_part = self.take_locked(stream)
                if first_part is not None:
                    stream.begin_locked(first_part)
                    chosen = stream
                continue
            stream.wake_locked()
        return chosen

    def _may_background(self, stream: "Stream") -> bool:
        """Whether background may go by the stream now; if not yet, it is called again in time."""
        if not self.backlog.has_background() or stream.num_background_locked() >= MAX_BACKGROUND_PARTS:
            return False
        now_s = time.monotonic()
        until_s = self._road.until_s(self._last_background_s, now_s, self._kick)
        if until_s > now_s:
            self._kicks.watch(until_s)
        return until_s <= now_s

    def _due_s(self, operation: Operation) -> float:
        due_s = operation.started_s + operation.deadline_s
        return due_s if operation.stall_s is None else min(due_s, self._stalls_at_s(operation))

    def _stalls_at_s(self, operation: Operation) -> float:
        if operation.stall_s is None:
            return math.inf
        return max(self._progressed_s[operation.kind is READ], operation.started_s) + operation.stall_s

    def _fail_all_locked(self, failure: Callable[[Operation], Exception]) -> list[Operation]:
        for operation in self._open:
            if operation.failure is None:
                operation.failure = failure(operation)
        return self._doom_locked(list(self._open))

    def _doom_locked(self, operations: Sequence[Operation]) -> list[Operation]:
        ended = self._drop_locked(operations)
        doomed = set(operations)
        for stream in self._streams:
            if stream.flight.carries(doomed):
                stream.cut_locked()
        return ended

    def _drop_locked(self, operations: Sequence[Operation]) -> list[Operation]:
        if not operations:
            return []
        doomed = set(operations)
        dropped = self.backlog.drop(doomed) + self.copies.drop(doomed)
        for stream in self._streams:
            dropped += stream.flight.drop(doomed)
        ended = [operation for part in dropped for operation in self.ended_locked(part, None)]
        if dropped and len(self.backlog):
            self._streams[0].wake_locked()  # a notification may have waited for what was dropped
        return ended

    def _carrier(self, operation: Operation) -> Carrier:
        """The stream that carries the operation, or will."""
        return operation.carrier or self._ways[READS if operation.kind is READ else ORDERED][0]

    def _error(self, kind: type[TransferError], reason: str, operation: Operation) -> TransferError:
        stream = self._carrier(operation)
        return kind(
            f"{operation.kind.value} of {operation.nbytes} bytes failed: {reason}",
            peer=self._endpoint.node_id,
            transport=stream.transport,
            address=stream.address,
            acknowledged_nbytes=operation.acknowledged_nbytes,
        )

    # The clock's thread, and whoever ended the last urgent operation.

    def _expire(self) -> None:
        with self.lock:
            self._deadlines.rang()
            now_s = time.monotonic()
            late = [
                operation for operation in self._open if operation.failure is None and self._is_late(operation, now_s)
            ]
            for operation in self._open:
                if operation.failure is None:
                    self._deadlines.watch(self._due_s(operation))
            self._counters.add("deadlines_exceeded", len(late))
            is_silent = now_s - max(self._progressed_s) > SILENT_S and any(operation.flying for operation in late)
            ended = self._doom_locked(late)
            if is_silent:
                # What made one connection half-open made others so: a new one costs less than another deadline.
                for stream in self._streams:
                    stream.cut_if_idle_locked()
        self.settle(ended)

    def _is_late(self, operation: Operation, now_s: float) -> bool:
        if now_s >= operation.started_s + operation.deadline_s:
            reason = f"not done within {operation.deadline_s:.3g} s"
        elif now_s >= self._stalls_at_s(operation):
            reason = f"nothing was acknowledged for {operation.stall_s:.3g} s"
        else:
            return False
        reason += f"; the connection's last trouble: {self._carrier(operation).cause}"
        operation.failure = self._error(TransferDeadlineExceeded, reason, operation)
        return True

    def _kick(self) -> None:
        with self.lock:
            self._kicks.clear()
            if len(self.backlog) or len(self.copies):
                for stream in self._streams:
                    stream.wake_locked()

"""Everything pending towards one peer, shared by its streams, from an operation's submission to its outcome.

Streams take parts from the backlog as they have room. An event that ends an operation early (a deadline, a cancel, a
refusal, a lost peer, the end of the messenger) dooms it: its queued parts are dropped, links that carry its other parts
are cut, and it is settled once no part is left. From then on, no byte of its local memory is read or written. In the
owner's memory, bytes already on the wire may still land until the owner revokes the key (its own fence) or notices the
cut, which it checks before it delivers a notification. Other requests on a cut link are sent again.

Locks (the same lock guards `stream.py`; see the map there):

    Traffic.lock      one per peer. Guards the backlog, the mapped-read queue, every Operation and Part that is
                      pending, and the whole state of the peer's streams. Methods named `..._locked`, and those under
                      "With the lock held", require it. Never held during a system call that can block, a copy, or a
                      callback.
    taken under it    TrafficGate's lock, AlarmClock's lock, Link.cut (leaves; none of them takes Traffic.lock).
    settle()          runs without the lock: it settles futures, whose callbacks may call back into the messenger.

Lifetime of an operation: submit -> `_open` (all its parts queued, in flight or being copied) -> `outstanding` is 0:
removed from `_open` and returned to the caller of a `..._locked` method -> `settle`. Every `..._locked` method that can
end operations returns them, and its caller settles them after it has released the lock.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from messenger.alarms import AlarmClock, EarliestAlarm
from messenger.backlog import ORDERED, READS, Backlog, InFlight, QueueKind, StreamRole
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
from messenger.operation import NOTIFY, READ, Operation, OperationStream, Part, Transfer, TransferResult
from messenger.priority import BACKGROUND, MAX_BACKGROUND_PARTS, URGENT, TrafficGate

SILENT_S = 1.0
"""If a peer has acknowledged nothing for this long while answers were due, all its connections may be half-open."""
INLINE_READ_NBYTES = 1 << 20
"""Reads of mapped memory up to this size are copied at once by the calling thread: passing them to another thread would
take as long."""
COPY_PART_NBYTES = 2 << 20
"""Longer reads of mapped memory are copied in parts of this size."""
_CLAIM_WAIT_S = 0.002  # a single queued copy waits this long for a caller to claim it before a stream's thread does


class PeerStream(OperationStream, Protocol):
    """The part of `messenger.stream.Stream` that the traffic uses; the direction of imports is stream -> traffic."""

    role: StreamRole
    in_flight: InFlight

    def has_room_locked(self) -> bool: ...
    def begin_locked(self, part: Part) -> None: ...
    def send_as_caller(self) -> None: ...
    def wake_locked(self) -> None: ...
    def num_background_locked(self) -> int: ...
    def cut_locked(self) -> None: ...
    def cut_if_idle_locked(self) -> None: ...
    def may_copy(self, transfer: Transfer) -> bool: ...
    def try_copy(self, transfer: Transfer) -> bool: ...
    def count_copied_locked(self, transfer: Transfer, seconds: float) -> None: ...
    def runs_on_current_thread(self) -> bool: ...


class Traffic:
    """Pending operations of one peer. Safe to use from any thread; see the module's map of locks."""

    def __init__(self, endpoint: Endpoint, clock: AlarmClock, counters: Counters, gate: TrafficGate) -> None:
        self.lock = threading.Lock()
        self.backlog = Backlog()
        self.mapped_reads = MappedReads(self)
        self.closing = False
        self._endpoint = endpoint
        self._clock = clock
        self._counters = counters
        self._gate = gate
        self._open: dict[Operation, None] = {}
        self._deadlines = EarliestAlarm(clock, self._expire)
        self._kicks = EarliestAlarm(clock, self._kick)
        self._streams: Sequence[PeerStream] = ()
        self._streams_by_queue: Sequence[Sequence[PeerStream]] = ()
        self._next_reader = 0
        self._progressed_s = [0.0, 0.0]  # of writes, of reads: when the peer last acknowledged something
        self._last_background_s = 0.0

    def attach_streams(self, streams: Sequence[PeerStream]) -> None:
        """Set the peer's streams, once, before anything is submitted; the first stream carries the ordered queue."""
        self._streams = streams
        self._streams_by_queue = [[stream for stream in streams if stream.role.carries(kind)] for kind in QueueKind]
        self.mapped_reads.attach_streams(self._streams_by_queue[READS])

    # Called by the API's users.

    def submit(self, operation: Operation, queue_kind: QueueKind, parts: Sequence[Part]) -> None:
        """Queue the operation, or begin it on the calling thread if a stream has room; never blocks.

        If `queue_kind` is SPREAD, all parts are spread except one without a transfer (a notification), which is
        ordered.
        """
        stream: PeerStream | None = None
        with self.lock:
            closed = self.closing
            if not closed:
                self._admit(operation)
                stream = self._begin_or_queue(queue_kind, parts)
        if closed:
            self._settle_closed(operation)
        elif stream is not None:
            stream.send_as_caller()

    def submit_last(self, part: Part) -> None:
        """Submit the last part, an ordered one, of an operation that was submitted without it; never blocks."""
        operation = part.operation
        stream: PeerStream | None = None
        with self.lock:
            if operation not in self._open:  # it was refused, since the messenger was closed
                return
            ended: list[Operation] = []
            if operation.failure is None:
                stream = self._begin_or_queue(ORDERED, (part,))
            else:
                ended = self._last_abandoned_locked(operation)
        self.settle(ended)
        if stream is not None:
            stream.send_as_caller()

    def abandon_last(self, operation: Operation, error: BaseException) -> None:
        """Fail an operation that was submitted without its last part, because there will be none."""
        with self.lock:
            if operation not in self._open:
                return
            if operation.failure is None:
                operation.failure = (
                    error
                    if isinstance(error, Exception)
                    else self._error(TransferCancelled, f"interrupted by {error!r}", operation)
                )
            ended = self._doom_locked([operation]) + self._last_abandoned_locked(operation)
        self.settle(ended)

    def submit_mapped_read(self, operation: Operation, parts: Sequence[Part]) -> None:
        """Queue a read that `mapped_reads` may be able to do; never blocks."""
        with self.lock:
            closed = self.closing
            if not closed:
                self._admit(operation)
                self.mapped_reads.enqueue_locked(operation, parts)
        if closed:
            self._settle_closed(operation)

    def cancel(self, operation: Operation) -> bool:
        """Cancel the operation. Return True if it will end with TransferCancelled, by this call or an earlier one."""
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

    def is_alarm_thread(self) -> bool:
        """Return True on the thread that rings deadlines, that is, inside one of its callbacks."""
        return self._clock.is_current_thread()

    def settles_on_current_thread(self) -> bool:
        """Return True if the calling thread is one that settles operations, that is, inside one of its callbacks."""
        return self.is_alarm_thread() or any(stream.runs_on_current_thread() for stream in self._streams)

    def pending(self) -> int:
        """Return the number of requests that are queued or in flight."""
        with self.lock:
            return sum(operation.outstanding for operation in self._open)

    def queued(self) -> list[int]:
        """Return the number of requests that no stream has begun yet, by priority."""
        with self.lock:
            return self.backlog.depths()

    def close(self) -> None:
        """Fail everything pending with MessengerClosed."""
        with self.lock:
            self.closing = True
            address = self._streams[0].address
            ended = self._fail_all_locked(
                lambda _: MessengerClosed(f"the messenger was closed during an operation towards {address}")
            )
            self._deadlines.clear()
            self._kicks.clear()
        self.settle(ended)

    # Called by the streams.

    def take_locked(self, stream: PeerStream) -> Part | None:
        """Dequeue the next part for the stream, which begins it; None if there is none for it now."""
        if not self.backlog.num_queued:
            return None
        part = self.backlog.take(stream.role, background=self._may_send_background(stream))
        if part is not None and part.operation.priority is BACKGROUND:
            self._last_background_s = time.monotonic()
        return part

    def kick_locked(self, due_s: float) -> None:
        """Wake the streams at `due_s` (monotonic time) if parts are still queued then."""
        self._kicks.watch(due_s)

    def has_part_locked(self, stream: PeerStream) -> bool:
        """Return True if a part is queued that the stream may begin now."""
        return self.backlog.num_queued > 0 and self.backlog.has_startable(
            stream.role, background=self._may_send_background(stream)
        )

    def part_ended_locked(self, part: Part, landed_s: float | None) -> list[Operation]:
        """Record that a part landed at this time, or failed (None). Returns operations to settle."""
        operation = part.operation
        if landed_s is not None:
            operation.acknowledged_nbytes += part.nbytes
            self._progressed_s[operation.kind is READ] = landed_s
            if operation.priority is URGENT:
                self._gate.urgent_progressed(landed_s)
        operation.outstanding -= 1
        if self.backlog.spread_ended(part):
            self._streams[0].wake_locked()
        if operation.outstanding:
            return []
        del self._open[operation]
        return [operation]

    def part_refused_locked(
        self, part: Part, reason: str, kind: type[TransferError] = RemoteAccessError
    ) -> list[Operation]:
        """Record that the owner, or this side's transport, refused a part, and doom its operation.

        Returns operations to settle.
        """
        operation = part.operation
        if operation.failure is None:
            operation.failure = self._error(kind, reason, operation)
        return self.part_ended_locked(part, None) or self._drop_locked([operation])

    def give_up_locked(self, operation: Operation, reason: str) -> None:
        """Fail an operation that breaks every connection, as soon as its parts are dropped."""
        if operation.failure is None:
            operation.failure = self._error(PeerLost, reason, operation)

    def drop_doomed_locked(self) -> list[Operation]:
        """Drop the queued parts of operations that have failed. Returns operations to settle."""
        return self._drop_locked([operation for operation in self._open if operation.failure is not None])

    def lose(self, kind: type[PeerLost], reason: str) -> None:
        """Fail everything, because the peer's process is gone."""
        with self.lock:
            ended = self._fail_all_locked(lambda operation: self._error(kind, reason, operation))
        self.settle(ended)

    def settle(self, operations: Iterable[Operation]) -> None:
        """Set the futures' outcome. Must be called without the lock, since callbacks run here."""
        now_s = time.monotonic()
        for operation in operations:
            if operation.priority is URGENT:
                for retry in self._gate.urgent_ended():
                    retry()
            if operation.failure is not None:
                operation.settle(None, operation.failure)
            elif operation.kind is NOTIFY:
                operation.settle(None, None)
            else:
                stream = operation.stream
                transport = stream.transport if stream is not None else self._stream_of(operation).transport
                operation.settle(TransferResult(operation.nbytes, now_s - operation.started_s, transport), None)

    def _settle_closed(self, operation: Operation) -> None:
        operation.settle(None, MessengerClosed(f"the messenger was closed before its {operation.kind.value} began"))

    # With the lock held.

    def _admit(self, operation: Operation) -> None:
        operation.traffic = self
        started_s = operation.started_s
        if not self._open:
            self._progressed_s = [started_s, started_s]  # earlier idleness is no stall
        self._open[operation] = None
        if operation.priority is URGENT:
            self._gate.urgent_submitted(started_s)
        due_s = started_s + operation.deadline_s
        if due_s < self._deadlines.due_s or operation.stall_s is not None:
            self._deadlines.watch(self._due_s(operation))

    def _begin_or_queue(self, queue_kind: QueueKind, parts: Sequence[Part]) -> PeerStream | None:
        """Begin a single part if a stream has room, or queue the parts. Returns a stream as `_queue`."""
        priority = parts[0].operation.priority
        if len(parts) == 1 and priority is not BACKGROUND and self.backlog.is_clear(priority):
            for stream in self._streams_by_queue[queue_kind]:
                if stream.has_room_locked():
                    stream.begin_locked(parts[0])
                    return stream
        return self._queue(queue_kind, parts)

    def _last_abandoned_locked(self, operation: Operation) -> list[Operation]:
        """Record that the last part of a failed operation will not be submitted. Returns operations to settle."""
        return self.part_ended_locked(Part(operation, None), None)

    def _queue(self, queue_kind: QueueKind, parts: Sequence[Part]) -> PeerStream | None:
        """Queue the parts and wake the streams that may send them.

        Returns the stream on which the calling thread must send a part that was begun for it, if any.
        """
        for part in parts:
            self.backlog.push(queue_kind if part.transfer is not None else ORDERED, part)
        streams = self._streams_by_queue[queue_kind]
        if queue_kind is READS and len(streams) > 1:
            self._next_reader += 1
            first = self._next_reader % len(streams)
            streams = [*streams[first:], *streams[:first]][: len(parts)]
        chosen: PeerStream | None = None
        for stream in streams:
            if chosen is None and stream.has_room_locked():
                first_part = self.take_locked(stream)
                if first_part is not None:
                    stream.begin_locked(first_part)
                    chosen = stream
                continue
            stream.wake_locked()
        return chosen

    def _may_send_background(self, stream: PeerStream) -> bool:
        """Return True if the stream may begin a background part now; if not yet, it is woken in time."""
        if not self.backlog.has_background() or stream.num_background_locked() >= MAX_BACKGROUND_PARTS:
            return False
        now_s = time.monotonic()
        allowed_s = self._gate.background_allowed_s(self._last_background_s, now_s, self._kick)
        if allowed_s > now_s:
            self._kicks.watch(allowed_s)
        return allowed_s <= now_s

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
            if stream.in_flight.carries(doomed):
                stream.cut_locked()
        return ended

    def _drop_locked(self, operations: Sequence[Operation]) -> list[Operation]:
        if not operations:
            return []
        doomed = set(operations)
        dropped = self.backlog.drop(doomed) + self.mapped_reads.drop_locked(doomed)
        for stream in self._streams:
            dropped += stream.in_flight.drop(doomed)
        ended = [operation for part in dropped for operation in self.part_ended_locked(part, None)]
        if dropped and len(self.backlog):
            self._streams[0].wake_locked()  # a notification may have waited for the dropped parts
        return ended

    def _stream_of(self, operation: Operation) -> OperationStream:
        """Return the stream that carries the operation, or will."""
        return operation.stream or self._streams_by_queue[READS if operation.kind is READ else ORDERED][0]

    def _error(self, kind: type[TransferError], reason: str, operation: Operation) -> TransferError:
        stream = self._stream_of(operation)
        return kind(
            f"{operation.kind.value} of {operation.nbytes} bytes failed: {reason}",
            peer=self._endpoint.node_id,
            transport=stream.transport,
            address=stream.address,
            acknowledged_nbytes=operation.acknowledged_nbytes,
        )

    # Callbacks of the alarm thread; `_kick` also runs on the thread that settled the last urgent operation.

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
            is_silent = now_s - max(self._progressed_s) > SILENT_S and any(one.num_in_flight for one in late)
            ended = self._doom_locked(late)
            if is_silent:
                # The cause that made one connection half-open probably affects the others: reconnecting costs less
                # than another missed deadline.
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
        reason += f"; the connection's last failure: {self._stream_of(operation).cause}"
        operation.failure = self._error(TransferDeadlineExceeded, reason, operation)
        return True

    def _kick(self) -> None:
        with self.lock:
            self._kicks.clear()
            if len(self.backlog) or self.mapped_reads.has_queued_locked():
                for stream in self._streams:
                    stream.wake_locked()


class MappedReads:
    """Reads of owners' memory that is mapped in this process: any thread copies the bytes, without a request.

    A short read is done when `Peer.read` returns. Parts of longer reads are queued here: a thread that waits in
    `result` copies the parts of its own operation, and the thread of the first reading stream copies those for which no
    thread waits, or that would have to wait. So no change of threads delays a read, and two threads copy if there is
    enough work.

    The traffic's lock guards the queue; copies run without it. A part is in the queue, or in `_claims` while a thread
    copies it, or has ended.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._streams: Sequence[PeerStream] = ()
        self._queue: deque[Part] = deque()
        self._claims: dict[Part, int] = {}  # part -> id of the thread that copies it

    def attach_streams(self, streams: Sequence[PeerStream]) -> None:
        """Set the streams that carry reads, once; the first one's thread copies what no caller claims."""
        self._streams = streams

    # Called by the API's users, without the lock.

    def try_read(self, transfer: Transfer) -> TransferResult | None:
        """Do a read at once on the calling thread; None if it takes a request."""
        started_s = time.monotonic()
        for stream in self._streams:
            if stream.try_copy(transfer):
                seconds = time.monotonic() - started_s
                with self._traffic.lock:
                    stream.count_copied_locked(transfer, seconds)
                return TransferResult(transfer.nbytes, seconds, stream.transport)
        return None

    def may_read(self, transfer: Transfer) -> bool:
        """Return True if the read can probably be done without a request."""
        return any(stream.may_copy(transfer) for stream in self._streams)

    def copy_all_of(self, operation: Operation) -> None:
        """Copy every unclaimed part of the operation, for which the calling thread waits."""
        try:
            while (part := self._claim_of(operation)) is not None:
                self.copy(part)
        except BaseException:  # an interrupt, perhaps between claiming a part and copying it
            self._release_claims()
            raise

    def on_observed(self) -> None:
        """Wake a stream's thread, because an operation has an observer that does not copy."""
        with self._traffic.lock:
            if self._queue:
                self._streams[0].wake_locked()

    def _claim_of(self, operation: Operation) -> Part | None:
        with self._traffic.lock:
            part = next((part for part in self._queue if part.operation is operation), None)
            if part is not None:
                self._claim(part)
            return part

    def _release_claims(self) -> None:
        """Return the calling thread's claimed parts to the queue, or end them if their operation has failed."""
        own = threading.get_ident()
        ended: list[Operation] = []
        with self._traffic.lock:
            for part in [part for part, thread in self._claims.items() if thread == own]:
                del self._claims[part]
                if part.operation.failure is not None:
                    ended += self._traffic.part_ended_locked(part, None)
                elif part not in self._queue:
                    self._queue.appendleft(part)
            if self._queue:
                self._streams[0].wake_locked()
        self._traffic.settle(ended)

    def copy(self, part: Part) -> None:
        """Copy a claimed part, without the lock; if that takes a request after all, queue it as one."""
        transfer, stream = part.transfer, None
        assert transfer is not None
        ended: list[Operation] = []
        try:
            stream = next((stream for stream in self._streams if stream.try_copy(transfer)), None)
        finally:  # also if the caller was interrupted
            with self._traffic.lock:
                now_s = time.monotonic()
                del self._claims[part]
                if stream is not None:
                    stream.count_copied_locked(transfer, now_s - part.operation.started_s)
                    ended = self._traffic.part_ended_locked(part, now_s)
                elif part.operation.failure is not None:
                    ended = self._traffic.part_ended_locked(part, None)
                else:
                    self._traffic.backlog.push(READS, part)
                    for stream in self._streams:
                        stream.wake_locked()
        self._traffic.settle(ended)

    # With the lock held.

    def enqueue_locked(self, operation: Operation, parts: Sequence[Part]) -> None:
        """Queue all parts of an admitted read."""
        operation.mapped_reads = self
        self._queue.extend(parts)
        if len(self._queue) > 1:
            self._streams[0].wake_locked()
        else:
            self._traffic.kick_locked(operation.started_s + _CLAIM_WAIT_S)

    def has_queued_locked(self) -> bool:
        """Return True if a part is queued."""
        return bool(self._queue)

    def claim_locked(self, stream: PeerStream) -> Part | None:
        """Claim a part for the stream's thread to `copy`."""
        if not self.has_part_locked(stream):
            return None
        part = self._queue[0]
        self._claim(part)
        return part

    def has_part_locked(self, stream: PeerStream) -> bool:
        """Return True if a part is queued that the stream's thread may claim."""
        return bool(self._queue) and stream is self._streams[0]

    def drop_locked(self, operations: Collection[Operation]) -> list[Part]:
        """Remove and return the queued parts of these operations."""
        dropped = [part for part in self._queue if part.operation in operations]
        if dropped:
            self._queue = deque(part for part in self._queue if part.operation not in operations)
            for part in dropped:  # also one whose thread was interrupted while claiming it
                self._claims.pop(part, None)
        return dropped

    def _claim(self, part: Part) -> None:
        self._claims[part] = threading.get_ident()  # first, so that an interrupt leaves the part in one of the two
        self._queue.remove(part)

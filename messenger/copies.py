"""Reads that take no request, since the owner's memory is mapped here: any thread copies them.

A short one is over when `read` returns. Parts of longer ones are queued: whoever waits in `result` copies those of its
own operation, and the thread of a stream copies what nobody waits for so, or what would have to wait. So no change of
threads lies on the way, and two cores copy where there is work for two.
"""

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from messenger.backlog import READS
from messenger.operation import Operation, Part, Transfer, TransferResult

if TYPE_CHECKING:
    from messenger.stream import Stream
    from messenger.traffic import Traffic

__all__ = ["COPY_NBYTES", "QUICK_NBYTES", "Copies"]

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

"""The API towards one peer: one-sided writes and reads, and ordered notifications, as futures."""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy.typing as npt

from messenger.backlog import ORDERED, READS, SPREAD, QueueKind, StreamRole
from messenger.completion import Completion
from messenger.config import Endpoint
from messenger.frames import MAX_NOTIFY_NBYTES, MAX_PART_NBYTES, MAX_PART_ROWS
from messenger.memory import AnyRegion, Loan, Region, RemoteKey, SharedMemory
from messenger.operation import NOTIFY, READ, WRITE, Kind, Notification, Operation, Part, Transfer, TransferResult
from messenger.paths import PeerPaths
from messenger.priority import BACKGROUND, BACKGROUND_PART_NBYTES, Priority
from messenger.slices import Slices
from messenger.stream import Stream
from messenger.traffic import COPY_PART_NBYTES, INLINE_READ_NBYTES, Traffic
from rpc.errors import InvalidArgument

SPREAD_NBYTES = 4 << 20
"""Writes of at least this size go by several streams, if there are several for writes; so do reads by several paths."""
SPREAD_PART_NBYTES = 2 << 20
WRITE_AHEAD_NBYTES = 1 << 20
"""Writes of at least this size begin before their notification's payload is computed."""


def stream_roles(streams: int, paths: int = 1) -> list[StreamRole]:
    """Return the role of each of a peer's streams, `streams` for each of its `paths`, path by path.

    The first half carries writes; of these streams, the very first carries small writes and notifications.
    """
    if streams == 1:
        return [StreamRole(ordered=path == 0, spread=paths > 1, reads=True) for path in range(paths)]
    writers = (streams + 1) // 2
    return [
        StreamRole(ordered=index == path == 0, spread=writers * paths > 1 and index < writers, reads=index >= writers)
        for path in range(paths)
        for index in range(streams)
    ]


class Peer:
    """Connection to one incarnation of a node. Safe to use from any thread.

    Slices are integers [n, 3]: rows (local_offset, remote_offset, nbytes), both offsets from the start of a region.
    Invalid arguments raise InvalidArgument at once. Later errors are set on the future: PeerLost, PeerRestarted,
    PeerUnreachable, TransferDeadlineExceeded, TransferCancelled, RemoteAccessError, MemoryOutOfReach or
    MessengerClosed.

    Local memory may be reused when the future is done, not before. `cancel` requests an early end, reported as
    TransferCancelled. (Cancelling an asyncio future that wraps one does not cancel the transfer.) Operations are
    ordered within a priority, but not across priorities.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        traffic: Traffic,
        streams: Sequence[Stream],
        *,
        default_deadline_s: float,
        require_region: Callable[[AnyRegion], None],
        paths: PeerPaths | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._traffic = traffic
        self._streams = streams
        self._spreads = any(stream.role.spread for stream in streams)
        self._paths = paths
        self._default_deadline_s = default_deadline_s
        self._require_region = require_region
        self._numbers = itertools.count(1)

    def write(
        self,
        key: RemoteKey,
        region: AnyRegion,
        slices: npt.ArrayLike,
        *,
        deadline_s: float | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> Future[TransferResult]:
        """Copy local slices into the key's region. The future is done when all of them have landed there."""
        return self._transfer(WRITE, key, region, slices, None, priority, deadline_s)

    def read(
        self,
        key: RemoteKey,
        region: AnyRegion,
        slices: npt.ArrayLike,
        *,
        deadline_s: float | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> Future[TransferResult]:
        """Copy slices of the key's region into local slices. After a failure, the local contents are undefined."""
        return self._transfer(READ, key, region, slices, None, priority, deadline_s)

    def notify(
        self, tag: bytes, payload: bytes, *, deadline_s: float | None = None, priority: Priority = Priority.NORMAL
    ) -> Future[None]:
        """Call the peer's handlers after every earlier write of this priority has landed or failed.

        The future is done when the handlers have returned. A notification is delivered exactly once, however often the
        connection breaks, unless the future fails.
        """
        operation = self._operation(NOTIFY, priority, 0, 1, deadline_s)
        self._traffic.submit(operation, ORDERED, [Part(operation, None, _notification(tag, payload))])
        return operation

    def write_notify(
        self,
        key: RemoteKey,
        region: AnyRegion,
        slices: npt.ArrayLike,
        tag: bytes,
        payload: bytes | Callable[[], bytes],
        *,
        deadline_s: float | None = None,
        stall_s: float | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> Future[TransferResult]:
        """Write, and then notify; the notification is delivered only if the whole write landed.

        A payload that is a function is called once, on the calling thread; if the write is large, while its bytes are
        on their way. Other operations may then overtake the notification. If the function raises, the write fails with
        its exception.

        Also fails with TransferDeadlineExceeded once the peer has acknowledged nothing for `stall_s`, neither of this
        write nor of others; a long queue that makes progress is not a failure.
        """
        if not callable(payload):
            notification = _notification(tag, payload)
            return self._transfer(WRITE, key, region, slices, notification, priority, deadline_s, stall_s)
        self._require_region(region)
        checked = Slices.of(slices, region.nbytes)
        operation = self._operation(WRITE, priority, checked.nbytes, 1, deadline_s, stall_s)
        if checked.nbytes >= WRITE_AHEAD_NBYTES:
            self._write_ahead(operation, Transfer(key, region, checked), tag, payload)
            return operation
        try:
            notification = _notification(tag, payload())
        except Exception as error:
            operation.settle(None, error)
        else:
            self._submit(operation, Transfer(key, region, checked), notification)
        return operation

    def borrow(self, key: RemoteKey, offset: int, nbytes: int, *, deadline_s: float | None = None) -> Loan:
        """Return bytes [offset, offset + nbytes) of the key's region in place (shm only); see `Loan` for their use.

        The first loan from a region sends a request and waits for the answer, with the errors of a read; later ones
        send none. Raises InvalidArgument if the transport is not shm, or if the owner's grant page has no room for the
        key; `read` works in both cases.
        """
        if not key.read or offset < key.offset or nbytes < 1 or offset + nbytes > key.offset + key.nbytes:
            raise InvalidArgument(f"[{offset}, {offset + nbytes}) cannot be borrowed under {key}")
        loan = self._try_borrow(key, offset, nbytes)
        if loan is None:
            memory = SharedMemory.create(1, "borrower")
            try:
                region = Region(0, memory, memory.array)
                operation = self._operation(READ, Priority.NORMAL, 1, 1, deadline_s)
                part = Part(operation, Transfer(key, region, Slices(1, [(0, offset, 1)], None)))
                self._traffic.submit(operation, READS, [part])
                operation.result()
            finally:
                memory.close()
            loan = self._try_borrow(key, offset, nbytes)
        if loan is None:
            raise InvalidArgument(
                f"{self.endpoint.node_id!r} cannot lend memory under this key by {self.transport}: that takes shared "
                f"memory on one host and a key for which the owner's grant page had room; use read"
            )
        return loan

    def _try_borrow(self, key: RemoteKey, offset: int, nbytes: int) -> Loan | None:
        for stream in self._streams:
            loan = stream.lend(key, offset, nbytes)
            if loan is not None:
                return loan
        return None

    @property
    def transport(self) -> str:
        """Name of the transport of the last connection for writes; before it, of the transport to be tried first."""
        return self._streams[0].transport

    def problems(self) -> list[str]:
        """Describe what is pending; empty at rest."""
        pending = self._traffic.pending()
        return [f"{pending} requests pending towards {self.endpoint.node_id!r} by {self.transport}"] if pending else []

    def queued(self) -> list[int]:
        """Return the number of requests that have not begun yet, by priority."""
        return self._traffic.queued()

    def connections(self) -> int:
        """Return the number of streams that are connected now."""
        return sum(stream.connected() for stream in self._streams)

    def is_idle(self) -> bool:
        """Return True if nothing is pending and no thread is left."""
        is_probing = self._paths is not None and self._paths.has_thread()
        return not (self._traffic.pending() or is_probing or any(stream.has_thread() for stream in self._streams))

    def paths_down(self) -> int:
        """Return the number of network paths to the peer that are out of use; 0 if it has only one."""
        return 0 if self._paths is None else self._paths.num_down()

    def close(self) -> None:
        """Fail everything pending and disconnect."""
        self._traffic.close()
        if self._paths is not None:
            self._paths.close()
        for stream in self._streams:
            stream.close()

    def _transfer(
        self,
        kind: Kind,
        key: RemoteKey,
        region: AnyRegion,
        slices: npt.ArrayLike,
        notification: Notification | None,
        priority: Priority,
        deadline_s: float | None,
        stall_s: float | None = None,
    ) -> Future[TransferResult]:
        self._require_region(region)
        checked = Slices.of(slices, region.nbytes)
        if kind is READ and priority is not BACKGROUND and checked.nbytes:
            read = self._read_mapped(Transfer(key, region, checked), priority, deadline_s)
            if read is not None:
                return read
        operation = self._operation(kind, priority, checked.nbytes, 1, deadline_s, stall_s)
        self._submit(operation, Transfer(key, region, checked), notification)
        return operation

    def _submit(self, operation: Operation, transfer: Transfer, notification: Notification | None) -> None:
        """Submit a write or a read in parts."""
        key, region, slices = transfer
        queue_kind, part_nbytes = self._route(operation)
        if 0 < slices.nbytes <= part_nbytes and len(slices) <= MAX_PART_ROWS and queue_kind is not SPREAD:
            self._traffic.submit(operation, queue_kind, (Part(operation, transfer, notification),))
            return
        parts = [Part(operation, Transfer(key, region, piece)) for piece in slices.split(part_nbytes, MAX_PART_ROWS)]
        # The notification goes with the last part, or, if the parts go by several streams, after all of them.
        if notification is not None and (queue_kind is SPREAD or not parts):
            parts.append(Part(operation, None, notification))
        elif not parts:
            operation.settle(TransferResult(0, 0.0, self.transport), None)
            return
        else:
            parts[-1].notification = notification
        operation.set_parts(len(parts))
        self._traffic.submit(operation, queue_kind, parts)

    def _write_ahead(self, operation: Operation, transfer: Transfer, tag: bytes, payload: Callable[[], bytes]) -> None:
        """Submit a write, then compute the payload and send it with a further part that moves no bytes.

        For the owner, the notification goes with the last part of the write, as always.
        """
        key, region, slices = transfer
        queue_kind, part_nbytes = self._route(operation)
        nothing = None if queue_kind is SPREAD else Transfer(key, region, Slices(0, [(0, key.offset, 0)], None))
        parts = [Part(operation, Transfer(key, region, piece)) for piece in slices.split(part_nbytes, MAX_PART_ROWS)]
        operation.set_parts(len(parts) + 1)
        self._traffic.submit(operation, queue_kind, parts)
        try:
            last = Part(operation, nothing, _notification(tag, payload()))
        except BaseException as error:
            self._traffic.abandon_last(operation, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._traffic.submit_last(last)

    def _route(self, operation: Operation) -> tuple[QueueKind, int]:
        """Return the queue and the maximum size of an operation's parts."""
        kind, nbytes = operation.kind, operation.nbytes
        part_nbytes = MAX_PART_NBYTES if operation.priority is not BACKGROUND else BACKGROUND_PART_NBYTES
        if nbytes >= SPREAD_NBYTES and kind is WRITE and self._spreads:
            return SPREAD, min(part_nbytes, SPREAD_PART_NBYTES)
        if nbytes >= SPREAD_NBYTES and kind is READ and self._paths is not None:
            part_nbytes = min(part_nbytes, SPREAD_PART_NBYTES)
        return READS if kind is READ else ORDERED, part_nbytes

    def _read_mapped(
        self, transfer: Transfer, priority: Priority, deadline_s: float | None
    ) -> Future[TransferResult] | None:
        """Begin a read that takes no request (a short one is done on return); None if it takes one."""
        if transfer.nbytes <= INLINE_READ_NBYTES:
            _check_time(deadline_s)
            result = self._traffic.mapped_reads.try_read(transfer) if not self._traffic.closing else None
            return None if result is None else Completion.of(result)
        if not self._traffic.mapped_reads.may_read(transfer):
            return None
        key, region, slices = transfer
        pieces = slices.split(COPY_PART_NBYTES, MAX_PART_ROWS)
        operation = self._operation(READ, priority, slices.nbytes, len(pieces), deadline_s)
        self._traffic.submit_mapped_read(operation, [Part(operation, Transfer(key, region, piece)) for piece in pieces])
        return operation

    def _operation(
        self,
        kind: Kind,
        priority: Priority,
        nbytes: int,
        parts: int,
        deadline_s: float | None,
        stall_s: float | None = None,
    ) -> Operation:
        if deadline_s is None:
            deadline_s = self._default_deadline_s
        else:
            _check_time(deadline_s)
        if stall_s is not None:
            _check_time(stall_s)
        return Operation(next(self._numbers), kind, priority, nbytes, parts, time.monotonic(), deadline_s, stall_s)


_INFINITY = float("inf")


def _check_time(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < _INFINITY:
        raise InvalidArgument(f"a deadline must be a positive number of seconds, got {seconds!r}")


def _notification(tag: bytes, payload: bytes) -> Notification:
    if len(tag) + len(payload) > MAX_NOTIFY_NBYTES:
        raise InvalidArgument(
            f"tag and payload of a notify have {len(tag) + len(payload)} bytes together, at most "
            f"{MAX_NOTIFY_NBYTES} are allowed"
        )
    return Notification(bytes(tag), bytes(payload))

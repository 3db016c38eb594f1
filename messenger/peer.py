"""A peer as callers see it: one-sided writes and reads, and notifications in order, as futures."""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy.typing as npt

from messenger.backlog import ORDERED, READS, SPREAD, Role
from messenger.completion import Completion
from messenger.config import Endpoint
from messenger.frames import MAX_NOTIFY_NBYTES, MAX_PART_NBYTES, MAX_PART_ROWS
from messenger.memory import AnyRegion, Region, RemoteKey, SharedMemory
from messenger.operation import NOTIFY, READ, WRITE, Kind, Notification, Operation, Part, Transfer, TransferResult
from messenger.priority import BACKGROUND, BACKGROUND_PART_NBYTES, Priority
from messenger.slices import Slices
from messenger.stream import Stream
from messenger.traffic import COPY_NBYTES, QUICK_NBYTES, Traffic
from rpc.errors import InvalidArgument

if TYPE_CHECKING:
    from messenger.memory import Loan

__all__ = ["SPREAD_NBYTES", "SPREAD_PART_NBYTES", "Peer", "roles"]

SPREAD_NBYTES = 4 << 20
"""Writes of at least so much go by several streams, where there are several for writes."""
SPREAD_PART_NBYTES = 2 << 20


def roles(streams: int) -> list[Role]:
    """What each of a peer's streams carries: writes by the first half, small ones and notifications by the first."""
    if streams == 1:
        return [Role(ordered=True, spread=False, reads=True)]
    writers = (streams + 1) // 2
    return [Role(ordered=index == 0, spread=1 < writers > index, reads=index >= writers) for index in range(streams)]


class Peer:
    """Safe to use from any thread.

    Slices are integers [n, 3]: rows (local_offset, remote_offset, nbytes), both offsets from the start of a region.
    Arguments that cannot be right raise InvalidArgument at once; whatever happens later is the future's: PeerLost,
    PeerRestarted, PeerUnreachable, TransferDeadlineExceeded, TransferCancelled, RemoteAccessError, MemoryOutOfReach
    or MessengerClosed.
    Once a future is done, and not before, its local memory is free for other use: `cancel` asks for an early end,
    which then comes as TransferCancelled. (An asyncio future made of one forgets it when it is cancelled itself.)

    Order holds within a priority, and none holds between two of them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        traffic: Traffic,
        streams: Sequence[Stream],
        *,
        default_deadline_s: float,
        require_region: Callable[[AnyRegion], None],
    ) -> None:
        self.endpoint = endpoint
        self._traffic = traffic
        self._streams = streams
        self._spreads = any(stream.role.spread for stream in streams)
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
        """Copy local slices into the key's region; done when all of them have landed there."""
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
        """Copy slices of the key's region into local ones. After a failure the local slices hold anything."""
        return self._transfer(READ, key, region, slices, None, priority, deadline_s)

    def notify(
        self, tag: bytes, payload: bytes, *, deadline_s: float | None = None, priority: Priority = Priority.NORMAL
    ) -> Future[None]:
        """Call the peer's handlers, after every write of this priority that was given before has landed or failed.

        Done when the handlers have returned. A notify is delivered once, however often the connection breaks.
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
        payload: bytes,
        *,
        deadline_s: float | None = None,
        stall_s: float | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> Future[TransferResult]:
        """A write and its notify in one: the notify is delivered only if the whole write landed.

        It also ends with TransferDeadlineExceeded once the peer has acknowledged nothing for `stall_s`, of this or of
        what else it was given to land: a long queue that moves is no fault.
        """
        notification = _notification(tag, payload)
        return self._transfer(WRITE, key, region, slices, notification, priority, deadline_s, stall_s)

    def borrow(self, key: RemoteKey, offset: int, nbytes: int, *, deadline_s: float | None = None) -> "Loan":
        """Bytes [offset, offset + nbytes) of the key's region where they lie, on shm: see `Loan` for how to use them.

        The first loan from a region asks the owner and waits for the answer, with the errors of a read; later ones
        make no request. Raises InvalidArgument where nothing can be lent: by another transport, or when the owner
        has no room left to show the key; `read` works in either case.
        """
        if not key.read or offset < key.offset or nbytes < 1 or offset + nbytes > key.offset + key.nbytes:
            raise InvalidArgument(f"[{offset}, {offset + nbytes}) cannot be borrowed under {key}")
        loan = self._lent(key, offset, nbytes)
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
            loan = self._lent(key, offset, nbytes)
        if loan is None:
            raise InvalidArgument(
                f"{self.endpoint.node_id!r} lends nothing under this key by {self.transport}: only shared memory of "
                f"one host is lent, under keys that its owner has room to show; use read"
            )
        return loan

    def _lent(self, key: RemoteKey, offset: int, nbytes: int) -> "Loan | None":
        for stream in self._streams:
            loan = stream.lend(key, offset, nbytes)
            if loan is not None:
                return loan
        return None

    @property
    def transport(self) -> str:
        """Name of the transport that writes last went by; before the first one, of the one to be tried first."""
        return self._streams[0].transport

    def problems(self) -> list[str]:
        """What is pending."""
        pending = self._traffic.pending()
        return [f"{pending} requests pending towards {self.endpoint.node_id!r} by {self.transport}"] if pending else []

    def queued(self) -> list[int]:
        """Requests that have not begun yet, by priority."""
        return self._traffic.queued()

    def connections(self) -> int:
        """Streams that are connected now."""
        return sum(stream.connected() for stream in self._streams)

    def is_spent(self) -> bool:
        """Nothing pending and no thread left."""
        return not self._traffic.pending() and not any(stream.has_thread() for stream in self._streams)

    def close(self) -> None:
        """Fail what is pending and disconnect."""
        self._traffic.close()
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
            read = self._copied(Transfer(key, region, checked), priority, deadline_s)
            if read is not None:
                return read
        way = READS if kind is READ else ORDERED
        part_nbytes = MAX_PART_NBYTES if priority is not BACKGROUND else BACKGROUND_PART_NBYTES
        if self._spreads and kind is WRITE and checked.nbytes >= SPREAD_NBYTES:
            way, part_nbytes = SPREAD, min(part_nbytes, SPREAD_PART_NBYTES)
        pieces = checked.split(part_nbytes, MAX_PART_ROWS)
        # The notification goes with the last part, or after all of them where these go by several streams.
        apart = notification is not None and (way is SPREAD or not pieces)
        operation = self._operation(kind, priority, checked.nbytes, len(pieces) + apart, deadline_s, stall_s)
        parts = [Part(operation, Transfer(key, region, piece)) for piece in pieces]
        if apart:
            parts.append(Part(operation, None, notification))
        elif not parts:
            operation.settle(TransferResult(0, 0.0, self.transport), None)
            return operation
        else:
            parts[-1].notification = notification
        self._traffic.submit(operation, way, parts)
        return operation

    def _copied(
        self, transfer: Transfer, priority: Priority, deadline_s: float | None
    ) -> Future[TransferResult] | None:
        """The read, if it takes no request: done, where it is short."""
        if transfer.nbytes <= QUICK_NBYTES:
            _check_time(deadline_s)
            result = self._traffic.copies.done(transfer) if not self._traffic.closing else None
            return None if result is None else Completion.of(result)
        if not self._traffic.copies.may_do(transfer):
            return None
        key, region, slices = transfer
        pieces = slices.split(COPY_NBYTES, MAX_PART_ROWS)
        operation = self._operation(READ, priority, slices.nbytes, len(pieces), deadline_s)
        self._traffic.submit_copies(operation, [Part(operation, Transfer(key, region, piece)) for piece in pieces])
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
        _check_time(deadline_s)
        _check_time(stall_s)
        if deadline_s is None:
            deadline_s = self._default_deadline_s
        return Operation(next(self._numbers), kind, priority, nbytes, parts, time.monotonic(), deadline_s, stall_s)


_INFINITY = float("inf")


def _check_time(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < _INFINITY:
        raise InvalidArgument(f"a deadline is a positive number of seconds, not {seconds!r}")


def _notification(tag: bytes, payload: bytes) -> Notification:
    if len(tag) + len(payload) > MAX_NOTIFY_NBYTES:
        raise InvalidArgument(f"tag and payload of a notify take at most {MAX_NOTIFY_NBYTES} bytes together")
    return Notification(bytes(tag), bytes(payload))

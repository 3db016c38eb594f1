"""A peer as callers see it: one-sided writes and reads, and notifications in order, as futures."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy.typing as npt

from messenger.config import Endpoint
from messenger.errors import InvalidArgument
from messenger.frames import MAX_NOTIFY_NBYTES, MAX_PART_NBYTES, MAX_PART_ROWS
from messenger.keys import RemoteKey
from messenger.memory import Region
from messenger.operation import Kind, Notification, Operation, Part, Transfer, TransferResult
from messenger.slices import checked, coalesced, split
from messenger.stream import Stream


class Peer:
    """Safe to use from any thread. Writes and notifies share one ordered stream; reads have streams of their own.

    Slices are integers [n, 3]: rows (local_offset, remote_offset, nbytes), both offsets from the start of a region.
    Arguments that cannot be right raise InvalidArgument at once; whatever happens later is the future's: PeerLost,
    PeerRestarted, PeerUnreachable, TransferDeadlineExceeded, RemoteAccessError or MessengerClosed. Futures cannot be
    cancelled: the deadline ends them, and once one is done its local memory is free for other use.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        streams: Sequence[Stream],
        *,
        default_deadline_s: float,
        require_region: Callable[[Region], None],
    ) -> None:
        self.endpoint = endpoint
        self._streams = streams
        self._default_deadline_s = default_deadline_s
        self._require_region = require_region
        self._numbers = itertools.count(1)
        self._readers = itertools.cycle(streams[1:] or streams)

    def write(
        self, key: RemoteKey, region: Region, slices: npt.ArrayLike, *, deadline_s: float | None = None
    ) -> Future[TransferResult]:
        """Copy local slices into the key's region; done when all of them have landed there."""
        return self._transfer(Kind.WRITE, key, region, slices, None, deadline_s)

    def read(
        self, key: RemoteKey, region: Region, slices: npt.ArrayLike, *, deadline_s: float | None = None
    ) -> Future[TransferResult]:
        """Copy slices of the key's region into local ones. After a failure the local slices hold anything."""
        return self._transfer(Kind.READ, key, region, slices, None, deadline_s)

    def notify(self, tag: bytes, payload: bytes, *, deadline_s: float | None = None) -> Future[None]:
        """Call the peer's handlers, after every write that this Peer was given before has landed or failed.

        Done when the handlers have returned. A notify is delivered once, however often the connection breaks.
        """
        operation = self._operation(Kind.NOTIFY, 0, 1, deadline_s)
        return self._submit(operation, [Part(operation, None, _notification(tag, payload))], self._streams[0])

    def write_notify(
        self,
        key: RemoteKey,
        region: Region,
        slices: npt.ArrayLike,
        tag: bytes,
        payload: bytes,
        *,
        deadline_s: float | None = None,
        stall_s: float | None = None,
    ) -> Future[TransferResult]:
        """A write and its notify in one: the notify is delivered only if the whole write landed.

        It also ends with TransferDeadlineExceeded once the peer has acknowledged nothing for `stall_s`, of this or of
        what was submitted before it: a long queue that moves is no fault.
        """
        return self._transfer(Kind.WRITE, key, region, slices, _notification(tag, payload), deadline_s, stall_s)

    @property
    def transport(self) -> str:
        """Name of the transport that writes last went by; before the first one, of the one to be tried first."""
        return self._streams[0].transport

    def problems(self) -> list[str]:
        """What is pending."""
        pending = sum(stream.pending() for stream in self._streams)
        return [f"{pending} requests pending towards {self.endpoint.node_id!r} by {self.transport}"] if pending else []

    def connections(self) -> int:
        """Streams that are connected now."""
        return sum(stream.connected() for stream in self._streams)

    def is_spent(self) -> bool:
        """Nothing pending and no thread left."""
        return all(stream.idle_and_lost() for stream in self._streams)

    def close(self) -> None:
        """Fail what is pending and disconnect."""
        for stream in self._streams:
            stream.close()

    def _transfer(
        self,
        kind: Kind,
        key: RemoteKey,
        region: Region,
        slices: npt.ArrayLike,
        notification: Notification | None,
        deadline_s: float | None,
        stall_s: float | None = None,
    ) -> Future[TransferResult]:
        self._require_region(region)
        rows = coalesced(checked(slices, region.nbytes))
        pieces = list(split(rows, MAX_PART_NBYTES, MAX_PART_ROWS)) if len(rows) else []
        nbytes = sum(nbytes for _, nbytes in pieces)
        operation = self._operation(kind, nbytes, max(len(pieces), 1), deadline_s, stall_s)
        parts = [Part(operation, Transfer(key, region, piece, nbytes)) for piece, nbytes in pieces]
        if notification is not None:
            if parts:
                parts[-1].notification = notification
            else:
                parts = [Part(operation, None, notification)]
        if not parts:
            operation.future.set_result(TransferResult(0, 0.0, self.transport))
            return operation.future
        return self._submit(operation, parts, next(self._readers) if kind is Kind.READ else self._streams[0])

    def _operation(
        self, kind: Kind, nbytes: int, parts: int, deadline_s: float | None, stall_s: float | None = None
    ) -> Operation:
        deadline_s = self._default_deadline_s if deadline_s is None else deadline_s
        for limit_s in (deadline_s, stall_s):
            if limit_s is not None and not 0 < limit_s < float("inf"):
                raise InvalidArgument(f"a deadline is a positive number of seconds, not {limit_s!r}")
        return Operation(next(self._numbers), kind, nbytes, parts, deadline_s, stall_s)

    def _submit(self, operation: Operation, parts: list[Part], stream: Stream) -> Future[Any]:
        stream.submit(operation, parts)
        return operation.future


def _notification(tag: bytes, payload: bytes) -> Notification:
    if len(tag) + len(payload) > MAX_NOTIFY_NBYTES:
        raise InvalidArgument(f"tag and payload of a notify take at most {MAX_NOTIFY_NBYTES} bytes together")
    return Notification(bytes(tag), bytes(payload))

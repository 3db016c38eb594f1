"""What a caller asked for (an operation) and the pieces it travels in (parts); plain state, guarded by its traffic."""

from enum import Enum
from typing import Any, NamedTuple, Protocol

from messenger.completion import Completion
from messenger.memory import AnyRegion, RemoteKey
from messenger.priority import Priority
from messenger.slices import Rows, Slices
from rpc.errors import InvalidArgument

__all__ = ["Carrier", "Kind", "Notification", "Operation", "Part", "Transfer", "TransferResult"]


WAITS_FOR_ITSELF = (
    "a callback waits in result() or exception() for what its own thread is to send, to receive or to end in time: add "
    "a callback to that future, or wait on another thread"
)


class Kind(Enum):
    WRITE = "write"
    READ = "read"
    NOTIFY = "notify"

    __hash__ = object.__hash__  # an Enum's own is written in Python


# Who asks often takes these: to name a member by its class takes ten times as long in Python 3.11.
WRITE, READ, NOTIFY = Kind.WRITE, Kind.READ, Kind.NOTIFY


class TransferResult(NamedTuple):
    """A finished operation: bytes moved, seconds from the call to the acknowledgement, and the transport's name."""

    nbytes: int
    seconds: float
    transport: str


class Carrier(Protocol):
    """The stream that a part of an operation is in flight on."""

    @property
    def transport(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def cause(self) -> str: ...

    def help(self, operation: "Operation") -> None: ...
    def is_observed(self) -> None: ...


class Canceller(Protocol):
    """Whoever has the operation in hand."""

    def cancel(self, operation: "Operation") -> bool: ...
    def is_ended_here(self) -> bool: ...


class Copier(Protocol):
    """Whoever queues parts that any thread may copy."""

    def copy_all_of(self, operation: "Operation") -> None: ...
    def is_observed(self) -> None: ...


class Operation(Completion[Any]):
    """`outstanding` counts the parts that are queued or in flight; at zero it is settled, once.

    `canceller` is None until it is submitted.
    """

    # Kept for each only once it is something else.
    flying = 0
    """Parts in flight."""
    acknowledged_nbytes = 0
    failure: Exception | None = None
    awaited = False
    """A thread waits in `result`, and may help next time."""
    observed = False
    carrier: Carrier | None = None
    canceller: Canceller | None = None
    copier: Copier | None = None

    def __init__(
        self,
        number: int,
        kind: Kind,
        priority: Priority,
        nbytes: int,
        outstanding: int,
        started_s: float,
        deadline_s: float,
        stall_s: float | None = None,
    ) -> None:
        self.number = number
        self.kind = kind
        self.priority = priority
        self.nbytes = nbytes
        self.outstanding = outstanding
        self.single = outstanding == 1
        self.started_s = started_s
        self.deadline_s = deadline_s
        self.stall_s = stall_s  # given up once the peer has acknowledged nothing for so long; None: never

    def cancel(self) -> bool:
        """Drop what is queued and cut off what is on the wire; whether it will end with TransferCancelled.

        Local memory is free when the future is done, as always, not when this returns.
        """
        return self.canceller is not None and self.canceller.cancel(self)

    def _is_observed(self) -> None:
        # In this order: whoever puts a part in flight sets the carrier before it looks at these.
        self.observed = True
        if self.copier is not None:
            self.copier.is_observed()
        carrier = self.carrier
        if carrier is not None:
            carrier.is_observed()

    def _help(self) -> None:
        if self.copier is not None:
            self.copier.copy_all_of(self)
            if self.settled:
                return
        carrier = self.carrier
        if carrier is None:
            self.awaited = True
            carrier = self.carrier
        if carrier is not None and self.single:
            carrier.help(self)
            return
        if self.canceller is not None and self.canceller.is_ended_here():
            raise InvalidArgument(WAITS_FOR_ITSELF)
        if carrier is not None:
            carrier.help(self)


class Transfer(NamedTuple):
    """The memory side of a part: slices (local_offset, remote_offset, nbytes) between `region` and the key's region."""

    key: RemoteKey
    region: AnyRegion
    slices: Slices

    @property
    def nbytes(self) -> int:
        return self.slices.nbytes

    @property
    def rows(self) -> Rows:
        """int64 [n, 3]"""
        return self.slices.rows


class Notification(NamedTuple):
    tag: bytes
    payload: bytes


class Part:
    """One request on the wire. `seq` is given at the first sending and kept when it is sent again after a loss."""

    __slots__ = ("copied", "nbytes", "notification", "operation", "seq", "transfer")

    def __init__(
        self, operation: Operation, transfer: Transfer | None, notification: Notification | None = None
    ) -> None:
        self.operation = operation
        self.transfer = transfer
        self.notification = notification
        self.nbytes = 0 if transfer is None else transfer.slices.nbytes
        self.seq = 0
        self.copied = False

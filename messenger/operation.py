"""Operations (what a caller requested) and their parts (one request on the wire each).

Plain state: once an operation is submitted, it and its parts are guarded by the lock of the peer's traffic.
"""

from enum import Enum
from typing import Any, NamedTuple, Protocol

from messenger.completion import Completion
from messenger.memory import AnyRegion, RemoteKey
from messenger.priority import Priority
from messenger.slices import Rows, Slices
from rpc.errors import InvalidArgument

SELF_WAIT_ERROR = (
    "a callback waits in result() or exception() for an operation that its own thread must send, receive or time out: "
    "add a callback to that future, or wait on another thread"
)


class Kind(Enum):
    """Kind of an operation."""

    WRITE = "write"
    READ = "read"
    NOTIFY = "notify"

    __hash__ = object.__hash__  # Enum's own hash is a Python function


# Module constants for hot paths: access to a member through its class takes ten times as long in Python 3.11.
WRITE, READ, NOTIFY = Kind.WRITE, Kind.READ, Kind.NOTIFY


class TransferResult(NamedTuple):
    """A finished operation: bytes moved, seconds from the call to the acknowledgement, and the transport's name."""

    nbytes: int
    seconds: float
    transport: str


class OperationStream(Protocol):
    """Stream that carries a part of an operation."""

    @property
    def transport(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def cause(self) -> str: ...

    def receive_for(self, operation: "Operation") -> None: ...
    def on_observed(self) -> None: ...


class OperationTraffic(Protocol):
    """Traffic in which an operation is pending."""

    def cancel(self, operation: "Operation") -> bool: ...
    def settles_on_current_thread(self) -> bool: ...


class OperationCopies(Protocol):
    """Queue of an operation's parts that any thread may copy."""

    def copy_all_of(self, operation: "Operation") -> None: ...
    def on_observed(self) -> None: ...


class Operation(Completion[Any]):
    """One write, read or notify, and its future.

    `outstanding` counts the parts that are queued, being copied or in flight; at zero the operation is settled, once.
    `deadline_s` counts from `started_s` (monotonic time). The operation fails once the peer has acknowledged nothing
    for `stall_s`; None: never.
    """

    # Class attributes hold the defaults, so that creating an operation does not set them.
    num_in_flight = 0
    """Number of parts in flight."""
    acknowledged_nbytes = 0
    failure: Exception | None = None
    awaited = False
    """True if a thread waits in `result`: its next wait may receive the answer itself."""
    observed = False
    """True if the future has an observer that cannot receive the answer: a callback, asyncio, a limited wait."""
    stream: OperationStream | None = None
    """The stream that carries, or last carried, a part of it."""
    traffic: OperationTraffic | None = None
    """None until it is submitted."""
    mapped_reads: OperationCopies | None = None
    """Set if its parts are copied from mapped memory."""

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
        self.stall_s = stall_s

    def set_parts(self, number: int) -> None:
        """Set the number of parts, before the operation is submitted."""
        self.outstanding = number
        self.single = number == 1

    def cancel(self) -> bool:
        """Drop queued parts and cut off those on the wire. Returns True if it will end with TransferCancelled.

        Local memory may be reused when the future is done, not when this returns.
        """
        return self.traffic is not None and self.traffic.cancel(self)

    def _on_observed(self) -> None:
        # In this order: a thread that puts a part in flight sets the stream before it looks at `observed`.
        self.observed = True
        if self.mapped_reads is not None:
            self.mapped_reads.on_observed()
        stream = self.stream
        if stream is not None:
            stream.on_observed()

    def _before_wait(self) -> None:
        if self.mapped_reads is not None:
            self.mapped_reads.copy_all_of(self)
            if self.settled:
                return
        stream = self.stream
        if stream is None:
            self.awaited = True
            stream = self.stream
        if stream is not None and self.single:
            stream.receive_for(self)
            return
        if self.traffic is not None and self.traffic.settles_on_current_thread():
            raise InvalidArgument(SELF_WAIT_ERROR)
        if stream is not None:
            stream.receive_for(self)


class Transfer(NamedTuple):
    """Memory of a part: slices (local_offset, remote_offset, nbytes) between `region` and the key's region."""

    key: RemoteKey
    region: AnyRegion
    slices: Slices

    @property
    def nbytes(self) -> int:
        return self.slices.nbytes

    @property
    def rows(self) -> Rows:
        """Slices as int64 [n, 3]."""
        return self.slices.rows


class Notification(NamedTuple):
    """Message for the peer's notification handlers."""

    tag: bytes
    payload: bytes


class Part:
    """One request on the wire.

    `seq` is assigned when the part is first sent (0 before), and kept when it is sent again after a lost connection.
    `copied` belongs to the transport: with shm, the bytes of a read are copied, and the request confirms the key.
    """

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

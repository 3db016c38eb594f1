"""What a caller asked for (an operation) and the pieces it travels in (parts); plain state, guarded by its stream."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from messenger.alarms import Alarm
from messenger.keys import RemoteKey
from messenger.memory import Region
from messenger.slices import Rows


class Kind(Enum):
    WRITE = "write"
    READ = "read"
    NOTIFY = "notify"


@dataclass(frozen=True)
class TransferResult:
    """A finished operation: bytes moved, seconds from the call to the acknowledgement, and "tcp" or "shm"."""

    nbytes: int
    seconds: float
    transport: str


@dataclass(eq=False)
class Operation:
    """`outstanding` counts the parts that are queued or in flight; at zero the future is settled, once."""

    number: int
    kind: Kind
    nbytes: int
    outstanding: int
    deadline_s: float
    stall_s: float | None = None  # given up once its stream has made no progress for so long; None: never
    future: Future[Any] = field(default_factory=Future)
    started_s: float = field(default_factory=time.monotonic)
    acknowledged_nbytes: int = 0
    failure: Exception | None = None
    alarm: Alarm | None = None


@dataclass(frozen=True)
class Transfer:
    """The memory side of a part: rows (local_offset, remote_offset, nbytes) between `region` and the key's region."""

    key: RemoteKey
    region: Region
    rows: Rows
    nbytes: int


@dataclass(frozen=True)
class Notification:
    tag: bytes
    payload: bytes


@dataclass(eq=False)
class Part:
    """One request on the wire. `seq` is given at the first sending and kept when it is sent again after a loss."""

    operation: Operation
    transfer: Transfer | None
    notification: Notification | None = None
    seq: int = 0
    attempts: int = 0
    copied: bool = False

    @property
    def nbytes(self) -> int:
        return self.transfer.nbytes if self.transfer is not None else 0

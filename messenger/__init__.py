"""The messenger: one-sided transfers of bytes between the registered memories of processes.

`messenger.messenger` describes threads, locks and lifetimes.
"""

from messenger.config import Endpoint, MessengerConfig
from messenger.errors import (
    GpuMemoryUnsupported,
    MemoryOutOfReach,
    MessengerClosed,
    MessengerError,
    PeerLost,
    PeerRestarted,
    PeerUnreachable,
    ProtocolError,
    RemoteAccessError,
    TransferCancelled,
    TransferDeadlineExceeded,
    TransferError,
)
from messenger.memory import GpuMemory, GpuRegion, Loan, Region, RemoteKey, SharedMemory, UnitSection
from messenger.messenger import Messenger
from messenger.operation import TransferResult
from messenger.peer import Peer
from messenger.priority import Priority
from rpc.errors import AddressInUse, BindFailed, DeadlineExceeded, InvalidArgument

__all__ = [
    "AddressInUse",
    "BindFailed",
    "DeadlineExceeded",
    "Endpoint",
    "GpuMemory",
    "GpuMemoryUnsupported",
    "GpuRegion",
    "InvalidArgument",
    "Loan",
    "MemoryOutOfReach",
    "Messenger",
    "MessengerClosed",
    "MessengerConfig",
    "MessengerError",
    "Peer",
    "PeerLost",
    "PeerRestarted",
    "PeerUnreachable",
    "Priority",
    "ProtocolError",
    "Region",
    "RemoteAccessError",
    "RemoteKey",
    "SharedMemory",
    "TransferCancelled",
    "TransferDeadlineExceeded",
    "TransferError",
    "TransferResult",
    "UnitSection",
]

"""Errors of this package.

MessengerError             (a rpc.errors.NetworkError)
├── MessengerClosed          the messenger was closed while, or before, the operation ran
├── RdmaUnavailable          rdma was requested, and this process cannot use it
├── PeerLost                 the connection broke, or could not be made, before the operation was acknowledged
│   ├── PeerUnreachable      nothing answers at the peer's address
│   └── PeerRestarted        another incarnation answers there: the endpoint, its regions and keys are void
├── TransferCancelled        the caller cancelled the operation; it cannot touch memory any more
├── RemoteAccessError        the owner refused: unknown or revoked key, missing right, out of bounds
├── MemoryOutOfReach         the transport to the peer cannot move the local memory, for example GPU memory by tcp
├── GpuMemoryUnsupported     GPU memory cannot be registered: a driver or module is missing or fails
└── ProtocolError            bytes that are not a frame of this protocol and version
    └── EncryptionRefused    the other side does not speak TLS, or a certificate is not accepted

`rpc.errors` defines the errors that this package shares with the control plane: `InvalidArgument` (a wrong key, region
or slice list), `AddressInUse`, `BindFailed` and `DeadlineExceeded` (the operation cannot touch memory any more).
"""

from rpc.errors import DeadlineExceeded, NetworkError


class MessengerError(NetworkError):
    """Root of the package's errors."""


class MessengerClosed(MessengerError):
    """The messenger was closed."""


class RdmaUnavailable(MessengerError):
    """rdma cannot be used: pyverbs is missing, no port is suitable, or a device fails."""


class TransferError(MessengerError):
    """An operation towards a peer failed.

    `peer` is the node id, `transport` the transport's name, `address` the peer's address, and `acknowledged_nbytes` the
    number of bytes known to have landed (the others may have landed or not).
    """

    def __init__(self, reason: str, *, peer: str, transport: str, address: str, acknowledged_nbytes: int = 0) -> None:
        super().__init__(f"{reason} (peer {peer!r}, {transport} {address}, {acknowledged_nbytes} bytes acknowledged)")
        self.reason = reason
        self.peer = peer
        self.transport = transport
        self.address = address
        self.acknowledged_nbytes = acknowledged_nbytes


class PeerLost(TransferError):
    """The connection broke before the operation was acknowledged."""


class PeerUnreachable(PeerLost):
    """Nothing answers at the peer's address."""


class PeerRestarted(PeerLost):
    """Another incarnation of the node answers: get its new endpoint, regions and keys."""


class TransferDeadlineExceeded(TransferError, DeadlineExceeded):
    """The deadline passed; the connection that carried the operation is cut, so no byte of it lands later."""


class TransferCancelled(TransferError):
    """The caller cancelled the operation; its connection is cut, as at a deadline, if parts were on the wire."""


class RemoteAccessError(TransferError):
    """The owner of the memory refused the key, the right or the bounds; no byte was touched."""


class MemoryOutOfReach(TransferError):
    """The local region is GPU memory, and the peer is reached by a transport that moves host memory only."""


class GpuMemoryUnsupported(MessengerError):
    """GPU memory cannot be registered with an RDMA device; the reason names what is missing."""


class ProtocolError(MessengerError):
    """Bytes that are not a frame of this protocol and version."""


class EncryptionRefused(ProtocolError):
    """Only one side uses TLS, or one rejects the other's certificate; a retry is useless."""

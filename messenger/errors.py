"""Every error this package raises; nothing else lives here.

MessengerError
├── InvalidArgument          a wrong key, region, slice list or configuration, found before anything was sent
├── MessengerClosed          the messenger was closed while, or before, the operation ran
├── AddressInUse             somebody already listens at the address asked for
├── BindFailed               the address cannot be listened at for another reason
├── RdmaUnavailable          rdma was asked for, and this process cannot do it
├── PeerLost                 the connection died, or could not be made, before the operation was acknowledged
│   ├── PeerUnreachable      nothing answers at the peer's address
│   └── PeerRestarted        another incarnation answers there: the endpoint, its regions and keys are void
├── DeadlineExceeded         the deadline passed first; the operation cannot touch memory any more
├── TransferCancelled        the caller cancelled it; it cannot touch memory any more
├── RemoteAccessError        the owner refused: unknown or revoked key, missing right, out of bounds
├── MemoryOutOfReach         the transport by which the peer is reached cannot move the local memory: a GPU's by tcp
├── GpuMemoryUnsupported     GPU memory cannot be registered here: a driver or module is missing, or refuses
├── ProtocolError            bytes that are no frame of this protocol and version
│   └── EncryptionRefused    the other side does not speak TLS, or a certificate is not accepted
└── ControlError             a gRPC call failed
    ├── Unavailable          no connection to the target, or it broke under the call
    ├── ControlDeadlineExceeded  (also a DeadlineExceeded)
    └── Refused              the target answered with an error; `code` is gRPC's status name
"""


class MessengerError(Exception):
    """Root of the package's errors."""


class InvalidArgument(MessengerError, ValueError):
    """The caller's key, region, slices or configuration cannot be right; nothing was sent."""


class MessengerClosed(MessengerError):
    """The messenger was closed."""


class AddressInUse(MessengerError):
    """Another process or server already listens at the address."""


class BindFailed(MessengerError):
    """The address cannot be listened at: no such host, no permission, path too long."""


class RdmaUnavailable(MessengerError):
    """No pyverbs, no port that fits, or a device that cannot be used."""


class TransferError(MessengerError):
    """An operation towards a peer failed.

    `peer` is the node id, `transport` "tcp" or "shm", `address` where the peer was sought, and `acknowledged_nbytes`
    how much of the operation is known to have landed (the rest may or may not have).
    """

    def __init__(self, reason: str, *, peer: str, transport: str, address: str, acknowledged_nbytes: int = 0) -> None:
        super().__init__(f"{reason} (peer {peer!r}, {transport} {address}, {acknowledged_nbytes} bytes acknowledged)")
        self.reason = reason
        self.peer = peer
        self.transport = transport
        self.address = address
        self.acknowledged_nbytes = acknowledged_nbytes


class PeerLost(TransferError):
    """The connection died before the operation was acknowledged."""


class PeerUnreachable(PeerLost):
    """Nothing answers at the peer's address."""


class PeerRestarted(PeerLost):
    """Another incarnation of the node answers: ask for its new endpoint, regions and keys."""


class DeadlineExceeded(MessengerError):
    """The deadline passed before the operation was done."""


class TransferDeadlineExceeded(TransferError, DeadlineExceeded):
    """The deadline passed; the connection that carried the operation is cut, so no byte of it lands later."""


class TransferCancelled(TransferError):
    """The caller cancelled the operation; what was on the wire is cut off as by a deadline."""


class RemoteAccessError(TransferError):
    """The owner of the memory refused the key, the right or the bounds; no byte was touched."""


class MemoryOutOfReach(TransferError):
    """The local region is GPU memory, and the peer is reached by a transport that moves host memory only."""


class GpuMemoryUnsupported(MessengerError):
    """GPU memory cannot be registered with an RDMA device; the reason names what is missing."""


class ProtocolError(MessengerError):
    """Bytes that are no frame of this protocol and version."""


class EncryptionRefused(ProtocolError):
    """Only one side speaks TLS, or one does not accept the other's certificate: trying again changes nothing."""


class ControlError(MessengerError):
    """A gRPC call failed. `code` is gRPC's status name, `what` the call and `target` whom it was sent to."""

    def __init__(self, reason: str, *, what: str, target: str, code: str) -> None:
        super().__init__(f"{what} at {target}: {reason} [{code}]")
        self.reason = reason
        self.what = what
        self.target = target
        self.code = code


class Unavailable(ControlError):
    """No connection to the target, or it broke under the call: retry, or take another."""


class ControlDeadlineExceeded(ControlError, DeadlineExceeded):
    """The target did not answer in time."""


class Refused(ControlError):
    """The target answered with an error; retrying the same call changes nothing unless `code` says so."""

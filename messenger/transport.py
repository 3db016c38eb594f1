"""Interface between the messenger's guarantees and the transports, which are the sub-packages tcp, shm and rdma.

A transport opens links to peers, and an acceptor accepts theirs. Each link has a Requester (the side that calls write,
read and notify) and a Responder (the side that owns the memory). Sessions, order, deadlines, retries, grants and
notifications are the same for every transport, and are implemented in traffic.py, stream.py, server.py and inbound.py.

Threads: the sending methods of a Requester belong to the thread that holds the stream's sending role, its receiving
methods to the one that holds the receiving role, and `may_copy`, `try_copy` and `lend` to any; all methods of a
Responder run on its connection's thread.
"""

import socket
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from messenger.config import Endpoint
from messenger.counters import FloatSums
from messenger.errors import GpuMemoryUnsupported, ProtocolError
from messenger.frames import (
    MAX_PART_NBYTES,
    MAX_PART_ROWS,
    Ack,
    Frame,
    KeyInfo,
    KeyQuery,
    Message,
    Offer,
    Read,
    Write,
    pack_notify,
    pack_read,
    pack_write,
)
from messenger.grants import Access, GrantTable
from messenger.link import BufferedLink, Cuttable, Link
from messenger.memory import AnyRegion, GpuRegion, Loan, RemoteKey
from messenger.operation import READ, Operation, Part, Transfer
from messenger.slices import FEW, Rows
from messenger.sockets import SocketLink

if TYPE_CHECKING:
    from messenger.native.responder_loop import CompiledLoop


class SendStatus(Enum):
    """Progress of a part after a call that sends it."""

    WHOLE = "whole"
    """On the wire; an answer will come."""
    PARTLY = "partly"
    """Part of it, perhaps nothing, is on the wire: `finish` sends the rest."""
    DONE = "done"
    """Complete without a request: no answer will come."""
    UNABLE = "unable"
    """The transport cannot reach the part's local memory: nothing was sent."""


# Module constants for hot paths; see messenger.operation.Kind.
WHOLE, PARTLY, DONE, UNABLE = SendStatus.WHOLE, SendStatus.PARTLY, SendStatus.DONE, SendStatus.UNABLE


class NoPath(ConnectionError):
    """The peer answers, but this transport's own path to it does not work; another transport may."""


class Requester(ABC):
    """Calling side of one link.

    One thread at a time sends (`send`, `begin`, `finish`) and one receives (`receive`, `try_receive`, `accept`,
    `refused`, `offered`, `key_info`); the threads change.
    """

    takes_early_answers = False
    """True if the answer to a part, unless it is a read, may be accepted before the call that sends it has returned."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._begun: Part | None = None

    def send(self, part: Part) -> SendStatus:
        """Put the part on the wire; blocks while the link is full. Raises OSError when the link ended."""
        if part.transfer is None:
            self._link.send(notify_request(part))
        elif part.operation.kind is READ:
            self._send_read(part, part.transfer)
        else:
            self._send_write(part, part.transfer)
        return WHOLE

    def begin(self, part: Part) -> SendStatus:
        """Send as much of the part as possible without blocking. After PARTLY, `finish` must precede any other sending.

        Runs on a caller's thread. By default sends nothing and leaves the part to `finish`.
        """
        self._begun = part
        return PARTLY

    def finish(self) -> SendStatus:
        """Send the rest of the part that `begin` began; blocks. Raises OSError when the link ended."""
        part, self._begun = self._begun, None
        assert part is not None
        return self.send(part)

    def may_copy(self, transfer: Transfer) -> bool:
        """Return True if `try_copy` can probably do the read. Any thread."""
        return False

    def try_copy(self, transfer: Transfer) -> bool:
        """Do a read without a request, on the calling thread, while others send and receive.

        Returns False if that is not possible; the contents of the local slices are then undefined.
        """
        return False

    def lend(self, key: RemoteKey, offset: int, nbytes: int) -> Loan | None:
        """Return bytes of the owner's region in place; None if that is not possible, or not yet."""
        return None

    def always_answers(self, operation: Operation) -> bool:
        """Return True if no part of the operation can be DONE without an answer."""
        return True

    def receive(self, reads: bool) -> Message:
        """Return the link's next message; blocks. `reads`: the part answered next is a read, as far as known."""
        return self._link.receive()

    def try_receive(self) -> Message | None:
        """Return the next message if it is known to have arrived."""
        return self._link.try_receive()

    @abstractmethod
    def accept(self, part: Part, ack: Ack) -> bool:
        """Receive the bytes after the part's Ack. Returns False if the part must be sent again, as its next step."""

    @abstractmethod
    def refused(self, part: Part) -> None:
        """Handle the owner's refusal of the part."""

    def offered(self, offer: Offer) -> None:
        """Handle memory that the owner offered."""
        raise ProtocolError(f"{self._link.address} offered memory on a transport that shares none")

    def key_info(self, info: KeyInfo) -> None:
        """Handle the owner's answer to the query of a key."""
        raise ProtocolError(f"{self._link.address} answered a query of a key, which was not sent")

    @abstractmethod
    def _send_write(self, part: Part, transfer: Transfer) -> None: ...

    @abstractmethod
    def _send_read(self, part: Part, transfer: Transfer) -> None: ...


class Responder(ABC):
    """Owning side of one link; every method runs on the connection's thread."""

    reaches_gpus = False
    """True if bytes move without this process touching the memory."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def compiled_loop(
        self, grants: GrantTable, mover: Cuttable, landed: FloatSums, served: FloatSums
    ) -> "CompiledLoop | None":
        """Return a compiled loop that serves the plain requests, if the transport has one; cutting `mover` ends it.

        The loop adds to `landed` and `served`, the sums of the connection's flows (see messenger.counters.Sums).
        """
        return None

    @abstractmethod
    def target_rows(self, message: Write) -> Rows:
        """Return the checked rows, int64 [n, 2] of (offset, nbytes) in the owner's region. Raises ProtocolError."""

    @abstractmethod
    def land(self, message: Write, rows: Rows, region: AnyRegion) -> None:
        """Put the bytes in place; `rows` come from `target_rows`. Raises OSError when the link ended first."""

    @abstractmethod
    def skip(self, message: Write) -> None:
        """Discard the bytes of a write that is refused or was done before."""

    def source_rows(self, message: Read) -> Rows:
        """Return the checked rows, int64 [n, 2] of (offset, nbytes) in the owner's region. Raises ProtocolError."""
        return parse_rows(message.rows, 2, message.nbytes)

    @abstractmethod
    def serve(self, message: Read, rows: Rows, region: AnyRegion) -> None:
        """Answer an allowed read, including the Ack."""

    def offered(self, offer: Offer) -> None:
        """Handle memory that the caller offered."""
        raise ProtocolError(f"{self._link.address} offered memory on a transport that shares none")

    def key_queried(self, query: KeyQuery, access: Access, last_seq: int) -> None:
        """Open the key's memory to the caller's hardware and answer the query; `last_seq` is the session's."""
        raise ProtocolError(f"{self._link.address} queried a key on a transport without remote access")

    def key_void(self, query: KeyQuery, last_seq: int) -> None:
        """Answer that the key is void."""
        raise ProtocolError(f"{self._link.address} queried a key on a transport without remote access")


class Transport(ABC):
    """One way to move bytes. `name` appears in results, errors and counters."""

    name: str

    @abstractmethod
    def address_of(self, endpoint: Endpoint) -> str:
        """Return the endpoint's address by this transport, for errors and logs."""

    @abstractmethod
    def connect(self, sock: socket.socket, endpoint: Endpoint) -> None:
        """Connect within the socket's time limit. Raises OSError."""

    @abstractmethod
    def new_socket(self, endpoint: Endpoint) -> socket.socket:
        """Create a socket of the family that reaches the endpoint."""

    def wrap(self, sock: socket.socket, address: str) -> BufferedLink:
        """Return the caller's link over a socket that is not connected yet; `address` names the owner."""
        return SocketLink(sock, address)

    def adopt(self, link: Link, *, caller: bool) -> Link:
        """Return the link to use after the greeting, on both sides: `link` itself, or one that replaces it.

        Runs within the handshake's time limit. Raises OSError (NoPath if another transport may work) or ProtocolError
        if it fails; the caller must then close `link`. On success `link` belongs to the returned link.
        """
        return link

    @abstractmethod
    def requester(self, link: Link) -> Requester: ...

    @abstractmethod
    def responder(self, link: Link) -> Responder: ...

    def register_gpu(self, region: GpuRegion) -> None:
        """Register GPU memory with the hardware. Raises GpuMemoryUnsupported."""
        raise GpuMemoryUnsupported(f"{self.name} moves host memory only")

    def deregister(self, region: AnyRegion) -> None:  # noqa: B027  (most transports keep no state of it)
        """Forget the region, whose grants are all revoked."""

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Free the transport's resources, after its last link was closed."""


class Acceptor(ABC):
    """Accepts callers at one listening socket, which may serve several transports."""

    name: str

    @abstractmethod
    def listen(self, backlog: int) -> socket.socket:
        """Bind and listen. Raises AddressInUse or BindFailed."""

    def check(self, sock: socket.socket) -> None:  # noqa: B027  (tcp learns who calls from the greeting)
        """Raise PermissionError if the caller at the other end of an accepted socket may not connect at all."""

    def wrap_accepted(self, sock: socket.socket, address: str) -> BufferedLink:
        """Return the owner's link over an accepted socket; `address` names the caller. Does not block."""
        return SocketLink(sock, address)

    @abstractmethod
    def clean_up(self) -> None:
        """Remove what `listen` created in the file system."""


def parse_rows(packed: bytes, columns: int, nbytes: int) -> Rows:
    """Return int64 [n, columns] from the wire; the last column must hold lengths whose sum is `nbytes`.

    Raises ProtocolError.
    """
    if len(packed) % (8 * columns) or len(packed) > 8 * columns * MAX_PART_ROWS:
        raise ProtocolError(f"slices have {len(packed)} bytes, expected at most {MAX_PART_ROWS} rows of {8 * columns}")
    rows: Rows = np.frombuffer(packed, dtype="<i8").reshape(-1, columns)
    least, most, total = _extremes(rows[:, -1]) if len(rows) else (-1, 0, 0)
    if least < 0 or most > MAX_PART_NBYTES:
        raise ProtocolError(f"each slice must have 0 to {MAX_PART_NBYTES} bytes")
    if total != nbytes or nbytes > MAX_PART_NBYTES:
        raise ProtocolError(f"slices have {total} bytes together, but the frame announces {nbytes}")
    return rows


def _extremes(lengths: Rows) -> tuple[int, int, int]:
    """Return the minimum, the maximum and the sum; the sum is exact if the maximum is at most MAX_PART_NBYTES."""
    if len(lengths) <= FEW:
        few = lengths.tolist()
        return min(few), max(few), sum(few)
    return int(lengths.min()), int(lengths.max()), int(lengths.sum())


def write_request(part: Part, transfer: Transfer, source_id: int, rows: bytes) -> Frame:
    """Return the Write frame of a part; for `rows` and `source_id` see messenger.frames.Write."""
    key, note = transfer.key, part.notification
    numbers = part.seq, part.operation.number, key.region_id, key.token, source_id, part.nbytes
    return pack_write(numbers, rows) if note is None else pack_write(numbers, rows, True, *note)


def read_request(part: Part, transfer: Transfer, rows: bytes) -> Frame:
    """Return the Read frame of a part; for `rows` see messenger.frames.Read."""
    return pack_read(part.seq, transfer.key.region_id, transfer.key.token, part.nbytes, rows)


def notify_request(part: Part) -> Frame:
    """Return the Notify frame of a part that moves no bytes."""
    note = part.notification
    assert note is not None
    return pack_notify(part.seq, note.tag, note.payload)

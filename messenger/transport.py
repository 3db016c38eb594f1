"""The seam between what a messenger promises and how bytes move; the transports are the sub-packages tcp, shm and rdma.

A transport opens links to peers, and a door takes in theirs. On each link there is a Requester (the side that calls
write, read and notify) and a Responder (the side that owns the memory). Sessions, order, deadlines, retries, grants and
notifications are the same for every transport, and live in traffic.py, stream.py and server.py.

The frames in which a part travels, alike over every transport but for its rows and the source of its bytes.
"""

import socket
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from messenger.config import Endpoint
from messenger.errors import GpuMemoryUnsupported, ProtocolError
from messenger.frames import (
    MAX_PART_NBYTES,
    MAX_PART_ROWS,
    Ack,
    Allow,
    Ask,
    Frame,
    Message,
    Offer,
    Read,
    Write,
    pack_notify,
    pack_read,
    pack_write,
)
from messenger.grants import Access
from messenger.link import BufferedLink, Link
from messenger.memory import AnyRegion, GpuRegion, RemoteKey
from messenger.operation import READ, Operation, Part, Transfer
from messenger.slices import FEW, Rows
from messenger.sockets import SocketLink

if TYPE_CHECKING:
    from messenger.grants import Cuttable, GrantTable
    from messenger.memory import Loan
    from messenger.native.fast_lane import FastLane


FloatSums = npt.NDArray[np.float64]


class Sent(Enum):
    """How far a part has come."""

    WHOLE = "whole"
    """On the wire, to be answered."""
    PARTLY = "partly"
    """Some of it, perhaps nothing: `finish` does the rest."""
    DONE = "done"
    """Over, without a request: no answer comes."""
    UNABLE = "unable"
    """The transport cannot reach the part's local memory: nothing was sent."""


# As of messenger.operation.Kind.
WHOLE, PARTLY, DONE, UNABLE = Sent.WHOLE, Sent.PARTLY, Sent.DONE, Sent.UNABLE


class NoPath(ConnectionError):
    """The peer answers, and cannot be reached by this transport's own means: another transport may."""


class Requester(ABC):
    """The calling side of one link. One thread at a time sends, and one receives; neither is always the same."""

    takes_early_answers = False
    """Whether an answer may be accepted before the sending of its part, unless it reads, has returned."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._begun: Part | None = None

    def send(self, part: Part) -> Sent:
        """Put the part on the wire; blocks while the link is full. Raises OSError when the link ended."""
        if part.transfer is None:
            self._link.send(notify_request(part))
        elif part.operation.kind is READ:
            self._send_read(part, part.transfer)
        else:
            self._send_write(part, part.transfer)
        return WHOLE

    def begin(self, part: Part) -> Sent:
        """As `send`, but never blocks: as far as it goes. After PARTLY `finish` comes before anything else is sent.

        On a caller's thread; a transport that can do nothing there does all of it in `finish`.
        """
        self._begun = part
        return PARTLY

    def finish(self) -> Sent:
        """Send the rest of what `begin` began; blocks. Raises OSError when the link ended."""
        part, self._begun = self._begun, None
        assert part is not None
        return self.send(part)

    def may_copy(self, transfer: Transfer) -> bool:
        """Whether the read is likely to be one that `copied` can do. Any thread."""
        return False

    def copied(self, transfer: Transfer) -> bool:
        """Do a read without a request, on this thread, while others send and receive.

        False where it cannot be done so; its local slices then hold anything.
        """
        return False

    def lend(self, key: RemoteKey, offset: int, nbytes: int) -> "Loan | None":
        """The bytes of the owner's region in place; None where that cannot be, or cannot be yet."""
        return None

    def always_answers(self, operation: Operation) -> bool:
        """Whether no part of the operation can be DONE without an answer."""
        return True

    def receive(self, reads: bool) -> Message:
        """The link's next message; `reads`: whether the part that is answered next does, as far as it is known."""
        return self._link.receive()

    def receive_here(self) -> Message | None:
        """The next message if it is here already, as far as that can be told."""
        return self._link.receive_here()

    @abstractmethod
    def accept(self, part: Part, ack: Ack) -> bool:
        """Take what follows the part's Ack. False: the part is to be sent once more, as its next step."""

    @abstractmethod
    def refused(self, part: Part) -> None:
        """The owner refused the part."""

    def offered(self, offer: Offer) -> None:
        """The owner offered memory."""
        raise ProtocolError(f"{self._link.address} offered memory on a transport that shares none")

    def allowed(self, allow: Allow) -> None:
        """The owner told what a key allows."""
        raise ProtocolError(f"{self._link.address} tells what was not asked")

    @abstractmethod
    def _send_write(self, part: Part, transfer: Transfer) -> None: ...

    @abstractmethod
    def _send_read(self, part: Part, transfer: Transfer) -> None: ...


class Responder(ABC):
    """The owning side of one link; every method runs on the connection's thread."""

    reaches_gpus = False
    """Whether bytes move without this process touching the memory."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def fast_lane(
        self, grants: "GrantTable", mover: "Cuttable", landed: FloatSums, served: FloatSums
    ) -> "FastLane | None":
        """A compiled loop that takes the plain requests, where the transport has one; `mover` ends it when cut.

        It adds to `landed` and `served`, sums of the connection's flows.
        """
        return None

    @abstractmethod
    def target_rows(self, message: Write) -> Rows:
        """The checked rows int64 [n, 2] (offset, nbytes) of the owner's region. Raises ProtocolError."""

    @abstractmethod
    def land(self, message: Write, rows: Rows, region: AnyRegion) -> None:
        """Put the bytes in place; `rows` are those of `target_rows`. Raises OSError when the link ended first."""

    @abstractmethod
    def skip(self, message: Write) -> None:
        """Pass over the bytes of a write that is refused or was done before."""

    def source_rows(self, message: Read) -> Rows:
        """The checked rows int64 [n, 2] (offset, nbytes) of the owner's region. Raises ProtocolError."""
        return parse_rows(message.rows, 2, message.nbytes)

    @abstractmethod
    def serve(self, message: Read, rows: Rows, region: AnyRegion) -> None:
        """Answer a read that is allowed, the Ack included."""

    def offered(self, offer: Offer) -> None:
        """The caller offered memory."""
        raise ProtocolError(f"{self._link.address} offered memory on a transport that shares none")

    def asked(self, ask: Ask, access: Access, last_seq: int) -> None:
        """Open what the key allows to the caller's hardware, and tell; `last_seq` is the session's."""
        raise ProtocolError(f"{self._link.address} asks for access on a transport that gives none")

    def denied(self, ask: Ask, last_seq: int) -> None:
        """Tell that the key is void."""
        raise ProtocolError(f"{self._link.address} asks for access on a transport that gives none")


class Transport(ABC):
    """`name` stands in results, errors and counters."""

    name: str

    @abstractmethod
    def address_of(self, endpoint: Endpoint) -> str:
        """Where the endpoint is sought, for errors and logs."""

    @abstractmethod
    def connect(self, sock: socket.socket, endpoint: Endpoint) -> None:
        """Connect under the socket's time limit; raises OSError."""

    @abstractmethod
    def new_socket(self, endpoint: Endpoint) -> socket.socket:
        """A socket of the family that reaches the endpoint."""

    def wrap(self, sock: socket.socket, address: str) -> BufferedLink:
        """The caller's link over a socket that is not connected yet; `address` names the owner."""
        return SocketLink(sock, address)

    def adopt(self, link: Link, *, caller: bool) -> Link:
        """What the greeted link becomes, on both sides: itself, unless the transport goes on by other means.

        Runs under the handshake's time limit. Raises OSError (NoPath where another transport may do better) or
        ProtocolError when it cannot; `link` is then the caller's to close. Afterwards it belongs to what is returned.
        """
        return link

    @abstractmethod
    def requester(self, link: Link) -> Requester: ...

    @abstractmethod
    def responder(self, link: Link) -> Responder: ...

    def register_gpu(self, region: GpuRegion) -> None:
        """Make GPU memory known to the hardware. Raises GpuMemoryUnsupported."""
        raise GpuMemoryUnsupported(f"{self.name} moves host memory only")

    def deregister(self, region: AnyRegion) -> None:  # noqa: B027  (most transports keep nothing of it)
        """Forget the region, of which every grant is revoked."""

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Free what the transport holds once no link of it is left."""


class Door(ABC):
    """Where callers knock: one listening socket, which may serve several transports."""

    name: str

    @abstractmethod
    def listen(self, backlog: int) -> socket.socket:
        """Bind and listen. Raises AddressInUse or BindFailed."""

    def welcome(self, sock: socket.socket, address: str) -> BufferedLink:
        """The owner's link over an accepted socket; `address` names the caller. Does not block."""
        return SocketLink(sock, address)

    @abstractmethod
    def unlisten(self) -> None:
        """Remove what `listen` left in the file system."""


def parse_rows(packed: bytes, columns: int, nbytes: int) -> Rows:
    """int64 [n, columns] from the wire, the last column being lengths that add up to `nbytes`. Raises ProtocolError."""
    if len(packed) % (8 * columns) or len(packed) > 8 * columns * MAX_PART_ROWS:
        raise ProtocolError(f"{len(packed)} bytes are no list of at most {MAX_PART_ROWS} slices")
    rows: Rows = np.frombuffer(packed, dtype="<i8").reshape(-1, columns)
    least, most, total = _extremes(rows[:, -1]) if len(rows) else (-1, 0, 0)
    if least < 0 or most > MAX_PART_NBYTES:
        raise ProtocolError(f"slices must be of 0 to {MAX_PART_NBYTES} bytes")
    if total != nbytes or nbytes > MAX_PART_NBYTES:
        raise ProtocolError(f"slices of {total} bytes where the frame announces {nbytes}")
    return rows


def _extremes(lengths: Rows) -> tuple[int, int, int]:
    """The least, the greatest, and the sum, which is right if the greatest is small enough."""
    if len(lengths) <= FEW:
        few = lengths.tolist()
        return min(few), max(few), sum(few)
    return int(lengths.min()), int(lengths.max()), int(lengths.sum())


def write_request(part: Part, transfer: Transfer, source_id: int, rows: bytes) -> Frame:
    """`rows` and `source_id` as the transport packs them (messenger.frames)."""
    key, note = transfer.key, part.notification
    tag, payload = (b"", b"") if note is None else note
    has_note, number = note is not None, part.operation.number
    return pack_write(part.seq, number, key.region_id, key.token, source_id, part.nbytes, rows, has_note, tag, payload)


def read_request(part: Part, transfer: Transfer, rows: bytes) -> Frame:
    """`rows` as the transport packs them (messenger.frames)."""
    return pack_read(part.seq, transfer.key.region_id, transfer.key.token, part.nbytes, rows)


def notify_request(part: Part) -> Frame:
    """Of a part that moves no bytes."""
    note = part.notification
    assert note is not None
    return pack_notify(part.seq, note.tag, note.payload)

"""The shm transport: peers of one host map each other's regions, read-only, and every process writes its own memory.

A region's descriptor crosses the unix socket once per connection. Then a write is a short frame, and the owner copies
out of the caller's region into its own; a read asks the owner's leave (which brings the mapping the first time), copies
out of the owner's region, and asks again: leave given after the copy means that the key was good all along, and the
first answer is kept, so that later reads under the key ask only once.

Thus nothing but the owner ever changes its memory: a writer that is stopped or killed in the middle holds up no revoke,
a revoke need not wait for readers (they learn that what they copied is void), and a caller whose deadline passed reads
nothing into its memory later. What a mapping can outlive is the peer: bytes read after that are not confirmed.
"""

import contextlib
import hashlib
import os
import socket
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from messenger import unix_path
from messenger.config import Endpoint
from messenger.errors import BindFailed, ProtocolError
from messenger.frames import Ack, Offer, Read, Write
from messenger.link import Link
from messenger.memory import PeerMemory, Region
from messenger.operation import Kind, Part, Transfer
from messenger.slices import LOCAL, NBYTES, REMOTE, Rows, within
from messenger.transport import QUICK_NBYTES, QUICK_ROWS, Requester, Responder, Transport, parse_rows

if TYPE_CHECKING:
    from messenger.copying import CopyRows

MAX_CONSENTS = 4096


class _Offers:
    """Regions whose descriptor one side of a link has sent already."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent: set[int] = set()

    def make(self, region: Region) -> None:
        """Send the region's descriptor unless the other side has it."""
        if region.region_id not in self._sent:
            self._link.send(Offer(region.region_id, region.nbytes), fd=region.memory.fd)
            self._sent.add(region.region_id)


class ShmRequester(Requester):
    def __init__(self, link: Link, copy_rows: "CopyRows") -> None:
        super().__init__(link)
        self._copy_rows = copy_rows
        self._offers = _Offers(link)
        self._mappings: dict[int, PeerMemory] = {}
        self._consents: OrderedDict[tuple[int, int], None] = OrderedDict()

    def offered(self, offer: Offer) -> None:
        self._mappings[offer.region_id] = PeerMemory(self._link.take_fd(), offer.nbytes)

    def is_quick(self, part: Part) -> bool:
        copied_nbytes = part.nbytes if part.operation.kind is Kind.READ else 0
        return copied_nbytes <= QUICK_NBYTES and (part.transfer is None or len(part.transfer.rows) <= QUICK_ROWS)

    def accept(self, part: Part, ack: Ack) -> bool:
        transfer = part.transfer
        if transfer is None or part.operation.kind is not Kind.READ:
            return True
        self._consents[_consent(transfer)] = None
        if len(self._consents) > MAX_CONSENTS:
            self._consents.popitem(last=False)
        return part.copied

    def refused(self, part: Part) -> None:
        if part.transfer is not None:
            self._consents.pop(_consent(part.transfer), None)

    def _send_write(self, part: Part, transfer: Transfer) -> None:
        self._offers.make(transfer.region)
        note = part.notification
        message = Write(
            seq=part.seq,
            operation=part.operation.number,
            region_id=transfer.key.region_id,
            token=transfer.key.token,
            source_id=transfer.region.region_id,
            nbytes=transfer.nbytes,
            rows=transfer.rows.tobytes(),
            notify=note is not None,
            tag=note.tag if note else b"",
            payload=note.payload if note else b"",
        )
        self._link.send(message)

    def _send_read(self, part: Part, transfer: Transfer) -> None:
        mapping = self._mappings.get(transfer.key.region_id)
        rows = transfer.rows
        if mapping is not None and _consent(transfer) in self._consents and _inside(rows, mapping):
            self._copy_rows(transfer.region.address, mapping.address, rows, LOCAL, REMOTE)
            part.copied = True
        asked = rows[:, REMOTE:].tobytes()
        self._link.send(Read(part.seq, transfer.key.region_id, transfer.key.token, transfer.nbytes, asked))


class ShmResponder(Responder):
    def __init__(self, link: Link, copy_rows: "CopyRows") -> None:
        super().__init__(link)
        self._copy_rows = copy_rows
        self._offers = _Offers(link)
        self._mappings: dict[int, PeerMemory] = {}

    def offered(self, offer: Offer) -> None:
        self._mappings[offer.region_id] = PeerMemory(self._link.take_fd(), offer.nbytes)

    def target_rows(self, message: Write) -> Rows:
        rows = parse_rows(message.rows, 3, message.nbytes)
        source = self._mappings.get(message.source_id)
        if source is None:
            raise ProtocolError(f"a write from region {message.source_id}, which was never offered")
        if not within(rows[:, 0], rows[:, NBYTES], 0, source.nbytes):
            raise ProtocolError(f"a write from beyond the {source.nbytes} bytes of region {message.source_id}")
        return rows[:, REMOTE:]

    def land(self, message: Write, rows: Rows, region: Region) -> None:
        both = np.frombuffer(message.rows, dtype=np.int64).reshape(-1, 3)
        self._copy_rows(region.address, self._mappings[message.source_id].address, both, REMOTE, LOCAL)

    def skip(self, message: Write) -> None:
        """The frame carries no bytes."""

    def serve(self, message: Read, rows: Rows, region: Region) -> None:
        self._offers.make(region)
        self._link.send(Ack(message.seq, message.nbytes))


class ShmTransport(Transport):
    """`path` is the unix socket's. It is a node's own, so a successor takes its place, and a double is found out."""

    name = "shm"

    def __init__(self, run_dir: Path | None, node_id: str) -> None:
        self._own_dir = Path(tempfile.mkdtemp(prefix="moonpool-")) if run_dir is None else None
        self.path = (
            run_dir or self._own_dir or Path()
        ) / f"m-{hashlib.blake2b(node_id.encode(), digest_size=8).hexdigest()}.sock"
        self._identity: tuple[int, int] | None = None

    def listen(self, backlog: int) -> socket.socket:
        # Numba takes long to import: a process without shm does not wait for it.
        from messenger.copying import copy_rows

        self._copy_rows = copy_rows()
        unix_path.claim(self.path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(os.fspath(self.path))
            os.chmod(self.path, 0o600)
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            raise BindFailed(f"cannot listen at {self.path}: {error}") from error
        self._identity = unix_path.identity(self.path)
        return listener

    def unlisten(self) -> None:
        if unix_path.identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        if self._own_dir is not None:
            with contextlib.suppress(FileNotFoundError):  # whatever tidies temporary folders was there first
                self._own_dir.rmdir()

    def address_of(self, endpoint: Endpoint) -> str:
        return endpoint.shm_socket

    def new_socket(self, endpoint: Endpoint) -> socket.socket:
        return socket.socket(socket.AF_UNIX)

    def connect(self, sock: socket.socket, endpoint: Endpoint) -> None:
        sock.connect(endpoint.shm_socket)

    def requester(self, link: Link) -> Requester:
        return ShmRequester(link, self._copy_rows)

    def responder(self, link: Link) -> Responder:
        return ShmResponder(link, self._copy_rows)


def _consent(transfer: Transfer) -> tuple[int, int]:
    return transfer.key.region_id, transfer.key.token


def _inside(rows: Rows, mapping: PeerMemory) -> bool:
    return within(rows[:, REMOTE], rows[:, NBYTES], 0, mapping.nbytes)

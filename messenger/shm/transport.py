"""Regions that one side of a link shows to the other: offered with their descriptor, withdrawn when they are gone.

An offer without bytes, which brings no descriptor, withdraws what was offered under its number. It goes before the next
frame that may need an offer, so what is gone stays mapped on the other side for no longer than until then.

The caller's side of shm: copies what it reads out of the owner's memory itself, and asks where it has to.

A key that the owner shows on its grant page is read under without a request: shown after the copy, it was good all
along. For any other key the owner is asked, which brings the mapping, the bytes are copied, and it is asked again.

The owner's side of shm: copies what a caller writes out of the caller's memory into its own.

The shm transport: peers of one host map each other's regions, read-only, and every process writes its own memory.

A region's descriptor crosses the unix socket once per connection. Then a write is a short frame, and the owner copies
out of the caller's region into its own; a read asks the owner's leave (which brings the mapping the first time), copies
out of the owner's region, and asks again: leave given after the copy means that the key was good all along, and the
first answer is kept, so that later reads under the key ask only once.

Thus nothing but the owner ever changes its memory: a writer that is stopped or killed in the middle holds up no revoke,
a revoke need not wait for readers (they learn that what they copied is void), and a caller whose deadline passed reads
nothing into its memory later. What a mapping can outlive is the peer: bytes read after that are not confirmed.
"""

import contextlib
import functools
import hashlib
import os
import socket
import tempfile
import weakref
from collections import OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from messenger.config import Endpoint
from messenger.counters import FloatSums
from messenger.errors import ProtocolError
from messenger.frames import Ack, Frame, Offer, Read, Write
from messenger.grants import GrantTable
from messenger.link import Cuttable, Link
from messenger.memory import AnyRegion, Loan, PeerMemory, Region, RemoteKey, require_host_region
from messenger.operation import READ, Operation, Part, Transfer
from messenger.shm.grant_page import PAGE_ID, PAGE_NBYTES, GrantPage, GrantReader, fingerprint
from messenger.slices import LOCAL, NBYTES, REMOTE, Rows, within
from messenger.sockets import SocketLink
from messenger.transport import (
    DONE,
    PARTLY,
    WHOLE,
    Acceptor,
    Requester,
    Responder,
    SendStatus,
    Transport,
    notify_request,
    parse_rows,
    read_request,
    write_request,
)
from rpc import unix_socket
from rpc.errors import BindFailed

if TYPE_CHECKING:
    from messenger.native.responder_loop import CompiledLoop
    from messenger.shm.kernels import CopyRows


MAX_OFFERED = 1024
"""Regions that stay offered on a link; the oldest are withdrawn for others, and offered again when they are used."""
_MAX_NUMBER = (1 << 63) - 1


class Offers:
    """What this side has offered. One thread at a time."""

    def __init__(self, link: SocketLink) -> None:
        self._link = link
        self._made: dict[int, weakref.ref[AnyRegion]] = {}
        self._gone: deque[int] = deque()  # filled by whichever thread lets go of a region

    def made(self, region: AnyRegion) -> bool:
        """Whether the other side has the region's descriptor, and nothing is to be withdrawn."""
        return region.region_id in self._made and not self._gone

    def make(self, region: AnyRegion) -> None:
        """Offer the region unless it is; withdraw what is gone. Raises NotInHostMemory, or OSError when cut."""
        while self._gone:
            self._withdraw(self._gone.popleft())
        number = region.region_id
        if number in self._made:
            return
        memory = require_host_region(region).memory
        if memory.closed:
            raise OSError(f"the memory of region {number} was closed before it was offered to {self._link.address}")
        if len(self._made) >= MAX_OFFERED:
            self._withdraw(next(iter(self._made)))
        self._link.send(Offer(number, region.nbytes), fd=memory.fd)
        # Whatever may still use a region refers to it: once nothing does, nobody will need the offer.
        self._made[number] = weakref.ref(region, functools.partial(_note, self._gone, number))

    def _withdraw(self, number: int) -> None:
        if self._made.pop(number, None) is not None:
            self._link.send(Offer(number, 0))


def _note(gone: deque[int], number: int, _region: object) -> None:
    gone.append(number)


class PeerMemories:
    """What the other side has offered, mapped. Written by the thread that receives, read by any.

    A memory stays mapped for as long as somebody refers to it, or to an array over it.
    """

    def __init__(self, link: SocketLink) -> None:
        self._link = link
        self._mapped: dict[int, PeerMemory] = {}

    def take(self, offer: Offer) -> None:
        """Map what is offered, or let go of what is withdrawn. Raises ProtocolError for what cannot be mapped."""
        number = offer.region_id
        if not offer.nbytes:
            self._mapped.pop(number, None)
            return
        memory = PeerMemory(self._link.take_fd(), offer.nbytes)
        if not 0 < number <= _MAX_NUMBER:
            raise ProtocolError(f"{self._link.address} offers region {number}, which is no number of a region")
        if number in self._mapped or len(self._mapped) >= MAX_OFFERED:
            raise ProtocolError(
                f"{self._link.address} offers region {number} twice, or more than {MAX_OFFERED} regions"
            )
        self._mapped[number] = memory

    def get(self, number: int) -> PeerMemory | None:
        """The region of this number, unless it is not offered, or not any more."""
        return self._mapped.get(number)

    def items(self) -> list[tuple[int, PeerMemory]]:
        return list(self._mapped.items())


MAX_CONSENTS = 4096
_MAX_PRINTS = 4096


class ShmRequester(Requester):
    _link: SocketLink
    takes_early_answers = True

    def __init__(self, link: SocketLink, copy_rows: "CopyRows") -> None:
        super().__init__(link)
        self._copy_rows = copy_rows
        self._offers = Offers(link)
        self._mappings = PeerMemories(link)
        self._page: GrantReader | None = None
        self._consents: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._prints: dict[int, tuple[RemoteKey, int]] = {}
        self._fd = link.fileno()

    def offered(self, offer: Offer) -> None:
        if offer.region_id == PAGE_ID:
            self._page = GrantReader(PeerMemory(self._link.take_fd(), offer.nbytes))
        else:
            self._mappings.take(offer)

    def begin(self, part: Part) -> SendStatus:
        transfer = part.transfer
        frame: Frame
        if transfer is None:
            frame = notify_request(part)
        elif part.operation.kind is not READ:
            if not self._offers.made(transfer.region):
                return super().begin(part)
            frame = _write(part, transfer)
        elif self._source(transfer) is not None:
            return super().begin(part)  # copies, and a second request, are the sending thread's
        else:
            frame = _read(part, transfer)
        return WHOLE if self._link.begin(frame) else PARTLY

    def finish(self) -> SendStatus:
        if self._begun is not None:
            return super().finish()
        self._link.finish()
        return WHOLE

    def send(self, part: Part) -> SendStatus:
        transfer = part.transfer
        if transfer is not None and part.operation.kind is READ and self.try_copy(transfer):
            return DONE
        return super().send(part)

    def may_copy(self, transfer: Transfer) -> bool:
        page = self._page
        if page is None or not isinstance(transfer.region, Region):
            return False
        return page.holds(self._print_of(transfer.key)) and self._source(transfer) is not None

    def try_copy(self, transfer: Transfer) -> bool:
        key, region, slices = transfer
        page, one = self._page, slices.only
        if page is None or not isinstance(region, Region):
            return False
        if one is None:
            source = self._source(transfer)
            return source is not None and self._copied_under_page(transfer, source)
        source = self._mappings.get(key.region_id)
        if source is None:
            return False
        local, remote, nbytes = one
        if not key.offset <= remote <= min(key.offset + key.nbytes, source.nbytes) - nbytes:
            return False
        at, to = source.address + remote, region.address + local
        return page.copy_one(self._print_of(key), self._fd, to, at, nbytes) and self._is_open()

    def lend(self, key: RemoteKey, offset: int, nbytes: int) -> Loan | None:
        mapping, page, print_ = self._mappings.get(key.region_id), self._page, self._print_of(key)
        if mapping is None or page is None or offset + nbytes > mapping.nbytes:
            return None

        def is_good() -> bool:
            return page.holds(print_) and not self._link.peer_is_gone()

        return Loan(mapping.array[offset : offset + nbytes], is_good) if is_good() else None

    def always_answers(self, operation: Operation) -> bool:
        return operation.kind is not READ

    def accept(self, part: Part, ack: Ack) -> bool:
        transfer = part.transfer
        if transfer is None or part.operation.kind is not READ or part.copied:
            return True
        source = self._source(transfer)
        if source is None:
            raise ProtocolError(f"{self._link.address} allows to read memory that it has not offered")
        if self._copied_under_page(transfer, source):
            return True
        self._consents[_consent(transfer.key)] = None
        if len(self._consents) > MAX_CONSENTS:
            self._consents.popitem(last=False)
        return False

    def refused(self, part: Part) -> None:
        if part.transfer is not None:
            self._consents.pop(_consent(part.transfer.key), None)

    def _source(self, transfer: Transfer) -> PeerMemory | None:
        """The region, if it is mapped, and the slices lie within the key's window. Whoever copies holds on to it."""
        mapping = self._mappings.get(transfer.key.region_id)
        if mapping is None:
            return None
        key, rows = transfer.key, transfer.slices.rows
        end = min(key.offset + key.nbytes, mapping.nbytes)
        return mapping if within(rows[:, REMOTE], rows[:, NBYTES], key.offset, end) else None

    def _copied_under_page(self, transfer: Transfer, source: PeerMemory) -> bool:
        """Copy; whether the owner showed the key before and after, and lived."""
        page, key, address = self._page, transfer.key, require_host_region(transfer.region).address
        if page is None:
            return False
        rows = transfer.slices.rows
        return (
            page.copy(self._print_of(key), self._fd, address, source.address, rows, LOCAL, REMOTE) and self._is_open()
        )

    def _is_open(self) -> bool:
        """Whether the descriptor that was looked at just now was the link's: once closed, it may be anybody's."""
        return self._link.fileno() == self._fd

    def _print_of(self, key: RemoteKey) -> int:
        known = self._prints.get(key.token)
        if known is not None and known[0] is key:
            return known[1]
        if len(self._prints) >= _MAX_PRINTS:
            self._prints.clear()
        print_ = fingerprint(key)
        self._prints[key.token] = key, print_
        return print_

    def _send_write(self, part: Part, transfer: Transfer) -> None:
        self._offers.make(transfer.region)
        self._link.send(_write(part, transfer))

    def _send_read(self, part: Part, transfer: Transfer) -> None:
        key = transfer.key
        source = self._source(transfer) if _consent(key) in self._consents else None
        if source is not None:
            self._copy_rows(
                require_host_region(transfer.region).address, source.address, transfer.slices.rows, LOCAL, REMOTE
            )
            part.copied = True
        self._link.send(_read(part, transfer))


def _consent(key: RemoteKey) -> tuple[int, int]:
    return key.region_id, key.token


def _write(part: Part, transfer: Transfer) -> Frame:
    return write_request(part, transfer, transfer.region.region_id, transfer.slices.packed())


def _read(part: Part, transfer: Transfer) -> Frame:
    require_host_region(transfer.region)  # before the bytes are there
    return read_request(part, transfer, transfer.slices.rows[:, REMOTE:].tobytes())


class ShmResponder(Responder):
    _link: SocketLink

    def __init__(self, link: SocketLink, copy_rows: "CopyRows") -> None:
        super().__init__(link)
        self._copy_rows = copy_rows
        self._offers = Offers(link)
        self._mappings = PeerMemories(link)
        self._lane: CompiledLoop | None = None
        self._page: GrantPage | None = None

    def compiled_loop(
        self, grants: GrantTable, mover: Cuttable, landed: FloatSums, served: FloatSums
    ) -> "CompiledLoop":
        from messenger.native.responder_loop import CompiledLoop

        self._page = grants.page()
        self._lane = CompiledLoop(self._link, grants, mover, landed, served)
        return self._lane

    def offered(self, offer: Offer) -> None:
        self._mappings.take(offer)
        if self._lane is not None:
            self._lane.offered(self._mappings.items())

    def target_rows(self, message: Write) -> Rows:
        rows = parse_rows(message.rows, 3, message.nbytes)
        source = self._mappings.get(message.source_id)
        if source is None:
            raise ProtocolError(f"a write from region {message.source_id}, which was never offered")
        if not within(rows[:, 0], rows[:, NBYTES], 0, source.nbytes):
            raise ProtocolError(f"a write from beyond the {source.nbytes} bytes of region {message.source_id}")
        return rows[:, REMOTE:]

    def land(self, message: Write, rows: Rows, region: AnyRegion) -> None:
        both = np.frombuffer(message.rows, dtype=np.int64).reshape(-1, 3)
        source = self._mappings.get(message.source_id)
        assert source is not None, "target_rows found it"
        self._copy_rows(require_host_region(region).address, source.address, both, REMOTE, LOCAL)

    def skip(self, message: Write) -> None:
        """The frame carries no bytes."""

    def serve(self, message: Read, rows: Rows, region: AnyRegion) -> None:
        if self._page is not None:
            self._link.send(Offer(PAGE_ID, PAGE_NBYTES), fd=self._page.memory.fd)
            self._page = None
        self._offers.make(region)
        self._link.send(Ack(message.seq, message.nbytes))


class ShmTransport(Transport, Acceptor):
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
        from messenger.shm.kernels import copy_rows

        self._copy_rows = copy_rows()
        unix_socket.claim_socket(self.path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(os.fspath(self.path))
            os.chmod(self.path, 0o600)
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            raise BindFailed(f"cannot listen at {self.path}: {error}") from error
        self._identity = unix_socket.identity(self.path)
        return listener

    def clean_up(self) -> None:
        if unix_socket.identity(self.path) == self._identity:
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
        return ShmRequester(_of_sockets(link), self._copy_rows)

    def responder(self, link: Link) -> Responder:
        return ShmResponder(_of_sockets(link), self._copy_rows)


def _of_sockets(link: Link) -> SocketLink:
    assert isinstance(link, SocketLink)
    return link

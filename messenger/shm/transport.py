"""The shm transport: peers of one host map each other's regions read-only; every process writes only its own memory.

A region's descriptor crosses the unix socket once per connection, as an Offer. Then a write is a short frame, and the
owner copies out of the caller's region into its own. A read copies out of the owner's region into the caller's:

    key on the grant page    no request: the caller copies, and checks that the key is on the page before and after
    any other key            the caller sends a Read, whose Ack confirms the key and comes with the mapping; it copies,
                             and sends the Read again. The second Ack confirms that the key was valid during the whole
                             copy. The first is kept as a consent, so that later reads under the key send one Read.

Thus only the owner changes its memory: a writer that is stopped or killed does not delay a revoke, a revoke need not
wait for readers (they detect that their copy is void), and a caller whose deadline passed does not read into its memory
afterwards.

Threads: a Requester's sending and receiving sides belong to one thread each, copies to any thread; a Responder belongs
to its connection's thread (see `messenger.transport`).

Lifetimes: an offered region stays mapped by the other side until its offer is withdrawn. That happens before the next
frame that may need an offer, once this side has dropped the region. A mapping outlives the peer's process: bytes read
after its end are never confirmed.
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
from messenger.shm.grant_page import PAGE_ID, PAGE_NBYTES, GrantPage, GrantReader, key_fingerprint
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
"""Maximum number of regions offered on a link; the oldest are withdrawn, and offered again when they are used."""
_MAX_NUMBER = (1 << 63) - 1


class Offers:
    """Regions offered by this side. Used by one thread at a time."""

    def __init__(self, link: SocketLink) -> None:
        self._link = link
        self._made: dict[int, weakref.ref[AnyRegion]] = {}
        self._gone: deque[int] = deque()  # appended to by the thread that drops the last reference to a region

    def made(self, region: AnyRegion) -> bool:
        """Return True if the other side has the region's descriptor, and no offer must be withdrawn."""
        return region.region_id in self._made and not self._gone

    def make(self, region: AnyRegion) -> None:
        """Offer the region if it is not offered; withdraw regions that are gone.

        Raises NotInHostMemory, or OSError when cut.
        """
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
        # Every user of a region holds a reference: once none is left, the offer is not needed any more.
        self._made[number] = weakref.ref(region, functools.partial(_note, self._gone, number))

    def _withdraw(self, number: int) -> None:
        if self._made.pop(number, None) is not None:
            self._link.send(Offer(number, 0))


def _note(gone: deque[int], number: int, _region: object) -> None:
    gone.append(number)


class PeerMemories:
    """Mapped regions offered by the other side. Written by the receiving thread, read by any.

    A memory stays mapped as long as it, or an array over it, is referenced.
    """

    def __init__(self, link: SocketLink) -> None:
        self._link = link
        self._mapped: dict[int, PeerMemory] = {}

    def take(self, offer: Offer) -> None:
        """Map an offered region, or drop a withdrawn one. Raises ProtocolError if it cannot be mapped."""
        number = offer.region_id
        if not offer.nbytes:
            self._mapped.pop(number, None)
            return
        memory = PeerMemory(self._link.take_fd(), offer.nbytes)
        if not 0 < number <= _MAX_NUMBER:
            raise ProtocolError(f"{self._link.address} offers region {number}, which is not a valid number")
        if number in self._mapped or len(self._mapped) >= MAX_OFFERED:
            raise ProtocolError(
                f"{self._link.address} offers region {number} twice, or more than {MAX_OFFERED} regions"
            )
        self._mapped[number] = memory

    def get(self, number: int) -> PeerMemory | None:
        """Return the region of this number; None if it is not offered."""
        return self._mapped.get(number)

    def items(self) -> list[tuple[int, PeerMemory]]:
        """Return the offered regions by number."""
        return list(self._mapped.items())


MAX_CONSENTS = 4096
_MAX_FINGERPRINTS = 4096


class ShmRequester(Requester):
    """Caller's side of a shm link.

    `_mappings`, `_page` and `_consents` are written by the receiving thread and read by any; `_offers` belongs to the
    sending thread.
    """

    _link: SocketLink
    takes_early_answers = True

    def __init__(self, link: SocketLink, copy_rows: "CopyRows") -> None:
        super().__init__(link)
        link.polls = True
        self._copy_rows = copy_rows
        self._offers = Offers(link)
        self._mappings = PeerMemories(link)
        self._page: GrantReader | None = None
        self._consents: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._fingerprints: dict[int, tuple[RemoteKey, int]] = {}
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
            return super().begin(part)  # copies and a second request are left to the sending thread
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
        return page.holds(self._fingerprint_of(transfer.key)) and self._source(transfer) is not None

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
        return page.copy_one(self._fingerprint_of(key), self._fd, to, at, nbytes) and self._is_open()

    def lend(self, key: RemoteKey, offset: int, nbytes: int) -> Loan | None:
        mapping, page, fingerprint = self._mappings.get(key.region_id), self._page, self._fingerprint_of(key)
        if mapping is None or page is None or offset + nbytes > mapping.nbytes:
            return None

        def is_good() -> bool:
            return page.holds(fingerprint) and not self._link.peer_is_gone()

        return Loan(mapping.array[offset : offset + nbytes], is_good) if is_good() else None

    def always_answers(self, operation: Operation) -> bool:
        return operation.kind is not READ

    def accept(self, part: Part, ack: Ack) -> bool:
        transfer = part.transfer
        if transfer is None or part.operation.kind is not READ or part.copied:
            return True
        source = self._source(transfer)
        if source is None:
            raise ProtocolError(f"{self._link.address} confirmed a read of memory that it has not offered")
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
        """Return the owner's region if it is mapped and the slices lie within the key's window.

        The caller must keep the reference while it copies.
        """
        mapping = self._mappings.get(transfer.key.region_id)
        if mapping is None:
            return None
        key, rows = transfer.key, transfer.slices.rows
        end = min(key.offset + key.nbytes, mapping.nbytes)
        return mapping if within(rows[:, REMOTE], rows[:, NBYTES], key.offset, end) else None

    def _copied_under_page(self, transfer: Transfer, source: PeerMemory) -> bool:
        """Copy. Returns True if the key was on the page before and after, and the owner was alive."""
        page, key, address = self._page, transfer.key, require_host_region(transfer.region).address
        if page is None:
            return False
        rows = transfer.slices.rows
        return (
            page.copy(self._fingerprint_of(key), self._fd, address, source.address, rows, LOCAL, REMOTE)
            and self._is_open()
        )

    def _is_open(self) -> bool:
        """Return True if the descriptor just polled was the link's; a closed link's number may be reused."""
        return self._link.fileno() == self._fd

    def _fingerprint_of(self, key: RemoteKey) -> int:
        known = self._fingerprints.get(key.token)
        if known is not None and known[0] is key:
            return known[1]
        if len(self._fingerprints) >= _MAX_FINGERPRINTS:
            self._fingerprints.clear()
        fingerprint = key_fingerprint(key)
        self._fingerprints[key.token] = key, fingerprint
        return fingerprint

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
    require_host_region(transfer.region)  # raises before anything is sent
    return read_request(part, transfer, transfer.slices.rows[:, REMOTE:].tobytes())


class ShmResponder(Responder):
    """Owner's side of a shm link; used by the connection's thread alone."""

    _link: SocketLink

    def __init__(self, link: SocketLink, copy_rows: "CopyRows") -> None:
        super().__init__(link)
        self._copy_rows = copy_rows
        self._offers = Offers(link)
        self._mappings = PeerMemories(link)
        self._loop: CompiledLoop | None = None
        self._page: GrantPage | None = None

    def compiled_loop(
        self, grants: GrantTable, mover: Cuttable, landed: FloatSums, served: FloatSums
    ) -> "CompiledLoop":
        from messenger.native.responder_loop import CompiledLoop

        self._page = grants.page()
        self._loop = CompiledLoop(self._link, grants, mover, landed, served)
        return self._loop

    def offered(self, offer: Offer) -> None:
        self._mappings.take(offer)
        if self._loop is not None:
            self._loop.offered(self._mappings.items())

    def target_rows(self, message: Write) -> Rows:
        rows = parse_rows(message.rows, 3, message.nbytes)
        source = self._mappings.get(message.source_id)
        if source is None:
            raise ProtocolError(f"a write from region {message.source_id}, which is not offered")
        if not within(rows[:, 0], rows[:, NBYTES], 0, source.nbytes):
            raise ProtocolError(f"a write from beyond the {source.nbytes} bytes of region {message.source_id}")
        return rows[:, REMOTE:]

    def land(self, message: Write, rows: Rows, region: AnyRegion) -> None:
        both = np.frombuffer(message.rows, dtype=np.int64).reshape(-1, 3)
        source = self._mappings.get(message.source_id)
        assert source is not None, "target_rows found it"
        self._copy_rows(require_host_region(region).address, source.address, both, REMOTE, LOCAL)

    def skip(self, message: Write) -> None:
        """Do nothing: no bytes follow the frame."""

    def serve(self, message: Read, rows: Rows, region: AnyRegion) -> None:
        if self._page is not None:
            self._link.send(Offer(PAGE_ID, PAGE_NBYTES), fd=self._page.memory.fd)
            self._page = None
        self._offers.make(region)
        self._link.send(Ack(message.seq, message.nbytes))


class ShmTransport(Transport, Acceptor):
    """The shm transport and its acceptor.

    `path` of the unix socket is derived from the node id, so that a restarted node replaces its predecessor's socket,
    and a second node with the same id is detected.
    """

    name = "shm"

    def __init__(self, run_dir: Path | None, node_id: str) -> None:
        self._own_dir = Path(tempfile.mkdtemp(prefix="moonpool-")) if run_dir is None else None
        self.path = (
            run_dir or self._own_dir or Path()
        ) / f"m-{hashlib.blake2b(node_id.encode(), digest_size=8).hexdigest()}.sock"
        self._identity: tuple[int, int] | None = None

    def listen(self, backlog: int) -> socket.socket:
        # Imported late: numba takes long to import, and only processes with shm need it.
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
            with contextlib.suppress(FileNotFoundError):  # removed already by a cleaner of temporary folders
                self._own_dir.rmdir()

    def check(self, sock: socket.socket) -> None:
        unix_socket.require_own_user(sock)

    def address_of(self, endpoint: Endpoint) -> str:
        return endpoint.shm_socket

    def new_socket(self, endpoint: Endpoint) -> socket.socket:
        return socket.socket(socket.AF_UNIX)

    def connect(self, sock: socket.socket, endpoint: Endpoint) -> None:
        sock.connect(endpoint.shm_socket)
        unix_socket.require_own_user(sock)

    def requester(self, link: Link) -> Requester:
        return ShmRequester(_of_sockets(link), self._copy_rows)

    def responder(self, link: Link) -> Responder:
        return ShmResponder(_of_sockets(link), self._copy_rows)


def _of_sockets(link: Link) -> SocketLink:
    assert isinstance(link, SocketLink)
    return link

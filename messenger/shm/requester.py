"""The caller's side of shm: copies what it reads out of the owner's memory itself, and asks where it has to.

A key that the owner shows on its grant page is read under without a request: shown after the copy, it was good all
along. For any other key the owner is asked, which brings the mapping, the bytes are copied, and it is asked again.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

from messenger.errors import ProtocolError
from messenger.frames import Ack, Frame, Offer
from messenger.gpu import in_host
from messenger.keys import RemoteKey
from messenger.memory import PeerMemory, Region
from messenger.operation import READ, Operation, Part, Transfer
from messenger.requests import notify_request, read_request, write_request
from messenger.shm.grant_page import PAGE_ID, GrantReader, fingerprint
from messenger.shm.loan import Loan
from messenger.shm.offers import Offers, PeerMemories
from messenger.slices import LOCAL, NBYTES, REMOTE, within
from messenger.sockets import SocketLink
from messenger.transport import DONE, PARTLY, WHOLE, Requester, Sent

if TYPE_CHECKING:
    from messenger.copying import CopyRows

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

    def begin(self, part: Part) -> Sent:
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

    def finish(self) -> Sent:
        if self._begun is not None:
            return super().finish()
        self._link.finish()
        return WHOLE

    def send(self, part: Part) -> Sent:
        transfer = part.transfer
        if transfer is not None and part.operation.kind is READ and self.copied(transfer):
            return DONE
        return super().send(part)

    def may_copy(self, transfer: Transfer) -> bool:
        page = self._page
        if page is None or not isinstance(transfer.region, Region):
            return False
        return page.holds(self._print_of(transfer.key)) and self._source(transfer) is not None

    def copied(self, transfer: Transfer) -> bool:
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
        page, key, address = self._page, transfer.key, in_host(transfer.region).address
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
            self._copy_rows(in_host(transfer.region).address, source.address, transfer.slices.rows, LOCAL, REMOTE)
            part.copied = True
        self._link.send(_read(part, transfer))


def _consent(key: RemoteKey) -> tuple[int, int]:
    return key.region_id, key.token


def _write(part: Part, transfer: Transfer) -> Frame:
    return write_request(part, transfer, transfer.region.region_id, transfer.slices.packed())


def _read(part: Part, transfer: Transfer) -> Frame:
    in_host(transfer.region)  # before the bytes are there
    return read_request(part, transfer, transfer.slices.rows[:, REMOTE:].tobytes())

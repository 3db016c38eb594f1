"""The caller's side of shm: asks, and copies what it reads out of the owner's memory itself."""

from collections import OrderedDict
from typing import TYPE_CHECKING

from messenger.frames import Ack, Offer, Read, Write
from messenger.memory import PeerMemory
from messenger.operation import Kind, Part, Transfer
from messenger.shm.offers import Offers
from messenger.slices import LOCAL, NBYTES, REMOTE, Rows, within
from messenger.sockets import SocketLink
from messenger.transport import QUICK_NBYTES, QUICK_ROWS, Requester

if TYPE_CHECKING:
    from messenger.copying import CopyRows

MAX_CONSENTS = 4096


class ShmRequester(Requester):
    _link: SocketLink

    def __init__(self, link: SocketLink, copy_rows: "CopyRows") -> None:
        super().__init__(link)
        self._copy_rows = copy_rows
        self._offers = Offers(link)
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


def _consent(transfer: Transfer) -> tuple[int, int]:
    return transfer.key.region_id, transfer.key.token


def _inside(rows: Rows, mapping: PeerMemory) -> bool:
    return within(rows[:, REMOTE], rows[:, NBYTES], 0, mapping.nbytes)

"""The caller's side of tcp: payloads follow their frames, gathered from and scattered into the regions directly."""

from messenger.buffered import BufferedLink
from messenger.errors import ProtocolError
from messenger.frames import Ack, Read, Write
from messenger.operation import Kind, Part, Transfer
from messenger.slices import LOCAL, REMOTE, runs
from messenger.tcp.views import views
from messenger.transport import QUICK_NBYTES, QUICK_ROWS, Requester


class TcpRequester(Requester):
    _link: BufferedLink

    def is_quick(self, part: Part) -> bool:
        sent_nbytes = 0 if part.operation.kind is Kind.READ else part.nbytes
        return sent_nbytes <= QUICK_NBYTES and (part.transfer is None or len(part.transfer.rows) <= QUICK_ROWS)

    def accept(self, part: Part, ack: Ack) -> bool:
        if part.operation.kind is Kind.READ and part.transfer is not None:
            if ack.nbytes != part.nbytes:
                raise ProtocolError(f"{self._link.address} sends {ack.nbytes} bytes where {part.nbytes} were asked")
            self._link.receive_into(views(part.transfer.region, runs(part.transfer.rows, LOCAL)))
        return True

    def refused(self, part: Part) -> None:
        """Nothing was kept of it."""

    def _send_write(self, part: Part, transfer: Transfer) -> None:
        note = part.notification
        message = Write(
            seq=part.seq,
            operation=part.operation.number,
            region_id=transfer.key.region_id,
            token=transfer.key.token,
            source_id=0,
            nbytes=transfer.nbytes,
            rows=runs(transfer.rows, REMOTE).tobytes(),
            notify=note is not None,
            tag=note.tag if note else b"",
            payload=note.payload if note else b"",
        )
        self._link.send(message, views(transfer.region, runs(transfer.rows, LOCAL)))

    def _send_read(self, part: Part, transfer: Transfer) -> None:
        rows = runs(transfer.rows, REMOTE).tobytes()
        self._link.send(Read(part.seq, transfer.key.region_id, transfer.key.token, transfer.nbytes, rows))

"""The caller's side of tcp: payloads follow their frames, gathered from and scattered into the regions directly."""

from collections.abc import Sequence

from messenger.buffered import BufferedLink
from messenger.errors import ProtocolError
from messenger.frames import Ack, Message, Notify, Read, Write
from messenger.memory import Region
from messenger.operation import Kind, Part, Transfer
from messenger.slices import LOCAL, REMOTE, Slices
from messenger.transport import Requester, Sent


class TcpRequester(Requester):
    _link: BufferedLink

    def begin(self, part: Part) -> Sent:
        transfer, note = part.transfer, part.notification
        message: Message
        views: Sequence[memoryview] = ()
        if transfer is None:
            assert note is not None
            message = Notify(part.seq, note.tag, note.payload)
        elif part.operation.kind is Kind.READ:
            message = _read(part, transfer)
        else:
            message, views = _write(part, transfer), _views(transfer.region, transfer.slices)
        return Sent.WHOLE if self._link.begin(message, views) else Sent.PARTLY

    def finish(self) -> Sent:
        self._link.finish()
        return Sent.WHOLE

    def accept(self, part: Part, ack: Ack) -> bool:
        if part.operation.kind is Kind.READ and part.transfer is not None:
            if ack.nbytes != part.nbytes:
                raise ProtocolError(f"{self._link.address} sends {ack.nbytes} bytes where {part.nbytes} were asked")
            self._link.receive_into(_views(part.transfer.region, part.transfer.slices))
        return True

    def refused(self, part: Part) -> None:
        """Nothing was kept of it."""

    def _send_write(self, part: Part, transfer: Transfer) -> None:
        self._link.send(_write(part, transfer), _views(transfer.region, transfer.slices))

    def _send_read(self, part: Part, transfer: Transfer) -> None:
        self._link.send(_read(part, transfer))


def _write(part: Part, transfer: Transfer) -> Write:
    key, note = transfer.key, part.notification
    rows = transfer.slices.packed_runs(REMOTE)
    return Write(
        part.seq,
        part.operation.number,
        key.region_id,
        key.token,
        0,
        part.nbytes,
        rows,
        note is not None,
        b"" if note is None else note.tag,
        b"" if note is None else note.payload,
    )


def _read(part: Part, transfer: Transfer) -> Read:
    return Read(part.seq, transfer.key.region_id, transfer.key.token, part.nbytes, transfer.slices.packed_runs(REMOTE))


def _views(region: Region, slices: Slices) -> list[memoryview]:
    view = region.view
    return [view[offset : offset + nbytes] for offset, nbytes in slices.runs(LOCAL)]

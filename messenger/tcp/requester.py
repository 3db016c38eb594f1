"""The caller's side of tcp: payloads follow their frames, gathered from and scattered into the regions directly."""

from collections.abc import Sequence

from messenger.buffered import BufferedLink
from messenger.errors import ProtocolError
from messenger.frames import Ack, Frame, Message
from messenger.gpu import in_host
from messenger.operation import READ, Part, Transfer
from messenger.requests import notify_request, read_request, write_request
from messenger.slices import LOCAL, REMOTE
from messenger.transport import PARTLY, WHOLE, Requester, Sent
from messenger.views import views


class TcpRequester(Requester):
    _link: BufferedLink
    takes_early_answers = True

    def begin(self, part: Part) -> Sent:
        transfer = part.transfer
        payload: Sequence[memoryview] = ()
        if transfer is None:
            frame = notify_request(part)
        elif part.operation.kind is READ:
            frame = _read(part, transfer)
        else:
            frame, payload = _write(part, transfer)
        return WHOLE if self._link.begin(frame, payload) else PARTLY

    def finish(self) -> Sent:
        self._link.finish()
        return WHOLE

    def receive(self, reads: bool) -> Message:
        return self._link.receive_before_payload() if reads else self._link.receive()

    def accept(self, part: Part, ack: Ack) -> bool:
        if part.operation.kind is READ and part.transfer is not None:
            if ack.nbytes != part.nbytes:
                raise ProtocolError(f"{self._link.address} sends {ack.nbytes} bytes where {part.nbytes} were asked")
            slices = part.transfer.slices
            self._link.receive_rows(in_host(part.transfer.region), slices.packed_runs(LOCAL), slices.nbytes)
        return True

    def refused(self, part: Part) -> None:
        """Nothing was kept of it."""

    def _send_write(self, part: Part, transfer: Transfer) -> None:
        self._link.send(*_write(part, transfer))

    def _send_read(self, part: Part, transfer: Transfer) -> None:
        self._link.send(_read(part, transfer))


def _write(part: Part, transfer: Transfer) -> tuple[Frame, Sequence[memoryview]]:
    """The frame and the payload that follows it."""
    slices = transfer.slices
    return write_request(part, transfer, 0, slices.packed_runs(REMOTE)), views(transfer.region, slices.runs(LOCAL))


def _read(part: Part, transfer: Transfer) -> Frame:
    in_host(transfer.region)  # before the bytes come
    return read_request(part, transfer, transfer.slices.packed_runs(REMOTE))

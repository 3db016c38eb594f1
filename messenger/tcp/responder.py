"""The owner's side of tcp: bytes are received straight into the registered regions, and sent straight from them."""

from messenger.buffered import BufferedLink
from messenger.frames import Ack, Read, Write
from messenger.memory import Region
from messenger.slices import Rows
from messenger.tcp.views import views
from messenger.transport import Responder, parse_rows


class TcpResponder(Responder):
    _link: BufferedLink

    def target_rows(self, message: Write) -> Rows:
        return parse_rows(message.rows, 2, message.nbytes)

    def land(self, message: Write, rows: Rows, region: Region) -> None:
        self._link.receive_into(views(region, rows))

    def skip(self, message: Write) -> None:
        self._link.drain(message.nbytes)

    def serve(self, message: Read, rows: Rows, region: Region) -> None:
        self._link.send(Ack(message.seq, message.nbytes), views(region, rows))

"""The owner's side of tcp: bytes are received straight into the registered regions, and sent straight from them."""

from typing import TYPE_CHECKING

from messenger.buffered import BufferedLink
from messenger.frames import Ack, Read, Write
from messenger.gpu import AnyRegion
from messenger.slices import Rows
from messenger.sockets import SocketLink
from messenger.transport import FloatSums, Responder, parse_rows
from messenger.views import views

if TYPE_CHECKING:
    from messenger.grants import Cuttable, GrantTable
    from messenger.native.fast_lane import FastLane


class TcpResponder(Responder):
    _link: BufferedLink

    def fast_lane(
        self, grants: "GrantTable", mover: "Cuttable", landed: FloatSums, served: FloatSums
    ) -> "FastLane | None":
        if not isinstance(self._link, SocketLink):
            return None  # its bytes come encrypted, which is Python's business
        from messenger.native.fast_lane import FastLane

        return FastLane(self._link, grants, mover, landed, served)

    def target_rows(self, message: Write) -> Rows:
        return parse_rows(message.rows, 2, message.nbytes)

    def land(self, message: Write, rows: Rows, region: AnyRegion) -> None:
        self._link.receive_into(views(region, rows.tolist()))

    def skip(self, message: Write) -> None:
        self._link.drain(message.nbytes)

    def serve(self, message: Read, rows: Rows, region: AnyRegion) -> None:
        self._link.send(Ack(message.seq, message.nbytes), views(region, rows.tolist()))

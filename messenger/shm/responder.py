"""The owner's side of shm: copies what a caller writes out of the caller's memory into its own."""

from typing import TYPE_CHECKING

import numpy as np

from messenger.errors import ProtocolError
from messenger.frames import Ack, Offer, Read, Write
from messenger.gpu import AnyRegion, in_host
from messenger.shm.grant_page import PAGE_ID, PAGE_NBYTES, GrantPage
from messenger.shm.offers import Offers, PeerMemories
from messenger.slices import LOCAL, NBYTES, REMOTE, Rows, within
from messenger.sockets import SocketLink
from messenger.transport import FloatSums, Responder, parse_rows

if TYPE_CHECKING:
    from messenger.copying import CopyRows
    from messenger.grants import Cuttable, GrantTable
    from messenger.native.fast_lane import FastLane


class ShmResponder(Responder):
    _link: SocketLink

    def __init__(self, link: SocketLink, copy_rows: "CopyRows") -> None:
        super().__init__(link)
        self._copy_rows = copy_rows
        self._offers = Offers(link)
        self._mappings = PeerMemories(link)
        self._lane: FastLane | None = None
        self._page: GrantPage | None = None

    def fast_lane(self, grants: "GrantTable", mover: "Cuttable", landed: FloatSums, served: FloatSums) -> "FastLane":
        from messenger.native.fast_lane import FastLane

        self._page = grants.page()
        self._lane = FastLane(self._link, grants, mover, landed, served)
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
        self._copy_rows(in_host(region).address, source.address, both, REMOTE, LOCAL)

    def skip(self, message: Write) -> None:
        """The frame carries no bytes."""

    def serve(self, message: Read, rows: Rows, region: AnyRegion) -> None:
        if self._page is not None:
            self._link.send(Offer(PAGE_ID, PAGE_NBYTES), fd=self._page.memory.fd)
            self._page = None
        self._offers.make(region)
        self._link.send(Ack(message.seq, message.nbytes))

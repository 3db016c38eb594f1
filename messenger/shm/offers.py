"""Regions that one side of a link shows to the other: offered with their descriptor, withdrawn when they are gone.

An offer without bytes, which brings no descriptor, withdraws what was offered under its number. It goes before the next
frame that may need an offer, so what is gone stays mapped on the other side for no longer than until then.
"""

import functools
import weakref
from collections import deque

from messenger.errors import ProtocolError
from messenger.frames import Offer
from messenger.gpu import AnyRegion, in_host
from messenger.memory import PeerMemory
from messenger.sockets import SocketLink

__all__ = ["MAX_OFFERED", "Offers", "PeerMemories"]

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
        memory = in_host(region).memory
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

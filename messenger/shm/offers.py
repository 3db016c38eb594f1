"""Descriptors of regions, each sent once over a link."""

from messenger.frames import Offer
from messenger.gpu import AnyRegion, in_host
from messenger.sockets import SocketLink


class Offers:
    """Regions whose descriptor one side of a link has sent already."""

    def __init__(self, link: SocketLink) -> None:
        self._link = link
        self._sent: set[int] = set()

    def made(self, region: AnyRegion) -> bool:
        """Whether the other side has the region's descriptor."""
        return region.region_id in self._sent

    def make(self, region: AnyRegion) -> None:
        """Send the region's descriptor unless the other side has it. Raises NotInHostMemory."""
        if region.region_id not in self._sent:
            self._link.send(Offer(region.region_id, region.nbytes), fd=in_host(region).memory.fd)
            self._sent.add(region.region_id)

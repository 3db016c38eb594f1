"""Frame memory of one connection: the inbox, into which the peer writes, and the outbox, from which frames are sent."""

import mmap

import numpy as np

from messenger.rdma.inbox import PLACE_NBYTES

SHARE = 16
"""Most fragments in flight in each direction of a connection."""


class FrameMemory:
    """SHARE slots for incoming fragments, and as many for outgoing ones."""

    def __init__(self) -> None:
        self.nbytes = 2 * SHARE * PLACE_NBYTES
        # A shared mapping, so that a fork does not replace the pages that the device uses.
        self._array = np.frombuffer(mmap.mmap(-1, self.nbytes), dtype=np.uint8)
        self._view = memoryview(self._array)  # type: ignore[arg-type]
        self.address = int(self._array.ctypes.data)
        places = range(0, self.nbytes, PLACE_NBYTES)
        self._places = [(self._view[place : place + PLACE_NBYTES], self.address + place) for place in places]

    def inbox_place(self, number: int) -> memoryview:
        """Return the slot of the peer's fragment `number`."""
        return self._places[number % SHARE][0]

    def outbox_place(self, number: int) -> tuple[memoryview, int]:
        """Return (slot of this side's fragment `number`, its address)."""
        return self._places[SHARE + number % SHARE]

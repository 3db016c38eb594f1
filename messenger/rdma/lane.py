"""One rail of one connection, this side's end: queue pair, completion queue, and where frames are registered."""

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from messenger.rdma.memory import SHARE, FrameMemory
from messenger.rdma.policy.facts import Rail
from messenger.rdma.verbs import abi
from messenger.rdma.verbs.completions import CompletionQueue
from messenger.rdma.verbs.device import Device
from messenger.rdma.verbs.queue_pair import DEPTH, Far, QueuePair

_DRAIN_S = 2.0
_FRAME_ACCESS = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_WRITE


class Lane:
    """`far_rail`, `mtu` and `far_rkey`, the key of the peer's inbox, are known once it is connected."""

    far_rail: Rail
    mtu: int

    def __init__(self, device: Device, rail: Rail, memory: FrameMemory) -> None:
        """Raises OSError when the device gives no more; then nothing is kept."""
        self.device = device
        self.rail = rail
        self.far_rkey = 0
        self.pending: deque[tuple[int, int]] = deque()
        """(number of a request, number of the instruction that it ends), in order."""
        self._connection = device.join(self)
        made: list[Any] = []
        try:
            self.queue = CompletionQueue(device, DEPTH + SHARE + 16)
            made.append(self.queue)
            self.pair = QueuePair(device, self.queue)
            made.append(self.pair)
            self._frames = device.register_memory(memory.address, memory.nbytes, _FRAME_ACCESS)
        except BaseException:
            for one in reversed(made):
                one.close()
            device.leave(self._connection)
            raise

    @property
    def end(self) -> tuple[int, int, int]:
        """What the peer must know of it: queue pair, first packet, key of the frames' memory."""
        return self.pair.near.qp_num, self.pair.near.psn, int(self._frames.rkey)

    @property
    def lkey(self) -> int:
        """Of the frames' memory."""
        return int(self._frames.lkey)

    @property
    def is_spare(self) -> bool:
        return self.rail.is_spare or self.far_rail.is_spare

    def connect(self, far_rail: Rail, far: Far, rkey: int, mtu: int) -> None:
        """Raises OSError."""
        self.pair.connect(self.rail, far_rail, far, mtu)
        self.far_rail, self.mtu, self.far_rkey = far_rail, mtu, rkey

    def close(self) -> None:
        """Once the queue pair failed and no thread uses it: give everything back. Raises OSError."""
        with self.device.naming("end to a connection"), contextlib.ExitStack() as rest:
            rest.callback(self.device.leave, self._connection)
            rest.callback(self._frames.close)
            rest.callback(self.queue.close)
            rest.callback(self.pair.close)
            self.discard()

    def discard(self) -> None:
        """Of what completed, only what must be given back."""
        while found := self.queue.poll():
            sent = [number for number, _, _ in found if number != abi.RECEIVE_ID]
            self.pair.done = max(self.pair.done, *sent, 0)
            self.device.receive_again(len(found) - len(sent))


def drain(lanes: Sequence[Lane]) -> None:
    """Wait until everything posted came back; destroying the queue pairs does the rest."""
    deadline_s = time.monotonic() + _DRAIN_S
    marks: list[tuple[Lane, int]] = []
    for lane in lanes:
        with contextlib.suppress(OSError):
            if lane.pair.connected:
                marks.append((lane, lane.pair.drain_mark() if lane.pair.room else lane.pair.posted))
    while any(lane.pair.done < mark for lane, mark in marks):
        for lane, _ in marks:
            lane.discard()
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.0005)

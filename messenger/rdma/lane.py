"""Lane: one rail of one connection, as in UCX: this side's queue pair, completion queue and frame registration.

Used with the link's lock held, except `QueuePair.ring` and `QueuePair.fail`. Lifetime: created ── `connect` ── used ──
`pair.fail` ── `drain` ── `close`; the device's share is released last.
"""

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
from messenger.rdma.verbs.queue_pair import DEPTH, QueuePair, RemoteQueuePair

_DRAIN_S = 2.0
_FRAME_ACCESS = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_WRITE


class Lane:
    """This side's end of one rail. `connect` sets `remote_rail`, `mtu` and `remote_rkey` (key of the peer's inbox)."""

    remote_rail: Rail
    mtu: int

    def __init__(self, device: Device, rail: Rail, memory: FrameMemory) -> None:
        """Create the end's resources. Raises OSError, keeping nothing, if the device has no more resources."""
        self.device = device
        self.rail = rail
        self.remote_rkey = 0
        self.pending: deque[tuple[int, int]] = deque()
        """(number of a request, number of the instruction that it completes), in order."""
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
        """Queue pair number, first packet sequence number and frame key, for the peer."""
        return self.pair.local.qp_num, self.pair.local.psn, int(self._frames.rkey)

    @property
    def lkey(self) -> int:
        """Local key of the frame memory."""
        return int(self._frames.lkey)

    @property
    def is_spare(self) -> bool:
        return self.rail.is_spare or self.remote_rail.is_spare

    def connect(self, remote_rail: Rail, remote: RemoteQueuePair, rkey: int, mtu: int) -> None:
        """Connect to the remote queue pair. Raises OSError."""
        self.pair.connect(self.rail, remote_rail, remote, mtu)
        self.remote_rail, self.mtu, self.remote_rkey = remote_rail, mtu, rkey

    def close(self) -> None:
        """Release everything. The queue pair must have failed, and no thread may use it. Raises OSError."""
        with self.device.naming("end to a connection"), contextlib.ExitStack() as rest:
            rest.callback(self.device.leave, self._connection)
            rest.callback(self._frames.close)
            rest.callback(self.queue.close)
            rest.callback(self.pair.close)
            self.discard()

    def discard(self) -> None:
        """Discard all completions, after returning their receive requests and send queue entries."""
        while found := self.queue.poll():
            sent = [number for number, _, _ in found if number != abi.RECEIVE_ID]
            self.pair.done = max(self.pair.done, *sent, 0)
            self.device.receive_again(len(found) - len(sent))


def drain(lanes: Sequence[Lane]) -> None:
    """Wait until all posted requests have completed; destroying the queue pairs releases the rest."""
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

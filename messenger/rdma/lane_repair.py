"""Repair of lanes that fail while the connection continues: both ends drop the lane and rebuild it after a rest.

    caller    lane fails ── DOWN            ── work goes to other lanes ── rest ── UP(end)          ── test ── in use
    owner                       ── IS_DOWN                                            ── IS_UP(end)

The caller leads. It sends DOWN for a lane whose requests failed or that is silent. The owner stops its queue pair and
replies IS_DOWN: from then on, nothing that was in flight on the lane can land, and unfinished work is posted on other
lanes. After the rest, the caller sends UP with a new end, the owner replies IS_UP with its own, and an empty write
tests the lane. Batches submitted later use it; earlier ones have no keys for it. The lane that carries the frames
cannot be repaired, because it is unknown which frames arrived: the stream connects again, and the owner's session
resolves them.

Every method is called with the link's lock held.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

import msgpack

from messenger.counters import Counters
from messenger.errors import ProtocolError
from messenger.frames import Fabric, encode
from messenger.path_health import PathState
from messenger.rdma.connection_io import ConnectionIO
from messenger.rdma.lane import Lane
from messenger.rdma.memory import FrameMemory
from messenger.rdma.verbs.queue_pair import RemoteQueuePair

_log = logging.getLogger(__name__)


class RepairMessage(IntEnum):
    """Steps of the repair; the values are those of the wire."""

    DOWN = 1
    IS_DOWN = 2
    UP = 3
    IS_UP = 4


class LaneWatcher(Protocol):
    """Interface of the object that waits for the lanes' completions."""

    def unwatch(self, lane: Lane) -> None: ...
    def watch(self, lane: Lane) -> None: ...


class LaneRepair:
    """State of the lanes under repair. `renewed` is called when existing windows no longer match the lanes."""

    def __init__(
        self,
        io: ConnectionIO,
        memory: FrameMemory,
        watch: LaneWatcher,
        counters: Counters,
        renewed: Callable[[], None],
        *,
        leads: bool,
    ) -> None:
        self._io = io
        self._memory = memory
        self._watch = watch
        self._counters = counters
        self._renewed = renewed
        self._leads = leads
        self._going: set[int] = set()
        self._trying: dict[int, int] = {}  # lane -> number of the empty write that tests it
        self._returning: dict[int, int] = {}  # lane -> last batch without keys for it
        self._received: deque[tuple[RepairMessage, int, tuple[int, int, int] | None]] = deque()

    def failed(self, index: int, reason: str) -> bool:
        """Take a failed lane out of use. Returns False if the connection cannot continue."""
        rails = self._io.rails
        if not self._leads:
            return False
        if rails.state(index) is PathState.UP and rails.frame_rail == index:
            return False
        self._io.lanes[index].pair.fail()
        self._trying.pop(index, None)
        self._returning.pop(index, None)
        if rails.state(index) is PathState.PROBING:
            self._io.lane_lost(index)
        else:
            self._going.add(index)
            self._send(RepairMessage.DOWN, index)
            self._report_failure(index, reason)
        return True

    def give_up(self, index: int) -> None:
        """Drop a lane that never worked, before anything was sent on any lane."""
        self._io.lanes[index].pair.fail()
        self._going.discard(index)
        self._io.lane_lost(index)
        self._send(RepairMessage.DOWN, index)
        self._report_failure(index, "no answer")

    def receive(self, message: Fabric) -> None:
        """Store a message of the other side for `work`. Raises ProtocolError."""
        try:
            step, index, end = msgpack.unpackb(message.payload, use_list=False)
            received = RepairMessage(step), index, end
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"invalid message of lane repair: {error}") from error
        is_end = end is None or (type(end) is tuple and len(end) == 3 and all(type(part) is int for part in end))
        if type(index) is not int or not 0 <= index < len(self._io.lanes) or not is_end:
            raise ProtocolError("a message of lane repair names an unknown lane or has an invalid end")
        if self._leads != (received[0] in (RepairMessage.IS_DOWN, RepairMessage.IS_UP)):
            raise ProtocolError(f"{received[0].name} must be sent by the other side")
        self._received.append(received)

    def work(self) -> None:
        """Process received messages and due repairs, while no thread polls the lanes.

        Raises ProtocolError or OSError.
        """
        while self._received:
            step, index, end = self._received.popleft()
            if step is RepairMessage.DOWN:
                self._go_down(index)
            elif step is RepairMessage.IS_DOWN:
                self._is_down(index)
            elif step is RepairMessage.UP:
                self._come_up(index, end)
            else:
                self._is_up(index, end)
        if self._leads and not self._io.rails.all_are_up:
            self._try_again()
            self._return()

    def wait_s(self) -> float | None:
        """Return the seconds until `work` is due even without messages; None if it is not."""
        rails = self._io.rails
        due_ns = None if rails.all_are_up or not self._leads else rails.next_probe_ns()
        return None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)

    # The owner.

    def _go_down(self, index: int) -> None:
        self._io.lanes[index].pair.fail()
        self._io.lane_lost(index)
        if self._io.rails.doubts or self._io.rails.is_stranded:
            raise ConnectionError("the lane that carried frames failed")
        self._send(RepairMessage.IS_DOWN, index)

    def _come_up(self, index: int, end: tuple[int, int, int] | None) -> None:
        if self._io.rails.state(index) is PathState.UP:
            raise ProtocolError("received a new end for a lane that is not down")
        try:
            lane = self._replace(index)
            self._connect(lane, end)
        except OSError as error:
            _log.info("rail %s stays down: %s", self._io.lanes[index].rail.name, error)
            self._send(RepairMessage.IS_UP, index)
            return
        self._renewed()
        self._send(RepairMessage.IS_UP, index, lane)

    # The caller.

    def _is_down(self, index: int) -> None:
        if index in self._going:
            self._going.discard(index)
            self._io.lane_lost(index)

    def _try_again(self) -> None:
        for index in self._io.rails.probes_due(time.monotonic_ns()):
            try:
                self._send(RepairMessage.UP, index, self._replace(index))
            except OSError as error:
                _log.info("rail %s stays down: %s", self._io.lanes[index].rail.name, error)
                self._io.lane_lost(index)

    def _is_up(self, index: int, end: tuple[int, int, int] | None) -> None:
        lane = self._io.lanes[index]
        # Otherwise the lane may be in use, and work in flight on it would land after being posted again.
        if self._io.rails.state(index) is not PathState.PROBING or lane.pair.connected:
            raise ProtocolError("received an end for a lane that is not down")
        try:
            self._connect(lane, end)
            self._trying[index] = lane.pair.drain_mark()
        except OSError:
            self._io.lane_lost(index)

    def _return(self) -> None:
        for index, mark in list(self._trying.items()):
            if self._io.lanes[index].pair.done >= mark:
                del self._trying[index]
                self._returning[index] = max(self._io.moving, default=0)
                self._renewed()
        if not self._returning:
            return
        moving = self._io.moving
        for index, last in list(self._returning.items()):
            if not moving or moving[0] > last:
                del self._returning[index]
                self._io.rails.rail_returned(index, time.monotonic_ns())
                self._counters.add("rdma_rails_returned")
                _log.info("rail %s is used again", self._io.lanes[index].rail.name)

    # Both.

    def _replace(self, index: int) -> Lane:
        old = self._io.lanes[index]
        lane = Lane(old.device, old.rail, self._memory)
        lane.remote_rail, lane.mtu = old.remote_rail, old.mtu
        self._watch.unwatch(old)
        # Before `close`, which may fail: the old lane must not be polled any more.
        self._io.lanes[index] = lane
        self._watch.watch(lane)
        old.close()
        return lane

    def _connect(self, lane: Lane, end: Any) -> None:
        if end is None:
            raise ConnectionError("the other side could not build its end")
        qp_num, psn, rkey = end
        lane.connect(lane.remote_rail, RemoteQueuePair(qp_num, psn), rkey, lane.mtu)

    def _send(self, step: RepairMessage, index: int, lane: Lane | None = None) -> None:
        self._io.submit_at_once(encode(Fabric(msgpack.packb((step, index, None if lane is None else lane.end)))))

    def _report_failure(self, index: int, reason: str) -> None:
        self._counters.add("rdma_failovers")
        name = self._io.lanes[index].rail.name
        _log.warning("rail %s failed (%s): its work continues on the other rails", name, reason)

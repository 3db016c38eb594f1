"""Lanes that fail under a connection that goes on: given up at both ends, built anew when their rest is over.

The caller leads. It says DOWN for a lane whose requests failed, or that fell silent; the owner stops its queue pair and
says IS_DOWN: from then on nothing that was under way there can land, and what was unfinished is posted on the other
lanes. After the rest it says UP with a new end, the owner answers IS_UP with its own, an empty write is tried, and the
lane is used again for what is submitted from then on: earlier batches have no keys for it. The lane that carries the
frames cannot be given up so: nobody knows then which frames arrived, and the connection is made again, where the
owner's session knows.

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
from messenger.rdma.courier import Courier
from messenger.rdma.lane import Lane
from messenger.rdma.memory import FrameMemory
from messenger.rdma.policy.resting import RailState
from messenger.rdma.verbs.queue_pair import Far

_log = logging.getLogger(__name__)


class Step(IntEnum):
    DOWN = 1
    IS_DOWN = 2
    UP = 3
    IS_UP = 4


class Watch(Protocol):
    """Who waits for the lanes' completions."""

    def unwatch(self, lane: Lane) -> None: ...
    def watch(self, lane: Lane) -> None: ...


class Repairs:
    """`renewed` is called when the windows of the past do not fit the lanes any more."""

    def __init__(
        self,
        courier: Courier,
        memory: FrameMemory,
        watch: Watch,
        counters: Counters,
        renewed: Callable[[], None],
        *,
        leads: bool,
    ) -> None:
        self._courier = courier
        self._memory = memory
        self._watch = watch
        self._counters = counters
        self._renewed = renewed
        self._leads = leads
        self._going: set[int] = set()
        self._trying: dict[int, int] = {}  # lane: the number of the empty write that tries it
        self._returning: dict[int, int] = {}  # lane: the last batch without keys for it
        self._heard: deque[tuple[Step, int, tuple[int, int, int] | None]] = deque()

    def failed(self, index: int, reason: str) -> bool:
        """The lane does not work. False: the connection cannot go on."""
        rails = self._courier.rails
        if not self._leads:
            return False
        if rails.state(index) is RailState.UP and rails.frame_rail == index:
            return False
        self._courier.lanes[index].pair.fail()
        self._trying.pop(index, None)
        self._returning.pop(index, None)
        if rails.state(index) is RailState.PROBING:
            self._courier.lane_lost(index)
        else:
            self._going.add(index)
            self._say(Step.DOWN, index)
            self._tell_of(index, reason)
        return True

    def give_up(self, index: int) -> None:
        """The lane never worked; nothing was sent on any lane yet."""
        self._courier.lanes[index].pair.fail()
        self._going.discard(index)
        self._courier.lane_lost(index)
        self._say(Step.DOWN, index)
        self._tell_of(index, "no answer")

    def hear(self, message: Fabric) -> None:
        """The other side says something; `work` does it. Raises ProtocolError."""
        try:
            step, index, end = msgpack.unpackb(message.payload, use_list=False)
            heard = Step(step), index, end
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"a step of repair that is none: {error}") from error
        is_end = end is None or (type(end) is tuple and len(end) == 3 and all(type(part) is int for part in end))
        if type(index) is not int or not 0 <= index < len(self._courier.lanes) or not is_end:
            raise ProtocolError("a step of repair on a lane that is not there, or with an end that cannot be")
        if self._leads != (heard[0] in (Step.IS_DOWN, Step.IS_UP)):
            raise ProtocolError(f"{heard[0].name} comes from the other side only")
        self._heard.append(heard)

    def work(self) -> None:
        """What was heard, and what is due; only while nobody polls the lanes. Raises ProtocolError or OSError."""
        while self._heard:
            step, index, end = self._heard.popleft()
            if step is Step.DOWN:
                self._go_down(index)
            elif step is Step.IS_DOWN:
                self._is_down(index)
            elif step is Step.UP:
                self._come_up(index, end)
            else:
                self._is_up(index, end)
        if self._leads and not self._courier.rails.all_are_up:
            self._try_again()
            self._return()

    def wait_s(self) -> float | None:
        """How long until `work` has something to do of itself; None: it has not."""
        rails = self._courier.rails
        due_ns = None if rails.all_are_up or not self._leads else rails.next_probe_ns()
        return None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)

    # The owner.

    def _go_down(self, index: int) -> None:
        self._courier.lanes[index].pair.fail()
        self._courier.lane_lost(index)
        if self._courier.rails.doubts or self._courier.rails.is_stranded:
            raise ConnectionError("the lane that carried frames failed")
        self._say(Step.IS_DOWN, index)

    def _come_up(self, index: int, end: tuple[int, int, int] | None) -> None:
        if self._courier.rails.state(index) is RailState.UP:
            raise ProtocolError("a new end for a lane that is not down")
        try:
            lane = self._replace(index)
            self._connect(lane, end)
        except OSError as error:
            _log.info("rail %s stays down: %s", self._courier.lanes[index].rail.name, error)
            self._say(Step.IS_UP, index)
            return
        self._renewed()
        self._say(Step.IS_UP, index, lane)

    # The caller.

    def _is_down(self, index: int) -> None:
        if index in self._going:
            self._going.discard(index)
            self._courier.lane_lost(index)

    def _try_again(self) -> None:
        for index in self._courier.rails.probes_due(time.monotonic_ns()):
            try:
                self._say(Step.UP, index, self._replace(index))
            except OSError as error:
                _log.info("rail %s stays down: %s", self._courier.lanes[index].rail.name, error)
                self._courier.lane_lost(index)

    def _is_up(self, index: int, end: tuple[int, int, int] | None) -> None:
        lane = self._courier.lanes[index]
        # Else it may be in use, and what is under way there would land after it was posted again.
        if self._courier.rails.state(index) is not RailState.PROBING or lane.pair.connected:
            raise ProtocolError("an end for a lane that is not down")
        try:
            self._connect(lane, end)
            self._trying[index] = lane.pair.drain_mark()
        except OSError:
            self._courier.lane_lost(index)

    def _return(self) -> None:
        for index, mark in list(self._trying.items()):
            if self._courier.lanes[index].pair.done >= mark:
                del self._trying[index]
                self._returning[index] = max(self._courier.moving, default=0)
                self._renewed()
        if not self._returning:
            return
        moving = self._courier.moving
        for index, last in list(self._returning.items()):
            if not moving or moving[0] > last:
                del self._returning[index]
                self._courier.rails.rail_returned(index, time.monotonic_ns())
                self._counters.add("rdma_rails_returned")
                _log.info("rail %s is used again", self._courier.lanes[index].rail.name)

    # Both.

    def _replace(self, index: int) -> Lane:
        old = self._courier.lanes[index]
        lane = Lane(old.device, old.rail, self._memory)
        lane.far_rail, lane.mtu = old.far_rail, old.mtu
        self._watch.unwatch(old)
        # First, for the device may not let go of the old one, of which nothing must be polled then.
        self._courier.lanes[index] = lane
        self._watch.watch(lane)
        old.close()
        return lane

    def _connect(self, lane: Lane, end: Any) -> None:
        if end is None:
            raise ConnectionError("the other side could not build its end")
        qp_num, psn, rkey = end
        lane.connect(lane.far_rail, Far(qp_num, psn), rkey, lane.mtu)

    def _say(self, step: Step, index: int, lane: Lane | None = None) -> None:
        self._courier.submit_at_once(encode(Fabric(msgpack.packb((step, index, None if lane is None else lane.end)))))

    def _tell_of(self, index: int, reason: str) -> None:
        self._counters.add("rdma_failovers")
        name = self._courier.lanes[index].rail.name
        _log.warning("rail %s failed (%s): what it carried goes by the others", name, reason)

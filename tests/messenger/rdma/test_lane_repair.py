"""Steps of repair that the other side may not take, on lanes whose hardware is played."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from messenger.counters import Counters
from messenger.errors import ProtocolError
from messenger.frames import Fabric
from messenger.path_health import PathState
from messenger.rdma.connection_io import ConnectionIO
from messenger.rdma.lane_repair import LaneRepair, RepairMessage

END = (17, 0, 1)


class Lane:
    """In use; what is connected already cannot be connected again."""

    def __init__(self, name: str) -> None:
        self.pair = SimpleNamespace(depth=64, done=0, posted=0, failed=False, connected=True, is_usable=True)
        self.rail = self.remote_rail = SimpleNamespace(name=name, speed_gbit=100.0)
        self.mtu = 1024
        self.is_spare = False
        self.pending: deque[tuple[int, int]] = deque()

    def connect(self, *_: object) -> None:
        raise OSError("it is connected")


def repairs_of(*, leads: bool) -> tuple[LaneRepair, ConnectionIO]:
    lanes: Any = [Lane("played0"), Lane("played1")]
    counters, nothing = Counters(), SimpleNamespace()
    io = ConnectionIO(lanes, nothing, 0, counters, lambda _lane, _status: None)  # type: ignore[arg-type]
    return LaneRepair(io, nothing, nothing, counters, lambda: None, leads=leads), io  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [END, None])
@pytest.mark.parametrize(("step", "leads"), [(RepairMessage.IS_UP, True), (RepairMessage.UP, False)])
def test_a_lane_in_use_is_not_taken_away_by_an_answer_or_an_end_that_nobody_asked_for(
    step: RepairMessage, leads: bool, end: tuple[int, int, int] | None
) -> None:
    """Its queue pair goes on: what it still moves would land after the same bytes were sent by another lane."""
    repairs, io = repairs_of(leads=leads)
    lanes = list(io.lanes)
    repairs.receive(Fabric(msgpack.packb((step, 1, end))))
    with pytest.raises(ProtocolError, match="not down"):
        repairs.work()
    assert io.rails.state(1) is PathState.UP
    assert io.lanes == lanes


def test_a_lane_that_answered_is_not_connected_again() -> None:
    repairs, io = repairs_of(leads=True)
    io.lane_lost(1)
    rested_ns = io.rails.next_probe_ns()
    assert rested_ns is not None
    assert io.rails.probes_due(rested_ns) == [1]
    repairs.receive(Fabric(msgpack.packb((RepairMessage.IS_UP, 1, END))))
    with pytest.raises(ProtocolError, match="not down"):
        repairs.work()
    assert io.rails.state(1) is PathState.PROBING

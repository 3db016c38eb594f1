"""Completions of a connection, on a lane with scripted hardware; the receive requests are shared."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from messenger.counters import Counters
from messenger.errors import ProtocolError
from messenger.rdma.connection_io import ConnectionIO
from messenger.rdma.inbox import PLACE_NBYTES
from messenger.rdma.verbs import abi


@pytest.fixture
def again() -> list[int]:
    """How many receive requests were posted again, call by call."""
    return []


@pytest.fixture
def io(again: list[int]) -> ConnectionIO:
    lane: Any = SimpleNamespace(
        pair=SimpleNamespace(depth=64, done=0, failed=False, is_usable=True),
        rail=SimpleNamespace(name="played", speed_gbit=100.0),
        device=SimpleNamespace(receive_again=again.append),
        is_spare=False,
        pending=deque(),
    )
    memory: Any = SimpleNamespace(inbox_place=lambda _number: memoryview(bytearray(PLACE_NBYTES)))
    return ConnectionIO([lane], memory, 0, Counters(), lambda _lane, _status: None)


def test_a_peer_whose_fragments_are_wrong_costs_the_others_no_receive_request(
    io: ConnectionIO, again: list[int]
) -> None:
    with pytest.raises(ProtocolError):
        io.take(0, [(abi.RECEIVE_ID, abi.WC_SUCCESS, 1)] * 5)
    assert sum(again) == 5

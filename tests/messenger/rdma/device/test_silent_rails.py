"""Rails that fall silent: the peer's adapter answers nothing any more, and this side's never gives up by itself."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pyverbs.qp import QPAttr

from messenger import TransferDeadlineExceeded
from messenger.rdma.verbs import queue_pair
from messenger.rdma.verbs.abi import QP_STATE, QPS_RESET

pytestmark = pytest.mark.transports("rdma")

NBYTES = 4 << 20
SILENCE_S = 3.0
FOR_EVER = 7
"""Retries: soft-RoCE's word for it."""


@pytest.fixture(autouse=True)
def _adapters_that_never_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_pair, "_RETRIES", FOR_EVER)


def link_of(peer: Any) -> Any:
    """The link that the peer's writes go by."""
    return next(stream._link for stream in peer._streams if stream._link is not None)


def silence(node: Any, *lanes: int) -> None:
    """The node's adapters drop what comes for these lanes of its connection."""
    (served,) = node.messenger._server._connections
    for lane in lanes:
        served._link.lanes[lane].pair._qp.modify(QPAttr(qp_state=QPS_RESET), QP_STATE)


@pytest.fixture
def connect(make_node: Any, wait_until: Callable[..., None]) -> Callable[[float], tuple[Any, Any, Any, Any]]:
    """`connect(silence_s)`: (a, b, a's peer b, a key of b's), by two rails, on which nothing is under way."""

    def connected(silence_s: float) -> tuple[Any, Any, Any, Any]:
        a, b = (make_node(name, NBYTES, rdma_silence_s=silence_s) for name in "ab")
        peer, key = a.messenger.connect(b.endpoint), b.grant()
        peer.write(key, a.region, [[0, 0, NBYTES]]).result()
        (served,) = b.messenger._server._connections
        pairs = [lane.pair for link in (link_of(peer), served._link) for lane in link.lanes]
        assert len(pairs) == 4
        wait_until(lambda: all(pair.posted == pair.done for pair in pairs), "even frames tell that they are done")
        return a, b, peer, key

    return connected


def test_what_a_silent_rail_carried_goes_by_the_other_and_it_returns(
    connect: Any, wait_until: Callable[..., None]
) -> None:
    a, b, peer, key = connect(SILENCE_S)
    link = link_of(peer)
    silence(b, 1)
    a.fill(1)
    futures = [peer.write_notify(key, a.region, [[0, 0, NBYTES]], b"%d" % i, b"") for i in range(3)]
    for future in futures:
        future.result()
    assert np.array_equal(a.array, b.array)
    assert [tag for _, tag, _ in b.notes] == [b"0", b"1", b"2"]
    assert a.messenger.counters()["rdma_failovers"] == 1
    wait_until(lambda: a.messenger.counters().get("rdma_rails_returned") == 1, "it returns", 30)
    a.fill(2)
    peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    assert np.array_equal(a.array, b.array)
    assert link_of(peer) is link, "the connection was made again"


def test_where_frames_fall_silent_the_connection_is_made_again_and_they_are_done_once(connect: Any) -> None:
    """A notify asks for no completion: only by being asked after is it missed."""
    a, b, peer, _ = connect(SILENCE_S)
    silence(b, 0)
    peer.notify(b"1", b"").result()
    peer.notify(b"2", b"").result()
    assert [tag for _, tag, _ in b.notes] == [b"1", b"2"]
    assert a.messenger.counters()["connects"] == 2


def test_a_deadline_ends_a_write_over_rails_that_are_all_silent(connect: Any) -> None:
    a, b, peer, key = connect(40.0)
    silence(b, 0, 1)
    with pytest.raises(TransferDeadlineExceeded, match="not done within 2 s"):
        peer.write(key, a.region, [[0, 0, NBYTES]], deadline_s=2).result()
    a.fill(3)
    peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    assert np.array_equal(a.array, b.array)


def test_a_dead_rail_is_left_long_before_the_limit_while_the_other_one_moves_bytes(connect: Any) -> None:
    a, b, peer, key = connect(60.0)
    for fill in (1, 2, 3):  # so that both speeds are known
        a.fill(fill)
        peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    link = link_of(peer)
    silence(b, 1)
    a.fill(4)
    began_s = time.monotonic()
    futures = [peer.write_notify(key, a.region, [[0, 0, NBYTES]], b"%d" % i, b"", deadline_s=55) for i in range(3)]
    for future in futures:
        future.result()
    assert time.monotonic() - began_s < 30
    assert np.array_equal(a.array, b.array)
    assert [tag for _, tag, _ in b.notes] == [b"0", b"1", b"2"]
    assert a.messenger.counters()["rdma_failovers"] == 1
    assert link_of(peer) is link, "the connection was made again"

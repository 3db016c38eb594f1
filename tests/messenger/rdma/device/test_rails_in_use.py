"""Rails that fail under transfers: others take over, the failed one is built anew, and every byte arrives once."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pyverbs.qp import QPAttr

from messenger.memory import SharedMemory
from messenger.rdma.lane import Lane
from messenger.rdma.verbs.abi import QP_STATE, QPS_ERR

pytestmark = pytest.mark.transports("rdma")

NBYTES = 4 << 20


def link_of(peer: Any) -> Any:
    """The link that the peer's writes go by."""
    return next(stream._link for stream in peer._streams if stream._link is not None)


def break_lane(link: Any, index: int) -> None:
    """Break a queue pair as a failing port does."""
    with link._changed:
        link.lanes[index].pair._qp.modify(QPAttr(qp_state=QPS_ERR), QP_STATE)


def connect(make_node: Any) -> tuple[Any, Any, Any, Any]:
    """(a, b, a's peer b, a key of b's), connected by two rails."""
    a, b = make_node("a", NBYTES), make_node("b", NBYTES)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    peer.write(key, a.region, [[0, 0, 10]]).result()
    assert len(link_of(peer).lanes) == 2
    return a, b, peer, key


def test_a_large_write_goes_by_both_rails(make_node: Any) -> None:
    a, b, peer, key = connect(make_node)
    a.fill(1)
    peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    assert np.array_equal(a.array, b.array)
    carried = {flow.key.rail: flow.nbytes for flow in a.messenger._counters.flows() if flow.key.rail}
    assert set(carried) == {"rxe0/1", "rxe1/1"}
    assert min(carried.values()) >= NBYTES // 8
    assert sum(carried.values()) == NBYTES + 10


def test_a_rail_that_fails_is_done_without_built_anew_and_used_again(
    make_node: Any, wait_until: Callable[..., None]
) -> None:
    a, b, peer, key = connect(make_node)
    link = link_of(peer)
    for round_number in range(1, 3):
        broken = link.lanes[1]
        break_lane(link, 1)
        a.fill(round_number)
        futures = [peer.write_notify(key, a.region, [[0, 0, NBYTES]], b"%d" % i, b"") for i in range(3)]
        for future in futures:
            future.result()
        assert np.array_equal(a.array, b.array)
        assert a.messenger.counters()["rdma_failovers"] == round_number
        wait_until(lambda n=round_number: a.messenger.counters().get("rdma_rails_returned") == n, "it returns", 30)
        assert link.lanes[1] is not broken
        a.fill(round_number + 10)
        peer.write(key, a.region, [[0, 0, NBYTES]]).result()
        assert np.array_equal(a.array, b.array)
        assert link.lanes[1].pair.posted > 1, "it carries nothing"
        a.fill(round_number + 20)
        peer.read(key, a.region, [[0, 0, NBYTES]]).result()
        assert np.array_equal(a.array, b.array)
    assert link_of(peer) is link, "the connection was made again"
    assert [tag for _, tag, _ in b.notes] == [b"0", b"1", b"2"] * 2


def test_a_rail_that_cannot_be_built_anew_disturbs_neither_new_keys_nor_the_end_of_the_connection(
    make_node: Any, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, peer, key = connect(make_node)
    link = link_of(peer)
    (served,) = b.messenger._server._connections
    broken = link.lanes[1], served._link.lanes[1]

    def refused(*_: object) -> None:
        raise OSError("the device gives no connection")

    monkeypatch.setattr(Lane, "connect", refused)
    break_lane(link, 1)
    peer.write(key, a.region, [[0, 0, NBYTES]]).result()
    for end, old in zip((link, served._link), broken, strict=True):
        wait_until(lambda end=end, old=old: end.lanes[1] is not old, "another lane takes its place", 30)
        assert not end.lanes[1].pair.connected
    other = b.grant()
    a.fill(1)
    peer.write(other, a.region, [[0, 0, NBYTES]]).result()
    assert np.array_equal(a.array, b.array)
    assert link_of(peer) is link, "the connection was made again"
    monkeypatch.undo()
    b.cut_inbound()
    a.fill(2)
    peer.write(other, a.region, [[0, 0, NBYTES]]).result()
    assert np.array_equal(a.array, b.array)
    assert a.messenger.counters()["connects"] == 2


def test_a_rail_of_which_the_device_does_not_let_go_is_replaced_all_the_same(
    make_node: Any, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, peer, key = connect(make_node)
    link = link_of(peer)
    broken = link.lanes[1]
    close = Lane.close
    refusals: list[Lane] = []

    def refuse_once(lane: Lane) -> None:
        close(lane)
        if lane is broken and not refusals:
            refusals.append(lane)
            raise OSError("the device does not let go")

    monkeypatch.setattr(Lane, "close", refuse_once)
    break_lane(link, 1)
    for fill in (1, 2):
        a.fill(fill)
        peer.write(key, a.region, [[0, 0, NBYTES]]).result()
        assert np.array_equal(a.array, b.array)
        wait_until(lambda: bool(refusals), "it is replaced", 30)
    assert link.lanes[1] is not broken, "what is closed is polled"
    assert link_of(peer) is link, "the connection was made again"


def test_when_the_rail_of_the_frames_fails_the_connection_is_made_again_and_nothing_is_done_twice(
    make_node: Any,
) -> None:
    a, b, peer, key = connect(make_node)
    a.fill(3)
    break_lane(link_of(peer), 0)
    futures = [peer.write_notify(key, a.region, [[0, 0, NBYTES]], b"%d" % i, b"") for i in range(3)]
    for future in futures:
        future.result()
    assert np.array_equal(a.array, b.array)
    assert [tag for _, tag, _ in b.notes] == [b"0", b"1", b"2"]
    assert a.messenger.counters()["connects"] >= 2


def test_memory_deregistered_under_operations_is_pinned_for_no_longer_than_they_take(make_node: Any) -> None:
    a, b, peer, key = connect(make_node)
    memory = SharedMemory.create(NBYTES, "lent")
    memory.array[:] = 7
    region = a.messenger.register(memory)
    futures = [peer.write(key, region, [[0, 0, NBYTES]]) for _ in range(8)]
    a.messenger.deregister(region)
    for future in futures:
        future.result()
    assert (b.array == 7).all()
    devices = {lane.device for lane in link_of(peer).lanes}
    region_id, gone = region.region_id, weakref.ref(region)
    memory.close()
    del futures, future, region
    gc.collect()
    assert gone() is None
    assert not any(region_id in device._registered for device in devices)


def test_bytes_of_a_write_whose_answer_was_lost_are_not_moved_again(make_node: Any) -> None:
    """The owner may have given the memory to something else since it delivered the notify."""
    a, b = make_node("a"), make_node("b")

    def reuse(*_: object) -> None:
        b.array[:10] = 99
        b.cut_inbound()

    b.messenger._notify_handlers.append(reuse)
    a.array[:10] = 1
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    peer.write_notify(key, a.region, [[0, 0, 10]], b"t", b"").result()
    assert b.array[:10].tolist() == [99] * 10
    assert len(b.notes) == 1
    assert a.messenger.counters()["retries"] >= 1


def test_keys_told_before_a_rail_was_built_anew_are_not_used_after_it(
    make_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, peer, _ = connect(make_node)
    link = link_of(peer)
    (served,) = b.messenger._server._connections
    asked: list[Any] = []
    answer, wait_for = served._responder.key_queried, link.wait_for

    def answered(*details: Any) -> None:
        asked.append(details)
        answer(*details)

    def overtaken(condition: Callable[[], bool]) -> None:
        wait_for(condition)
        if len(asked) == 1:
            with link._changed:
                link._renewed()  # as when a rail returns while the owner answers

    monkeypatch.setattr(served._responder, "key_queried", answered)
    monkeypatch.setattr(link, "wait_for", overtaken)
    a.fill(1)
    peer.write(b.grant(), a.region, [[0, 0, NBYTES]]).result()
    assert np.array_equal(a.array, b.array)
    assert len(asked) == 2

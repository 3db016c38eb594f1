"""Peers that stop, die, come back or were never there: every operation ends, with an error that says what to do."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from messenger import (
    DeadlineExceeded,
    InvalidArgument,
    MessengerClosed,
    PeerLost,
    PeerRestarted,
    PeerUnreachable,
    TransferDeadlineExceeded,
)

LARGE = 16 << 20


def test_a_stopped_peer_exceeds_the_deadline_and_is_used_again_once_it_goes_on(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    a.array[:] = 1
    peer = a.messenger.connect(child.endpoint)
    peer.write(child.key, a.region, [[0, 0, 10]]).result()
    child.stop()
    started_s = time.monotonic()
    operations = [
        peer.write_notify(child.key, a.region, [[0, 0, LARGE]], b"late", b"", deadline_s=0.3),
        peer.read(child.key, a.region, [[0, 0, LARGE]], deadline_s=0.3),
        peer.notify(b"late too", b"", deadline_s=0.4),
    ]
    for operation in operations:
        with pytest.raises(TransferDeadlineExceeded, match="peer 'b'") as caught:
            operation.result()
        assert isinstance(caught.value, DeadlineExceeded)
    assert 0.3 < time.monotonic() - started_s < 2.0
    assert a.messenger.validate() == []
    child.go_on()
    peer.write_notify(child.key, a.region, [[0, 0, 100]], b"in time", b"").result()
    assert child.ask("notes") == ["in time"]


def test_a_write_to_a_stopped_peer_is_given_up_long_before_its_deadline(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    peer = a.messenger.connect(child.endpoint)
    peer.write(child.key, a.region, [[0, 0, 10]]).result()
    child.stop()
    started_s = time.monotonic()
    operations = [
        peer.write_notify(child.key, a.region, [[0, 0, nbytes]], b"kv", b"", deadline_s=600, stall_s=0.3)
        for nbytes in (LARGE, 100)
    ]
    for operation in operations:
        with pytest.raises(TransferDeadlineExceeded, match=r"nothing was acknowledged for 0\.3 s"):
            operation.result(30)
    assert time.monotonic() - started_s > 0.3
    child.go_on()
    assert peer.write_notify(child.key, a.region, [[0, 0, 100]], b"again", b"").result().nbytes == 100


def test_a_queue_that_moves_is_not_given_up_however_long_it_takes(make_node: Any) -> None:
    a, b = make_node("a", 1000), make_node("b", 1000)
    b.messenger.on_notify(lambda *_: time.sleep(0.2))  # a slow peer
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    peer.write(key, a.region, [[0, 0, 10]]).result()
    started_s = time.monotonic()
    operations = [
        peer.write_notify(key, a.region, [[0, 0, 10]], b"kv", b"", deadline_s=600, stall_s=2.0) for _ in range(14)
    ]
    assert [operation.result(60).nbytes for operation in operations] == [10] * 14
    assert time.monotonic() - started_s > 2.0
    with pytest.raises(InvalidArgument, match="positive number of seconds, not 0"):
        peer.write_notify(key, a.region, [[0, 0, 10]], b"kv", b"", stall_s=0)


def test_a_small_batch_that_missed_its_deadline_takes_no_effect_when_the_peer_goes_on(
    make_node: Any, make_child: Any
) -> None:
    """It lies in the peer's socket complete, so only the owner can still tell that nobody waits for it."""
    a, child = make_node("a", 1 << 20), make_child("b")
    a.array[:] = 1
    peer = a.messenger.connect(child.endpoint)
    peer.write(child.key, a.region, [[0, 0, 10]]).result()
    child.stop()
    with pytest.raises(TransferDeadlineExceeded):
        peer.write_notify(child.key, a.region, [[0, 0, 1000]], b"late", b"", deadline_s=0.2).result()
    child.go_on()
    peer.notify(b"in time", b"").result()
    assert child.ask("notes") == ["in time"]
    assert child.ask("sum") == 10


def test_operations_behind_one_that_missed_its_deadline_are_still_done_in_order(
    make_node: Any, make_child: Any
) -> None:
    a, child = make_node("a", 1 << 20), make_child("b")
    a.array[:] = 1
    peer = a.messenger.connect(child.endpoint)
    peer.notify(b"0", b"").result()
    child.stop()
    patient = [peer.notify(b"1", b"")]
    hasty = peer.write_notify(child.key, a.region, [[0, 0, 1000]], b"never", b"", deadline_s=0.2)
    patient += [peer.write_notify(child.key, a.region, [[0, i, 1]], b"%d" % i, b"") for i in range(2, 6)]
    with pytest.raises(TransferDeadlineExceeded):
        hasty.result()
    child.go_on()
    for future in patient:
        future.result()
    assert child.ask("notes") == ["0", "1", "2", "3", "4", "5"]
    assert a.messenger.counters()["retries"] >= 5


def test_a_peer_killed_in_the_middle_of_a_write_is_lost_and_its_successor_is_another(
    make_node: Any, make_child: Any, wait_until: Callable[..., None], transport: str
) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE, incarnation=7)
    peer = a.messenger.connect(child.endpoint)
    first = peer.write(child.key, a.region, [[0, 0, LARGE]])
    under_way = [peer.write(child.key, a.region, [[0, 0, LARGE]]) for _ in range(10)]
    first.result()
    child.stop()
    doomed = [transfer(child.key, a.region, [[0, 0, LARGE]]) for transfer in (peer.write, peer.read)]
    child.process.kill()
    killed_s = time.monotonic()
    for future in doomed:
        assert isinstance(future.exception(), PeerUnreachable)
    assert time.monotonic() - killed_s < 5.0
    assert all(future.exception() is None or isinstance(future.exception(), PeerLost) for future in under_way)
    wait_until(lambda: a.lost == [("b", 7)], "the loss is reported")
    assert a.messenger.validate() == []

    port = child.endpoint.tcp_port if transport == "tcp" else 0
    child.process.wait()
    successor = make_child("b", LARGE, incarnation=8, tcp_port=port)
    with pytest.raises(PeerRestarted, match="new endpoint"):
        peer.write(child.key, a.region, [[0, 0, 10]]).result()
    fresh = a.messenger.connect(successor.endpoint)
    assert fresh.write(successor.key, a.region, [[0, 0, 10]]).result().nbytes == 10


def test_a_caller_that_closes_in_peace_is_not_lost(make_node: Any, wait_until: Callable[..., None]) -> None:
    owner, caller = make_node("a", peer_loss_grace_s=0.02), make_node("b")
    caller.messenger.connect(owner.endpoint).notify(b"t", b"").result()
    caller.messenger.close()
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 0, "the connection has ended")
    assert owner.messenger._clock.pending() == 0
    assert owner.lost == []


def test_an_owner_hears_of_a_caller_that_died(make_node: Any, make_child: Any, wait_until: Callable[..., None]) -> None:
    owner, child = make_node("a", peer_loss_grace_s=0.02), make_child("b")
    child.ask(f"call {owner.endpoint_json}")
    assert owner.notes == [("b", b"hello", b"")]
    child.process.kill()
    wait_until(lambda: owner.lost == [("b", 1)], "the loss is reported")


def test_a_peer_that_is_not_there_fails_at_once(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b")
    key = b.grant()
    b.messenger.close()
    peer = a.messenger.connect(b.endpoint) if a.endpoint.tcp_port else None
    if peer is None:
        # The socket's path is gone with its owner, so there is no transport in common any more.
        with pytest.raises(InvalidArgument, match="no transport in common"):
            a.messenger.connect(b.endpoint)
        return
    started_s = time.monotonic()
    with pytest.raises(PeerUnreachable, match="nothing listens there"):
        peer.write(key, a.region, [[0, 0, 10]]).result()
    assert time.monotonic() - started_s < 2.0
    assert a.lost == [("b", 1)]


def test_an_endpoint_of_an_earlier_incarnation_is_refused(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b", incarnation=2)
    stale = dataclasses.replace(b.endpoint, incarnation=1)
    with pytest.raises(PeerRestarted, match="incarnation 0x2"):
        a.messenger.connect(stale).notify(b"t", b"").result()
    assert b.messenger.counters()["stale_greetings"] == 1
    a.messenger.connect(b.endpoint).notify(b"t", b"").result()


def test_a_connection_dropped_while_idle_is_made_again(make_node: Any, wait_until: Callable[..., None]) -> None:
    a, b = make_node("a"), make_node("b")
    a.array[:] = 4
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    for round_number in range(1, 6):
        peer.write(key, a.region, [[0, 100 * round_number, 10]]).result()
        peer.read(key, a.region, [[9000, 5000, 10]]).result()
        b.cut_inbound()
        peer.write(key, a.region, [[0, 100 * round_number + 10, 10]]).result()
    assert int(b.array.sum()) == 5 * 20 * 4
    assert a.lost == b.lost == []
    assert a.messenger.counters()["connects"] >= 6


def test_every_notify_is_delivered_once_and_in_order_however_often_the_connection_breaks(make_node: Any) -> None:
    a, b = make_node("a", 1 << 20), make_node("b", 1 << 20)
    a.array[:] = np.arange(1 << 20) % 251
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    done = threading.Event()

    def vandalise() -> None:
        while not done.wait(0.01):
            b.cut_inbound()

    vandal = threading.Thread(target=vandalise)
    vandal.start()
    try:
        futures = [peer.write_notify(key, a.region, [[i, i, 2000]], b"%d" % i, b"") for i in range(0, 1_000_000, 2000)]
        for future in futures:
            future.result()
    finally:
        done.set()
        vandal.join()
    assert [int(tag) for _, tag, _ in b.notes] == list(range(0, 1_000_000, 2000))
    assert np.array_equal(b.array[:1_000_000], a.array[:1_000_000])
    assert a.messenger.counters()["connects"] > 1


def test_connections_beyond_the_limit_are_turned_away_and_served_when_there_is_room(
    make_node: Any, wait_until: Callable[..., None]
) -> None:
    owner = make_node("a", max_connections=1)
    first, second = make_node("b"), make_node("c")
    first.messenger.connect(owner.endpoint).notify(b"first", b"").result()
    peer = second.messenger.connect(owner.endpoint)
    with pytest.raises(TransferDeadlineExceeded, match="which is the limit"):
        peer.notify(b"too many", b"", deadline_s=0.3).result()
    first.messenger.connect(owner.endpoint).notify(b"again", b"").result()
    first.messenger.close()
    peer.notify(b"second", b"").result()
    assert [tag for _, tag, _ in owner.notes] == [b"first", b"again", b"second"]


def test_closing_fails_what_is_pending(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    peer = a.messenger.connect(child.endpoint)
    peer.notify(b"t", b"").result()
    child.stop()
    pending = [peer.write(child.key, a.region, [[0, 0, LARGE]]) for _ in range(3)] + [peer.notify(b"t", b"")]
    started_s = time.monotonic()
    a.messenger.close()
    assert time.monotonic() - started_s < 2.0
    for future in pending:
        with pytest.raises(MessengerClosed):
            future.result()
    with pytest.raises(MessengerClosed):
        peer.notify(b"t", b"").result()
    with pytest.raises(MessengerClosed):
        a.messenger.connect(child.endpoint)


def test_many_rounds_leave_no_thread_and_no_descriptor_behind(make_node: Any) -> None:
    for incarnation in range(1, 9):
        a, b = make_node(f"a{incarnation}", 4096, incarnation), make_node(f"b{incarnation}", 4096, incarnation)
        peer, key = a.messenger.connect(b.endpoint), b.grant()
        peer.write_notify(key, a.region, [[0, 0, 4096]], b"t", b"").result()
        peer.read(key, a.region, [[0, 0, 4096]]).result()
        a.messenger.close()
        b.messenger.close()

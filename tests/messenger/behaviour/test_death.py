"""Peers that die, come back or were never there: every operation ends, with an error that says what to do."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest

from messenger import (
    InvalidArgument,
    MessengerClosed,
    PeerLost,
    PeerRestarted,
    PeerUnreachable,
)

LARGE = 16 << 20


def test_a_peer_killed_in_the_middle_of_a_write_is_lost_and_its_successor_is_another(
    make_node: Any, make_child: Any, wait_until: Callable[..., None], transport: str, patience: float
) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE, incarnation=7)
    peer = a.messenger.connect(child.endpoint)
    first = peer.write(child.key, a.region, [[0, 0, LARGE]])
    under_way = [peer.write(child.key, a.region, [[0, 0, LARGE]]) for _ in range(10)]
    first.result()
    child.stop()
    doomed = [transfer(child.key, a.region, [[0, 0, LARGE]]) for transfer in (peer.write, peer.read)]
    child.kill()
    killed_s = time.monotonic()
    for future in doomed:
        assert isinstance(future.exception(), PeerUnreachable)
    assert time.monotonic() - killed_s < 5.0 * patience
    assert all(future.exception() is None or isinstance(future.exception(), PeerLost) for future in under_way)
    wait_until(lambda: a.lost == [("b", 7)], "the loss is reported")
    assert a.messenger.validate() == []

    port = child.endpoint.tcp_port if transport != "shm" else 0
    successor = make_child("b", LARGE, incarnation=8, data_port=port)
    with pytest.raises(PeerRestarted, match="new endpoint"):
        peer.write(child.key, a.region, [[0, 0, 10]]).result()
    fresh = a.messenger.connect(successor.endpoint)
    assert fresh.write(successor.key, a.region, [[0, 0, 10]]).result().nbytes == 10


@pytest.mark.parametrize("nbytes", [10, 1 << 20], ids=["short", "long"])
def test_what_a_dead_owner_left_is_not_read(make_node: Any, make_child: Any, nbytes: int) -> None:
    """Its memory may be mapped here, and outlives it."""
    a, child = make_node("a", 1 << 20), make_child("b", incarnation=7)
    peer, rows = a.messenger.connect(child.endpoint), [[0, 0, nbytes]]
    peer.write(child.key, a.region, rows).result()
    for _ in range(3):
        assert peer.read(child.key, a.region, rows).result().nbytes == nbytes
    child.kill()
    with pytest.raises(PeerLost):
        peer.read(child.key, a.region, rows).result()


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
    child.kill()
    wait_until(lambda: owner.lost == [("b", 1)], "the loss is reported")


def test_a_peer_that_is_not_there_fails_at_once(make_node: Any, patience: float) -> None:
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
    assert time.monotonic() - started_s < 2.0 * patience
    assert a.lost == [("b", 1)]


def test_an_endpoint_of_an_earlier_incarnation_is_refused(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b", incarnation=2)
    stale = dataclasses.replace(b.endpoint, incarnation=1)
    with pytest.raises(PeerRestarted, match="for an earlier process of this one: get the new endpoint"):
        a.messenger.connect(stale).notify(b"t", b"").result()
    assert b.messenger.counters()["stale_greetings"] == 1
    a.messenger.connect(b.endpoint).notify(b"t", b"").result()


def test_closing_fails_what_is_pending(make_node: Any, make_child: Any, patience: float) -> None:
    a, child = make_node("a", LARGE), make_child("b", LARGE)
    peer = a.messenger.connect(child.endpoint)
    peer.notify(b"t", b"").result()
    child.stop()
    pending = [peer.write(child.key, a.region, [[0, 0, LARGE]]) for _ in range(3)] + [peer.notify(b"t", b"")]
    started_s = time.monotonic()
    a.messenger.close()
    assert time.monotonic() - started_s < 2.0 * patience
    for future in pending:
        with pytest.raises(MessengerClosed):
            future.result()
    with pytest.raises(MessengerClosed):
        peer.notify(b"t", b"").result()
    with pytest.raises(MessengerClosed):
        a.messenger.connect(child.endpoint)

"""Failures of one operation, or of its thread, leave later operations unaffected, and every operation ends."""

import dataclasses
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from messenger import InvalidArgument, PeerUnreachable, Priority, RemoteAccessError
from messenger.frames import Ack, Refused, Write
from messenger.stream import Receiver


def test_background_goes_on_once_all_of_it_that_was_under_way_was_refused(
    make_node: Any, make_child: Any, wait_until: Any, transport: str
) -> None:
    a, b = make_node("a"), make_child("b")
    peer = a.messenger.connect(b.endpoint)
    peer.notify(b"0", b"").result()
    under_way = 1 if transport == "rdma" else 4  # which asks about a key before anything goes under it
    void = dataclasses.replace(b.key, token=b.key.token ^ 1)
    b.stop()
    refused = [peer.write(void, a.region, [[0, 0, 1000]], priority=Priority.BACKGROUND) for _ in range(4)]
    waiting = peer.write(b.key, a.region, [[0, 0, 1000]], priority=Priority.BACKGROUND)
    wait_until(lambda: peer.queued()[Priority.BACKGROUND] == 5 - under_way, "as much is under way as may be")
    b.go_on()
    for one in refused:
        with pytest.raises(RemoteAccessError):
            one.result()
    assert waiting.result().nbytes == 1000


@pytest.mark.transports("tcp")
def test_an_address_that_is_none_makes_an_unreachable_peer(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b")
    nowhere = dataclasses.replace(b.endpoint, tcp_host="a..b")
    for _ in range(2):
        with pytest.raises(PeerUnreachable, match="label empty"):
            a.messenger.connect(nowhere).notify(b"t", b"").result()


@pytest.mark.transports("tcp", "shm")
def test_a_deadline_in_thousands_of_years_stops_no_other_one(make_node: Any, make_child: Any) -> None:
    a, b = make_node("a"), make_child("b")
    peer = a.messenger.connect(b.endpoint)
    peer.notify(b"0", b"", deadline_s=1e300).result()
    b.stop()
    far = peer.notify(b"1", b"", deadline_s=1e12)
    near = peer.notify(b"2", b"", deadline_s=0.1)
    assert near.exception(10) is not None
    b.go_on()
    far.result()


@pytest.mark.transports("tcp", "shm")
def test_an_interrupt_in_the_middle_of_sending_holds_up_nothing(
    make_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_node("a"), make_node("b")
    peer = a.messenger.connect(b.endpoint)
    peer.notify(b"0", b"").result()

    def interrupted(_part: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(peer._streams[0]._requester, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peer.notify(b"1", b"")
    peer.notify(b"2", b"").result()
    assert [tag for _, tag, _ in b.notes] == [b"0", b"1", b"2"]


@pytest.mark.transports("tcp", "shm")
def test_a_connection_for_which_there_is_no_thread_is_made_again(
    make_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_node("a"), make_node("b")
    refused: list[Receiver] = []
    start = Receiver.start

    def start_at_the_third(receiver: Receiver) -> None:
        if len(refused) < 2:
            refused.append(receiver)
            raise RuntimeError("can't start new thread")
        start(receiver)

    monkeypatch.setattr(Receiver, "start", start_at_the_third)
    a.messenger.connect(b.endpoint).notify(b"t", b"").result(30)
    assert len(refused) == a.messenger.counters()["failed_connects"] == 2
    refused.clear()


@pytest.mark.transports("tcp", "shm")
def test_who_waits_on_the_thread_that_is_to_receive_the_answer_is_told(make_node: Any, patience: float) -> None:
    a, b = make_node("a"), make_node("b")
    peer = a.messenger.connect(b.endpoint)
    told: Future[BaseException | None] = Future()

    def wait_within(_done: Any) -> None:
        inner = peer.notify(b"2", b"")
        try:
            inner.result()
        except InvalidArgument as error:
            told.set_result(error)
        else:
            told.set_result(None)

    # The first is answered when somebody is to be told of it; the second, not before its waiter was told.
    b.messenger.on_notify(lambda _node, tag, _payload: (registered if tag == b"1" else told).exception(60 * patience))
    registered: Future[None] = Future()
    try:
        peer.notify(b"1", b"").add_done_callback(wait_within)
    finally:
        registered.set_result(None)
    assert "callback" in str(told.result(60 * patience))


@pytest.mark.transports("tcp")
def test_a_refused_write_stays_refused_when_another_one_is_refused_before_its_last_part(
    make_node: Any, greet: Any
) -> None:
    b = make_node("b", 4096)
    key = b.messenger.grant(b.region, 0, 100, read=True, write=True)
    link = greet(b)

    def write(seq: int, operation: int, offset: int, *, notify: bool = False) -> Any:
        rows = np.array([[offset, 10]], np.int64).tobytes()
        message = Write(seq, operation, key.region_id, key.token, 0, 10, rows, notify, b"t", b"")
        link.send(message, [memoryview(bytes(10))])
        return link.receive()

    assert isinstance(write(1, 1, 0), Ack)
    assert isinstance(write(2, 2, 1000), Refused)
    assert isinstance(write(3, 3, 1000), Refused)
    assert isinstance(write(4, 2, 0, notify=True), Refused)
    assert isinstance(write(5, 1, 0, notify=True), Ack)
    assert len(b.notes) == 1


@pytest.mark.transports("tcp")
def test_a_stream_at_rest_that_cannot_connect_again_fails_nothing_of_another(
    make_node: Any, make_child: Any, wait_until: Any
) -> None:
    a, b = make_node("a", handshake_timeout_s=0.2), make_child("b")
    peer = a.messenger.connect(b.endpoint)
    peer.write(b.key, a.region, [[0, 0, 10]]).result()
    peer.read(b.key, a.region, [[0, 0, 10]]).result()
    b.stop()
    read = peer.read(b.key, a.region, [[0, 0, 10]], deadline_s=600)
    peer._streams[0]._link.cut()
    wait_until(lambda: a.lost == [("b", 1)], "the stream of writes gives up")
    assert not read.done()
    b.go_on()
    assert read.result().nbytes == 10
    assert peer.write(b.key, a.region, [[0, 0, 10]]).result().nbytes == 10

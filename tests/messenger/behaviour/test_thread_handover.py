"""Hand-over between threads: no work is left behind, and no thread waits for itself."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from messenger import InvalidArgument, TransferDeadlineExceeded
from messenger.transport import Requester

WaitUntil = Callable[..., None]


def waits_in_callback(future: Any, inner: Callable[[], Any]) -> "Future[BaseException | None]":
    """Return the result seen by a callback of the future that waits for the end of `inner`."""
    told: Future[BaseException | None] = Future()

    def wait_within(_done: Any) -> None:
        try:
            inner().result()
        except BaseException as error:
            told.set_result(error)
        else:
            told.set_result(None)

    future.add_done_callback(wait_within)
    return told


@pytest.mark.transports("shm")
def test_a_second_step_that_comes_due_while_a_caller_sends_is_taken_when_he_has_sent(
    make_node: Any, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_node("a", streams_per_peer=1), make_node("b")
    b.fill(3)
    peer, key = a.messenger.connect(b.endpoint), b.grant()
    peer.write(key, a.region, [[0, 0, 10]]).result()
    b.messenger._grants.page().withdraw(key)  # as if there were no room for it: readers copy, and ask once more
    stream = peer._streams[0]
    requester = stream._requester
    begin, accept = requester.begin, requester.accept
    sends, asks_again, may_accept = threading.Event(), threading.Event(), threading.Event()

    def begin_slowly(part: Any) -> Any:
        sent = begin(part)
        if part.transfer is None:
            sends.set()
            assert asks_again.wait(60)
        return sent

    def accept_later(part: Any, ack: Any) -> bool:
        assert may_accept.wait(60)
        return bool(accept(part, ack))

    monkeypatch.setattr(requester, "begin", begin_slowly)
    monkeypatch.setattr(requester, "accept", accept_later)
    read = peer.read(key, a.region, [[0, 0, 100]])
    sender = threading.Thread(target=peer.notify, args=(b"t", b"p"))
    sender.start()
    assert sends.wait(60)
    may_accept.set()

    def is_seen() -> bool:
        with stream.lock:
            return len(stream.in_flight.repeats) == 1 and len(stream._changed._waiters) == 1

    wait_until(is_seen, "the read's second step is due, and the sending thread has seen that somebody else sends")
    asks_again.set()
    sender.join()
    assert read.result().nbytes == 100
    assert np.array_equal(a.array[:100], b.array[:100])


@pytest.mark.transports("tcp", "shm")
def test_who_waits_on_the_thread_that_is_to_send_is_told(
    make_node: Any, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_node("a"), make_node("b")
    peer = a.messenger.connect(b.endpoint)
    peer.notify(b"0", b"").result()
    stream = peer._streams[0]
    requester = stream._requester
    registered: Future[None] = Future()
    b.messenger.on_notify(lambda *_: registered.result(60))

    def finish_after_the_answer() -> Any:
        sent = Requester.finish(requester)
        wait_until(lambda: stream.early_answered is not None or stream._closing, "it is answered")
        return sent

    monkeypatch.setattr(requester, "begin", lambda part: Requester.begin(requester, part))
    monkeypatch.setattr(requester, "finish", finish_after_the_answer)
    told = waits_in_callback(peer.notify(b"1", b""), lambda: peer.notify(b"2", b""))
    registered.set_result(None)
    error = told.result(60)
    assert isinstance(error, InvalidArgument)
    assert "callback" in str(error)


@pytest.mark.transports("tcp", "shm")
def test_who_waits_on_the_thread_that_keeps_time_is_told(make_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make_node("a"), make_node("b")
    peer = a.messenger.connect(b.endpoint)
    monkeypatch.setattr(peer._streams[0], "wake_locked", lambda: None)  # it never connects
    late = peer.notify(b"1", b"", deadline_s=0.2)
    told = waits_in_callback(late, lambda: peer.notify(b"2", b"", deadline_s=0.2))
    assert isinstance(told.result(60), InvalidArgument)
    assert isinstance(late.exception(), TransferDeadlineExceeded)

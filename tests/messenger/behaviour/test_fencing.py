"""After a revoke, a deadline or a cancel: the owner's memory stays as the owner left it, and nobody is told."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from messenger import (
    RemoteAccessError,
    TransferDeadlineExceeded,
)
from messenger.frames import Write, encode

NBYTES = 1 << 16


def send_for_ever(sock: socket.socket, data: bytes) -> None:
    while True:
        sock.sendall(data)


def test_nothing_lands_after_revoke_returned(make_node: Any, fewer: Callable[[int], int]) -> None:
    nbytes = fewer(8) << 20
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    peer = a.messenger.connect(b.endpoint)
    for round_number in range(5):
        key = b.grant()
        a.array[:] = 1
        writes = [peer.write(key, a.region, [[0, 0, nbytes]]) for _ in range(6)]
        writes[0].result()
        b.messenger.revoke(key)
        b.array[:] = 100 + round_number
        outcomes = [write.exception() for write in writes]
        assert set(np.unique(b.array).tolist()) == {100 + round_number}
        assert outcomes[0] is None
        assert all(outcome is None or isinstance(outcome, RemoteAccessError) for outcome in outcomes)


def test_reads_that_were_confirmed_saw_only_what_was_there_before_the_revoke(make_node: Any) -> None:
    nbytes = 4 << 20
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    peer = a.messenger.connect(b.endpoint)
    for _ in range(10):
        key = b.grant()
        b.array[:] = 1
        peer.read(key, a.region, [[0, 0, 10]]).result()
        read = peer.read(key, a.region, [[0, 0, nbytes]])
        b.messenger.revoke(key)
        b.array[:] = 2
        if read.exception() is None:
            assert set(np.unique(a.array).tolist()) == {1}
        else:
            assert isinstance(read.exception(), RemoteAccessError)


@pytest.mark.transports("tcp")
def test_revoke_cuts_a_write_that_is_stuck_in_the_middle(make_node: Any, greet: Any) -> None:
    owner = make_node("b", NBYTES, revoke_grace_s=0.05)
    key = owner.grant()
    sock = greet(owner)._sock
    rows = np.array([[0, 1000]], dtype=np.int64).tobytes()
    sock.sendall(encode(Write(1, 1, key.region_id, key.token, 0, 1000, rows, False, b"", b"")) + b"\x05" * 400)
    deadline_s = time.monotonic() + 10
    while owner.array[399] != 5:
        assert time.monotonic() < deadline_s
    assert owner.messenger.validate()
    started_s = time.monotonic()
    owner.messenger.revoke(key)
    assert 0.04 < time.monotonic() - started_s < 2.0
    owner.array[:] = 8
    with pytest.raises(OSError):
        send_for_ever(sock, b"\x06" * 100)
    assert set(owner.array.tolist()) == {8}


def test_revoking_while_others_write_disturbs_only_the_revoked(make_node: Any, fewer: Callable[[int], int]) -> None:
    count = fewer(500)
    a, b = make_node("a", NBYTES), make_node("b", NBYTES)
    a.array[:] = 3
    peer, lasting = a.messenger.connect(b.endpoint), b.grant()
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            b.messenger.revoke(b.messenger.grant(b.region, 0, 10, read=True, write=True))

    thread = threading.Thread(target=churn)
    thread.start()
    for future in [peer.write(lasting, a.region, [[i, i, 1]]) for i in range(count)]:
        future.result()
    stop.set()
    thread.join()
    assert b.array[: count + 1].tolist() == [3] * count + [0]


@pytest.mark.transports("tcp", "shm")
@pytest.mark.parametrize("verb", ["write_notify", "notify"])
def test_a_small_request_that_missed_its_deadline_takes_no_effect_when_the_peer_goes_on(
    make_node: Any, make_child: Any, verb: str
) -> None:
    """It lies in the peer's socket complete, so only the owner can still tell that nobody waits for it."""
    a, child = make_node("a", 1 << 20), make_child("b")
    a.array[:] = 1
    peer = a.messenger.connect(child.endpoint)
    peer.write(child.key, a.region, [[0, 0, 10]]).result()
    child.stop()
    what = (child.key, a.region, [[0, 0, 1000]]) if verb == "write_notify" else ()
    with pytest.raises(TransferDeadlineExceeded):
        getattr(peer, verb)(*what, b"late", b"", deadline_s=0.2).result()
    child.go_on()
    peer.notify(b"in time", b"").result()
    assert child.ask("notes") == ["in time"]
    assert child.ask("sum") == 10


def test_what_missed_its_deadline_changes_nothing_after_the_revoke(make_node: Any, make_child: Any) -> None:
    a, child = make_node("a", 1 << 20), make_child("b")
    a.array[:] = 1
    peer, rows = a.messenger.connect(child.endpoint), [[0, 0, 1 << 20]]
    peer.write(child.key, a.region, rows).result()
    child.stop()
    late = [peer.write_notify(child.key, a.region, rows, b"late", b"", deadline_s=0.3) for _ in range(4)]
    for future in late:
        with pytest.raises(TransferDeadlineExceeded):
            future.result()
    child.go_on()
    child.ask("revoke")
    child.ask("fill 9")
    with pytest.raises(RemoteAccessError, match="revoked"):
        peer.write_notify(child.key, a.region, rows, b"refused", b"").result()
    peer.notify(b"in time", b"").result()
    assert child.ask("sum") == 9 << 20
    assert child.ask("notes") == ["in time"]


@pytest.mark.parametrize("end", ["goes on", "dies"])
def test_a_writer_frozen_in_the_middle_holds_up_no_revoke_and_changes_nothing_after_it(
    make_node: Any, make_child: Any, wait_until: Callable[..., None], end: str
) -> None:
    nbytes = 2 << 20
    owner, child = make_node("a", nbytes, revoke_grace_s=0.05), make_child("b", nbytes)
    key, lasting = owner.grant(), owner.grant()
    child.ask("fill 5")
    child.ask(f"pour {key.pack().hex()} {owner.endpoint_json}")
    wait_until(lambda: bool(owner.array.any()), "the first bytes have landed")
    child.stop()
    owner.messenger.revoke(key)
    owner.array[:] = 9
    if end == "dies":
        child.kill()
        wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 0, "the connection has ended")
    else:
        child.go_on()
        assert set(child.ask("outcomes")) <= {"done", "RemoteAccessError"}
        child.ask("fill 9")
        child.ask(f"pour {lasting.pack().hex()} {owner.endpoint_json}")
        assert set(child.ask("outcomes")) == {"done"}
    assert set(np.unique(owner.array).tolist()) == {9}

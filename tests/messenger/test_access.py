"""What a peer may touch, and that nothing touches memory once its key is revoked."""

import dataclasses
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest

from messenger import InvalidArgument, MessengerConfig, RemoteAccessError, RemoteKey
from messenger.frames import Ack, Hello, Refused, Welcome, Write, encode
from messenger.sockets import SocketLink

NBYTES = 1 << 16


def send_for_ever(sock: socket.socket, data: bytes) -> None:
    while True:
        sock.sendall(data)


@pytest.fixture
def pair(make_node: Any) -> Any:
    a, b = make_node("a", NBYTES), make_node("b", NBYTES)
    a.array[:], b.array[:] = 1, 2
    return a, b


def test_a_key_survives_packing(pair: Any) -> None:
    key = pair[1].messenger.grant(pair[1].region, 5, 10, read=True, write=False)
    assert RemoteKey.unpack(key.pack()) == key
    with pytest.raises(InvalidArgument):
        RemoteKey.unpack(key.pack()[:-1])
    with pytest.raises(InvalidArgument, match="rights"):
        RemoteKey.unpack(key.pack()[:-1] + b"\x09")


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_key_that_was_never_granted_is_refused_and_touches_nothing(pair: Any, verb: str) -> None:
    a, b = pair
    forged = dataclasses.replace(b.grant(), token=12345)
    with pytest.raises(RemoteAccessError, match="unknown or revoked") as caught:
        getattr(a.messenger.connect(b.endpoint), verb)(forged, a.region, [[0, 0, NBYTES]]).result()
    assert caught.value.peer == "b"
    assert caught.value.acknowledged_nbytes == 0
    assert set(a.array.tolist()) == {1}
    assert set(b.array.tolist()) == {2}
    assert b.messenger.counters()["accesses_denied"] == 1


def test_a_key_without_the_right_is_refused(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    with pytest.raises(RemoteAccessError, match="right to write"):
        peer.write(b.grant(write=False), a.region, [[0, 0, 10]]).result()
    with pytest.raises(RemoteAccessError, match="right to read"):
        peer.read(b.grant(read=False), a.region, [[0, 0, 10]]).result()
    assert set(b.array.tolist()) == {2}
    assert set(a.array.tolist()) == {1}


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 10), (95, 10), (199, 2), (NBYTES - 1, 1), (1 << 62, 1)])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_slices_outside_the_window_are_refused_even_when_the_key_is_widened(
    pair: Any, verb: str, offset: int, nbytes: int
) -> None:
    a, b = pair
    key = b.messenger.grant(b.region, 100, 100, read=True, write=True)
    widened = dataclasses.replace(key, offset=0, nbytes=NBYTES)
    with pytest.raises(RemoteAccessError, match="out of bounds"):
        getattr(a.messenger.connect(b.endpoint), verb)(widened, a.region, [[0, offset, nbytes]]).result()
    assert set(b.array.tolist()) == {2}
    assert set(a.array.tolist()) == {1}


def test_a_refused_operation_does_not_notify_and_the_next_one_works(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    key = b.messenger.grant(b.region, 0, 100, read=True, write=True)
    bad = peer.write_notify(key, a.region, [[0, 0, 100], [0, 100, 100]], b"bad", b"")
    good = peer.write_notify(key, a.region, [[0, 0, 100]], b"good", b"")
    with pytest.raises(RemoteAccessError):
        bad.result()
    assert good.result().nbytes == 100
    assert [tag for _, tag, _ in b.notes] == [b"good"]


def test_a_batch_with_one_refused_part_does_not_notify(make_node: Any) -> None:
    nbytes = 20 << 20
    a, b = make_node("a", nbytes), make_node("b", nbytes)
    key = b.messenger.grant(b.region, 10 << 20, 10 << 20, read=True, write=True)
    # Only the first of the parts is out of the window.
    rows = [[0, 0, 8 << 20], [10 << 20, 10 << 20, 10 << 20]]
    with pytest.raises(RemoteAccessError):
        a.messenger.connect(b.endpoint).write_notify(key, a.region, rows, b"t", b"").result()
    a.messenger.connect(b.endpoint).notify(b"end", b"").result()
    assert [tag for _, tag, _ in b.notes] == [b"end"]


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_revoked_key_is_refused(pair: Any, verb: str) -> None:
    a, b = pair
    key, other = b.grant(), b.grant()
    peer = a.messenger.connect(b.endpoint)
    transfer = getattr(peer, verb)
    assert transfer(key, a.region, [[0, 0, 10]]).result().nbytes == 10
    b.messenger.revoke(key)
    b.messenger.revoke(key)
    b.array[100:] = 7
    with pytest.raises(RemoteAccessError, match="revoked"):
        transfer(key, a.region, [[0, 100, 10]]).result()
    assert b.array[100:110].tolist() == [7] * 10
    assert transfer(other, a.region, [[0, 100, 10]]).result().nbytes == 10


def test_a_deregistered_region_takes_its_keys_with_it(pair: Any) -> None:
    a, b = pair
    key = b.grant()
    b.messenger.deregister(b.region)
    with pytest.raises(RemoteAccessError):
        a.messenger.connect(b.endpoint).write(key, a.region, [[0, 0, 10]]).result()
    with pytest.raises(InvalidArgument, match="not registered"):
        b.messenger.grant(b.region, 0, 10, read=True, write=False)
    assert b.messenger.counters()["regions_open"] == b.messenger.counters()["grants_open"] == 0


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 10), (0, 0), (0, NBYTES + 1), (NBYTES, 1)])
def test_a_window_outside_the_region_cannot_be_granted(pair: Any, offset: int, nbytes: int) -> None:
    with pytest.raises(InvalidArgument, match="window"):
        pair[0].messenger.grant(pair[0].region, offset, nbytes, read=True, write=True)


def test_a_grant_without_rights_cannot_be_made(pair: Any) -> None:
    with pytest.raises(InvalidArgument, match="right"):
        pair[0].grant(read=False, write=False)


def test_nothing_lands_after_revoke_returned(make_node: Any) -> None:
    nbytes = 8 << 20
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
def test_revoke_cuts_a_write_that_is_stuck_in_the_middle(make_node: Any) -> None:
    owner = make_node("b", NBYTES, revoke_grace_s=0.05)
    key = owner.grant()
    sock = socket.create_connection((owner.endpoint.tcp_host, owner.endpoint.tcp_port))
    link = SocketLink(sock, "owner")
    link.send(Hello("raw", 9, "b", 1, b"s" * 16, "tcp"))
    assert isinstance(link.receive(), Welcome)
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
    link.close()


@pytest.mark.transports("tcp")
def test_a_refused_payload_is_passed_over(make_node: Any) -> None:
    owner = make_node("b", NBYTES)
    key = owner.messenger.grant(owner.region, 0, 100, read=False, write=True)
    sock = socket.create_connection((owner.endpoint.tcp_host, owner.endpoint.tcp_port))
    link = SocketLink(sock, "owner")
    link.send(Hello("raw", 9, "b", 1, b"s" * 16, "tcp"))
    assert isinstance(link.receive(), Welcome)
    payload = memoryview(b"\x05" * 200_000)
    for seq, (token, offset, nbytes) in enumerate([(1, 0, 200_000), (key.token, 50, 51), (key.token, 50, 50)], start=1):
        rows = np.array([[offset, nbytes]], dtype=np.int64).tobytes()
        link.send(Write(seq, seq, key.region_id, token, 0, nbytes, rows, False, b"", b""), [payload[:nbytes]])
    assert [type(link.receive()) for _ in range(3)] == [Refused, Refused, Ack]
    assert owner.array[:101].tolist() == [0] * 50 + [5] * 50 + [0]
    link.close()


def test_revoking_while_others_write_disturbs_only_the_revoked(make_node: Any) -> None:
    a, b = make_node("a", NBYTES), make_node("b", NBYTES)
    a.array[:] = 3
    peer, lasting = a.messenger.connect(b.endpoint), b.grant()
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            b.messenger.revoke(b.messenger.grant(b.region, 0, 10, read=True, write=True))

    thread = threading.Thread(target=churn)
    thread.start()
    for future in [peer.write(lasting, a.region, [[i, i, 1]]) for i in range(500)]:
        future.result()
    stop.set()
    thread.join()
    assert b.array[:501].tolist() == [3] * 500 + [0]


def test_config_that_cannot_work_is_named() -> None:
    for wrong in (
        {"transport": "pigeon"},
        {"tcp_port": 70000},
        {"streams_per_peer": 0},
        {"default_deadline_s": 0.0},
        {"listen_host": "0.0.0.0"},
    ):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            MessengerConfig(**wrong)  # type: ignore[arg-type]

"""Garbage on the messenger's sockets: that connection is closed with a logged reason, and nobody else notices."""

import fcntl
import logging
import os
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messenger import SharedMemory
from messenger.frames import (
    MAGIC,
    MAX_BODY_NBYTES,
    MAX_PART_NBYTES,
    PREFIX,
    REJECTIONS,
    VERSION,
    Ack,
    ConnectionReject,
    Hello,
    Notify,
    Offer,
    Read,
    Welcome,
    Write,
    encode,
)
from messenger.link import Link
from messenger.sockets import SocketLink

HELLO = Hello("raw", 9, "b", 1, b"s" * 16, "tcp")
KIND_OF_HELLO, KIND_OF_NOTIFY = encode(HELLO)[5], encode(Notify(1, b"", b""))[5]


def prefixed(kind: int, body: bytes) -> bytes:
    return PREFIX.pack(MAGIC, VERSION, kind, 0, len(body)) + body


def rows(*values: tuple[int, ...]) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


@pytest.fixture
def owner(make_node: Any) -> Any:
    return make_node("b", 4096, handshake_timeout_s=0.5, max_connections_per_peer=256)


@pytest.fixture
def dial(owner: Any, transport: str, patience: float) -> Iterator[Callable[[], socket.socket]]:
    """Raw connections to the owner."""
    sockets: list[socket.socket] = []

    def connect() -> socket.socket:
        if transport == "shm":
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(owner.endpoint.shm_socket)
        else:
            sock = socket.create_connection((owner.endpoint.tcp_host, owner.endpoint.tcp_port))
        sock.settimeout(10 * patience)
        sockets.append(sock)
        return sock

    yield connect
    for sock in sockets:
        sock.close()


def ends(link: Link) -> str:
    """The reason of the rejection after which the owner closed."""
    reject = link.receive()
    assert isinstance(reject, ConnectionReject)
    with pytest.raises(OSError):
        link.receive()
    return reject.reason


GREETINGS = {
    "http": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "not this protocol: a frame must begin with b'MPMS', got b'GET '"),
    "another version": (
        PREFIX.pack(MAGIC, VERSION + 1, KIND_OF_HELLO, 0, 10) + bytes(10),
        f"protocol version {VERSION + 1}, but this side has {VERSION}",
    ),
    "an unknown kind": (prefixed(99, b""), "unknown kind of frame: 99"),
    "a body over the limit": (
        PREFIX.pack(MAGIC, VERSION, KIND_OF_HELLO, 0, MAX_BODY_NBYTES + 1),
        f"body of {MAX_BODY_NBYTES + 1} bytes is over the limit of {MAX_BODY_NBYTES}",
    ),
    "a body that is no msgpack": (prefixed(KIND_OF_HELLO, b"\xc1" * 20), "a Hello frame is not valid msgpack"),
    "a body cut short": (
        prefixed(KIND_OF_HELLO, msgpack.packb(tuple(HELLO))[:-3]),
        "a Hello frame is not valid msgpack",
    ),
    "too few fields": (prefixed(KIND_OF_HELLO, msgpack.packb(["raw", 9])), "fields of the wrong number or type"),
    "fields of the wrong type": (
        prefixed(KIND_OF_HELLO, msgpack.packb([1, "x", 2, 3, 4])),
        "fields of the wrong number or type",
    ),
    "a map": (prefixed(KIND_OF_HELLO, msgpack.packb({"a": 1})), "fields of the wrong number or type"),
    "a request before the greeting": (encode(Notify(1, b"t", b"p")), "must begin with Hello, got Notify"),
}


@pytest.mark.parametrize(("greeting", "logged"), GREETINGS.values(), ids=GREETINGS.keys())
def test_a_malformed_greeting_is_rejected_with_a_fixed_reason_and_its_details_are_logged(
    owner: Any, dial: Any, greeting: bytes, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    sock = dial()
    sock.sendall(greeting)
    reason = ends(SocketLink(sock, "owner"))
    assert owner.messenger.counters()["malformed_frames"] == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert reason == REJECTIONS["malformed"]
    assert logged in caplog.text


REQUESTS = {
    "rows that are no rows": Write(1, 1, 1, 1, 0, 8, b"12345678", False, b"", b""),
    "lengths that do not add up": Read(1, 1, 1, 8, rows((0, 4), (8, 3))),
    "a negative length": Read(1, 1, 1, -4, rows((0, -4))),
    "no rows": Read(1, 1, 1, 0, b""),
    "more than a part": Read(1, 1, 1, MAX_PART_NBYTES + 1, rows((0, MAX_PART_NBYTES + 1))),
    "lengths that overflow": Read(1, 1, 1, 0, rows((0, 1 << 62), (0, 1 << 62), (0, 1 << 62), (0, 1 << 62))),
    "an answer": Ack(1, 0),
    "a second greeting": HELLO,
    "an offer without a descriptor": Offer(1, 4096),
    "a write from memory is not offered": Write(1, 1, 1, 1, 5, 4, rows((0, 0, 4)), False, b"", b""),
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
def test_a_malformed_request_ends_its_connection_and_no_other(
    owner: Any, make_node: Any, greet: Any, request_: Any
) -> None:
    good = make_node("a", 4096)
    good.array[:] = 6
    peer, key = good.messenger.connect(owner.endpoint), owner.grant()
    peer.write(key, good.region, [[0, 0, 100]]).result()
    link = greet(owner)
    link.send(request_)
    ends(link)
    assert owner.messenger.counters()["malformed_frames"] == 1
    peer.write_notify(key, good.region, [[0, 100, 100]], b"t", b"").result()
    assert good.messenger.counters()["connects"] == 1
    assert owner.array.tolist() == [6] * 200 + [0] * (4096 - 200)


OVERSIZE = {
    "a body over the limit": (Notify(1, b"", b""), MAX_BODY_NBYTES + 1),
    "a body as long as can be told": (Write(1, 1, 1, 1, 0, 8, b"", False, b"", b""), (1 << 32) - 1),
}


@pytest.mark.transports("tcp", "shm")
@pytest.mark.parametrize(("frame", "nbytes"), OVERSIZE.values(), ids=OVERSIZE.keys())
def test_a_request_that_announces_too_much_ends_its_connection_before_room_is_made_for_it(
    owner: Any, greet: Any, frame: Any, nbytes: int
) -> None:
    link = greet(owner)
    tracemalloc.start()
    try:
        link._sock.sendall(PREFIX.pack(MAGIC, VERSION, encode(frame)[5], 0, nbytes))
        assert "over the limit" in ends(link)
        assert tracemalloc.get_traced_memory()[1] < MAX_BODY_NBYTES
    finally:
        tracemalloc.stop()
    assert owner.messenger.counters()["malformed_frames"] == 1


def test_noise_never_harms(owner: Any, dial: Any, greet: Any, transport: str, fewer: Callable[[int], int]) -> None:
    @settings(max_examples=fewer(40), deadline=None)
    @given(noise=st.binary(max_size=400), after_greeting=st.booleans(), dressed=st.booleans())
    def check(noise: bytes, after_greeting: bool, dressed: bool) -> None:
        sock = dial()
        if after_greeting:
            link = SocketLink(sock, "owner")
            link.send(HELLO._replace(transport=transport))
            assert isinstance(link.receive(), Welcome)
        sock.sendall(prefixed(noise[0] % 12 if noise else 0, noise[1:]) if dressed else noise)
        sock.close()
        link = greet(owner)
        link.send(Notify(1 << 60, b"alive", b""))
        assert isinstance(link.receive(), Ack)
        assert not owner.array.any()

    check()


def test_a_connection_that_never_greets_is_closed(owner: Any, dial: Any, wait_until: Callable[..., None]) -> None:
    assert dial().recv(1) == b""
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 0, "the connection has ended")


@pytest.mark.transports("tcp", "shm")
def test_a_frame_cut_off_in_the_middle_ends_quietly(
    owner: Any, greet: Any, wait_until: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    link = greet(owner)
    link._sock.sendall(encode(Notify(1, b"t", b"p"))[:-1])
    link.cut()
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 0, "the connection has ended")
    assert owner.notes == []
    assert not [record for record in caplog.records if "closed the" in record.message]


@pytest.mark.transports("shm")
@pytest.mark.parametrize("what", ["a pipe", "unsealed memory", "memory of another size"])
def test_a_descriptor_that_is_no_sealed_memory_is_refused(owner: Any, greet: Any, what: str) -> None:
    """Memory that its owner could shrink would kill this process with SIGBUS."""
    if what == "a pipe":
        fd, other = os.pipe()
        os.close(other)
    else:
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        if what == "memory of another size":
            fcntl.fcntl(fd, 1033, 2 | 4)
    link = greet(owner)
    link.send(Offer(1, 8192 if what == "memory of another size" else 4096), fd=fd)
    os.close(fd)
    assert "offered" in ends(link)


@pytest.fixture
def offered_fd() -> Iterator[int]:
    """4096 bytes that may be offered."""
    memory = SharedMemory.create(4096, "offered")
    yield memory.fd
    memory.close()


@pytest.mark.transports("shm")
@pytest.mark.parametrize("number", [0, -1, 1 << 63])
def test_an_offer_under_no_number_of_a_region_is_refused(owner: Any, greet: Any, offered_fd: int, number: int) -> None:
    link = greet(owner)
    link.send(Offer(number, 4096), fd=offered_fd)
    assert "not a valid number" in ends(link)


@pytest.mark.transports("shm")
def test_nothing_is_written_from_memory_that_was_withdrawn(owner: Any, greet: Any, offered_fd: int) -> None:
    key = owner.grant()
    link = greet(owner)
    row = struct.pack("<3q", 0, 0, 4096)
    link.send(Offer(7, 4096), fd=offered_fd)
    link.send(Write(1, 1, key.region_id, key.token, 7, 4096, row, False, b"", b""))
    assert link.receive() == Ack(1, 4096)
    owner.array[:] = 9
    link.send(Offer(7, 0))
    link.send(Write(2, 2, key.region_id, key.token, 7, 4096, row, False, b"", b""))
    assert "is not offered" in ends(link)
    assert (owner.array == 9).all()


@pytest.mark.transports("shm")
def test_descriptors_without_offers_do_not_pile_up(owner: Any, greet: Any, wait_until: Callable[..., None]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    link = greet(owner)
    read_end, write_end = os.pipe()
    frame = encode(Notify(1, b"", b""))
    try:
        for _ in range(8):
            socket.send_fds(link._sock, [frame], [read_end] * 20)
        while True:
            link.receive()
    except OSError:
        pass
    os.close(read_end)
    os.close(write_end)
    assert owner.messenger.counters()["malformed_frames"] == 1
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 0, "the connection has ended")
    assert len(os.listdir("/proc/self/fd")) == before + 1  # this side of the connection


def test_prefixes_are_twelve_bytes() -> None:
    """The wire's layout, spelled out: another implementation must find it here."""
    frame = encode(Notify(3, b"t", b"p"))
    magic, version, kind, zero, length = struct.unpack("<4sBBHI", frame[:12])
    assert (magic, version, kind, zero, length) == (b"MPMS", 5, 5, 0, len(frame) - 12)
    assert frame[12:] == struct.pack("<qII", 3, 1, 1) + b"tp"

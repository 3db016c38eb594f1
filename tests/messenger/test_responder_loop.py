"""The compiled owner loop does what the Python path does, for whatever a caller sends, and keeps the fence."""

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from messenger import RemoteKey, SharedMemory
from messenger.frames import (
    PREFIX,
    Ack,
    ConnectionReject,
    Hello,
    Message,
    Notify,
    Offer,
    Read,
    Refused,
    Welcome,
    Write,
    encode,
)
from messenger.inbound import InboundConnection
from messenger.link import LinkClosed
from messenger.native.responder_loop import MAX_BUFFER_NBYTES, CompiledLoop
from messenger.sessions import Session
from messenger.shm.grant_page import PAGE_ID
from messenger.shm.transport import ShmResponder
from messenger.sockets import SocketLink
from messenger.tcp.transport import TcpResponder

pytestmark = pytest.mark.transports("tcp", "shm")

NBYTES = 4096
LAST = Notify(1 << 61, b"last", b"")


def rows(*values: tuple[int, ...]) -> bytes:
    return np.array(values, dtype=np.int64).tobytes()


class Caller:
    """A greeted connection that sends what it likes, and reads what is answered."""

    def __init__(self, owner: Any, transport: str, source: SharedMemory, session: bytes | None = None) -> None:
        if transport == "tcp":
            self.sock = socket.create_connection((owner.endpoint.tcp_host, owner.endpoint.tcp_port))
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(owner.endpoint.shm_socket)
        self.link = SocketLink(self.sock, "owner")
        self.link.set_timeout(60)
        session = secrets.token_bytes(16) if session is None else session
        self.link.send(Hello("raw", 9, "b", 1, session, transport))
        assert isinstance(self.link.receive(), Welcome)
        if transport == "shm":
            self.link.send(Offer(1, source.nbytes), fd=source.fd)

    def answers(self) -> list[Message]:
        """Up to the one for LAST, or the end of the connection; what was read, as bytes behind its Ack."""
        answers: list[Message] = []
        try:
            while True:
                answers.append(self.link.receive())
                if isinstance(answers[-1], ConnectionReject) or answers[-1] == Ack(LAST.seq, 0):
                    break
                if self.link.is_unix and isinstance(answers[-1], Offer):
                    os.close(self.link.take_fd())
                    if answers[-1].region_id == PAGE_ID:  # offered with a compiled loop alone
                        answers.pop()
                elif not self.link.is_unix and isinstance(answers[-1], Ack) and answers[-1].seq >= 1 << 32:
                    data = bytearray(answers[-1].nbytes)
                    self.link.receive_into([memoryview(data)] if data else [])
                    answers.append(Refused(0, data.hex()))
        except LinkClosed:
            pass
        return answers

    def close(self) -> None:
        self.link.close()


@pytest.fixture
def source() -> Iterator[SharedMemory]:
    memory = SharedMemory.create(1 << 20, "source")
    memory.array[:] = np.arange(1 << 20) % 251
    yield memory
    memory.close()


@pytest.fixture
def owners(make_node: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, transport: str) -> dict[str, Any]:
    """Two nodes of the same name: one has compiled loops, the other has none."""
    (tmp_path / "python").mkdir()
    compiled, python = make_node("b", NBYTES), make_node("b", NBYTES, shm_dir=tmp_path / "python")
    for kind in (TcpResponder, ShmResponder):

        def compiled_loop(self: Any, grants: Any, *rest: Any, lane: Any = kind.compiled_loop) -> CompiledLoop | None:
            return None if grants is python.messenger._grants else lane(self, grants, *rest)

        monkeypatch.setattr(kind, "compiled_loop", compiled_loop)
    return {"compiled": compiled, "python": python}


good_windows = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 1000)), min_size=1, max_size=4)
hostile_windows = st.lists(
    st.tuples(
        st.sampled_from([0, 8, 100, 4000, 4095, 4096, -1, 1 << 62, -(1 << 63)]),
        st.sampled_from([0, 1, 7, 96, 100, 1000, 4096, -1, 1 << 62, (1 << 63) - 1]),
    ),
    min_size=0,
    max_size=4,
)
seqs = st.sampled_from([*range(1, 13), 0, -1])
operations = st.integers(0, 3)
KEYS = ("all", "window", "read only", "write only", "revoked", "forged", "other region")
note = st.binary(max_size=5)


class Step(NamedTuple):
    """A message with the name of a key instead of the key."""

    message: Message
    key: str = ""
    payload_nbytes: int = 0
    flipped: int = -1  # this byte of the frame is another, if it has as many


@st.composite
def steps(draw: Callable[..., Any], transport: str) -> Step:
    kind = draw(st.sampled_from(["write"] * 4 + ["notify", "read", "ack"]))
    flipped = draw(st.sampled_from([-1] * 60 + [0, 4, 5, 6, 12, 30, 60, 64, 70, 80]))
    seq, key = draw(seqs), draw(st.sampled_from(("all",) * 6 + KEYS))
    if kind == "notify":
        return Step(Notify(seq, draw(note), draw(note)), flipped=flipped)
    if kind == "ack":
        return Step(Ack(seq, 0))
    window = draw(st.one_of(good_windows, good_windows, hostile_windows))
    total = sum(nbytes for _, nbytes in window) + draw(st.sampled_from([0] * 14 + [1]))
    nbytes = total if abs(total) < 1 << 40 else 0
    if kind == "read":
        return Step(Read((1 << 32) + 1 + seq, 0, 0, nbytes, rows(*window)), key, flipped=flipped)
    packed = rows(*window) if transport == "tcp" else rows(*((at % 5000, at, size) for at, size in window))
    source_id = 0 if transport == "tcp" else draw(st.sampled_from([1] * 9 + [2]))
    write = Write(seq, draw(operations), 0, 0, source_id, nbytes, packed, draw(st.booleans()), draw(note), draw(note))
    return Step(
        write, key, payload_nbytes=nbytes if transport == "tcp" and 0 <= nbytes < 10_000 else 0, flipped=flipped
    )


def frame(step: Step, keys: dict[str, RemoteKey]) -> bytes:
    message = step.message
    if isinstance(message, Write | Read):
        message = message._replace(region_id=keys[step.key].region_id, token=keys[step.key].token)
    encoded = bytearray(encode(message))
    if step.flipped in range(len(encoded)):
        encoded[step.flipped] ^= 1
    return bytes(encoded) + bytes(range(256)) * (step.payload_nbytes // 256) + bytes(step.payload_nbytes % 256)


def keys_of(owner: Any) -> dict[str, RemoteKey]:
    messenger, region = owner.messenger, owner.region
    keys = {"all": owner.grant(), "window": messenger.grant(region, 8, 100, read=True, write=True)}
    keys |= {"read only": owner.grant(write=False), "write only": owner.grant(read=False), "revoked": owner.grant()}
    messenger.revoke(keys["revoked"])
    keys["forged"] = RemoteKey(region.region_id, 12345, 0, NBYTES, True, True)
    keys["other region"] = RemoteKey(7, keys["all"].token, 0, NBYTES, True, True)
    return keys


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_both_paths_answer_alike_and_leave_the_same_memory(
    owners: dict[str, Any], transport: str, source: SharedMemory, data: st.DataObject
) -> None:
    script = [*data.draw(st.lists(steps(transport), max_size=8), label="steps"), Step(LAST)]
    at_once = data.draw(st.booleans(), label="in one piece")
    seen: dict[str, Any] = {}
    for name, owner in owners.items():
        owner.array[:] = 0
        owner.notes.clear()
        before = owner.messenger.counters()
        keys = keys_of(owner)
        frames = [frame(step, keys) for step in script]
        with contextlib.closing(Caller(owner, transport, source)) as caller:
            with contextlib.suppress(OSError):  # it has hung up
                for piece in [b"".join(frames)] if at_once else [part for one in frames for part in (one[:9], one[9:])]:
                    caller.sock.sendall(piece)
            answers = caller.answers()
        for key in keys.values():
            owner.messenger.revoke(key)
        after = owner.messenger.counters()
        counted = {
            name: after.get(name, 0) - before.get(name, 0)
            for name in {*before, *after}
            if name.startswith(("bytes_", "slices_", "accesses", "malformed", "notifies"))
        }
        seen[name] = answers, owner.notes.copy(), owner.array.tobytes(), {k: n for k, n in counted.items() if n}
    assert seen["compiled"] == seen["python"]


def test_requests_in_perfect_order_never_come_to_python(
    owners: dict[str, Any], transport: str, source: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = owners["compiled"]
    taken: list[str] = []
    handle = InboundConnection._handle

    def seen(self: InboundConnection, session: Session, message: Message) -> None:
        taken.append(type(message).__name__)
        handle(self, session, message)

    monkeypatch.setattr(InboundConnection, "_handle", seen)
    caller, key = Caller(owner, transport, source), owner.grant()
    row, source_id = ((100, 10), 0) if transport == "tcp" else ((0, 100, 10), 1)
    for seq in (1, 2):
        write = Write(seq, seq, key.region_id, key.token, source_id, 10, rows(row), seq == 2, b"t", b"p")
        caller.sock.sendall(encode(write) + (b"\x05" * 10 if transport == "tcp" else b""))
    caller.sock.sendall(encode(LAST))
    assert caller.answers() == [Ack(1, 10), Ack(2, 10), Ack(LAST.seq, 0)]
    assert owner.notes == [("raw", b"t", b"p"), ("raw", b"last", b"")]
    assert taken == (["Offer"] if transport == "shm" else [])
    assert owner.messenger.counters()[f"bytes_landed_{transport}"] == 20
    caller.close()


@pytest.mark.parametrize("note_nbytes", [100, 100_000, MAX_BUFFER_NBYTES - 2000, MAX_BUFFER_NBYTES - 10])
def test_long_frames_are_taken_whole(
    owners: dict[str, Any], transport: str, source: SharedMemory, note_nbytes: int
) -> None:
    owner = owners["compiled"]
    caller = Caller(owner, transport, source)
    caller.link.set_timeout(None)
    caller.link.send(Notify(1, b"t", bytes(note_nbytes)))
    caller.link.send(LAST)
    assert caller.answers() == [Ack(1, 0), Ack(LAST.seq, 0)]
    assert [(tag, len(payload)) for _, tag, payload in owner.notes] == [(b"t", note_nbytes), (b"last", 0)]
    caller.close()


def test_a_notify_whose_caller_left_is_not_done_and_is_delivered_to_the_next_connection(
    owners: dict[str, Any], transport: str, source: SharedMemory, wait_until: Callable[..., None]
) -> None:
    """The caller repeats what was not acknowledged; it must not find it done already."""
    owner, session = owners["compiled"], b"s" * 16
    held, entered = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        entered.set()
        held.wait(60)

    owner.messenger._notify_handlers.insert(0, hold)
    first = Caller(owner, transport, source, session)
    first.sock.sendall(encode(Notify(1, b"one", b"")) + encode(Notify(2, b"two", b"")))
    assert entered.wait(60)
    first.close()
    held.set()
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 0, "the connection has ended")
    assert [tag for _, tag, _ in owner.notes] == [b"one"]
    second = Caller(owner, transport, source, session)
    second.sock.sendall(encode(Notify(1, b"one", b"")) + encode(Notify(2, b"two", b"")) + encode(LAST))
    assert second.answers() == [Ack(1, 0), Ack(2, 0), Ack(LAST.seq, 0)]
    assert [tag for _, tag, _ in owner.notes] == [b"one", b"two", b"last"]
    second.close()


def test_more_grants_than_the_loops_can_see_all_work(
    owners: dict[str, Any], transport: str, source: SharedMemory
) -> None:
    owner = owners["compiled"]
    caller = Caller(owner, transport, source)
    keys = [owner.grant() for _ in range(9000)]
    row, source_id = ((0, 1), 0) if transport == "tcp" else ((0, 0, 1), 1)
    sent = keys[::9]
    for seq, key in enumerate(sent, start=1):
        write = Write(seq, seq, key.region_id, key.token, source_id, 1, rows(row), False, b"", b"")
        caller.sock.sendall(encode(write) + (b"\x05" if transport == "tcp" else b""))
        assert caller.link.receive() == Ack(seq, 1)
    for key in keys:
        owner.messenger.revoke(key)
    caller.close()


def test_nothing_lands_after_a_revoke_however_compiled_loops_go_in_and_out(
    owners: dict[str, Any], transport: str, source: SharedMemory
) -> None:
    owner = owners["compiled"]
    source.array[:] = 255
    key = [owner.grant()]
    stop = threading.Event()
    answered = [0, 0, 0]

    def hammer(index: int) -> None:
        caller = Caller(owner, transport, source)
        caller.link.set_timeout(60)
        row, source_id = ((0, NBYTES), 0) if transport == "tcp" else ((0, 0, NBYTES), 1)
        payload = b"\xff" * NBYTES if transport == "tcp" else b""
        seq = 0
        while not stop.is_set():
            burst = b""
            for _ in range(8):
                seq += 1
                now = key[0]
                write = Write(seq, seq, now.region_id, now.token, source_id, NBYTES, rows(row), False, b"", b"")
                burst += encode(write) + payload
            caller.sock.sendall(burst)
            for _ in range(8):
                answered[index] += isinstance(caller.link.receive(), Ack)
        caller.close()

    threads = [threading.Thread(target=hammer, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for marker in range(1, 61):
        old, key[0] = key[0], owner.grant()
        new = key[0]
        owner.messenger.revoke(old)
        owner.messenger.revoke(new)
        owner.array[:] = marker
        done = sum(answered)
        for _ in range(20):
            assert (owner.array == marker).all()
        key[0] = owner.grant()
        while sum(answered) < done + 10:
            assert any(thread.is_alive() for thread in threads)
    stop.set()
    for thread in threads:
        thread.join()
    assert all(answered)
    assert owner.messenger.validate() == []
    for thread_key in key:
        owner.messenger.revoke(thread_key)


@pytest.mark.transports("tcp")
def test_a_revoke_waits_for_the_lane_that_is_inside(
    owners: dict[str, Any], transport: str, source: SharedMemory, wait_until: Callable[..., None]
) -> None:
    """It waits for no more than the write that is under way: the grace is long, and the connection stays."""
    owner = owners["compiled"]
    object.__setattr__(owner.messenger._config, "revoke_grace_s", 60.0)
    caller, key = Caller(owner, transport, source), owner.grant()
    write = encode(Write(1, 1, key.region_id, key.token, 0, 1000, rows((0, 1000)), False, b"", b""))
    caller.sock.sendall(write + b"\x05" * 400)
    wait_until(lambda: owner.array[399] == 5, "the first bytes have landed")
    revoking = threading.Thread(target=owner.messenger.revoke, args=(key,))
    revoking.start()
    wait_until(lambda: bool(owner.messenger._grants.slots().waiting[0]), "the revoke waits for the lane")
    caller.sock.sendall(b"\x05" * 600)
    revoking.join(30)
    assert not revoking.is_alive()
    caller.sock.sendall(encode(LAST))
    assert caller.answers() == [Ack(1, 1000), Ack(LAST.seq, 0)]
    caller.close()


def test_the_prefix_is_all_that_a_loop_needs_to_leave_a_frame_to_python(
    owners: dict[str, Any], transport: str, source: SharedMemory
) -> None:
    caller = Caller(owners["compiled"], transport, source)
    caller.sock.sendall(PREFIX.pack(b"MPMS", 1, 4, 0, 64))
    (reject,) = caller.answers()
    assert isinstance(reject, ConnectionReject)
    assert "version 1" in reject.reason
    caller.close()

"""Callers without a secret: they learn nothing, keep nobody out, and end after a while."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from messenger import PeerRestarted, TransferDeadlineExceeded
from messenger.frames import (
    MAGIC,
    PREFIX,
    REJECTIONS,
    VERSION,
    Ack,
    ConnectionReject,
    Framing,
    Goodbye,
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
from messenger.shm.transport import ShmResponder
from messenger.sockets import SocketLink
from messenger.tcp.transport import TcpResponder

MakeNode = Callable[..., Any]
WaitUntil = Callable[..., None]

pytestmark = pytest.mark.transports("tcp", "shm")

INCARNATION = 0xFEDC_BA98_7654_3210
NAME = "keeper-of-secrets"


class Strangers:
    """Connections to nodes that send whatever a test wants."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._opened: list[SocketLink] = []

    def dial(self, node: Any) -> SocketLink:
        if self.transport == "tcp":
            sock = socket.create_connection((node.endpoint.tcp_host, node.endpoint.tcp_port), 20)
        else:
            sock = socket.socket(socket.AF_UNIX)
            _connect(sock, node.endpoint.shm_socket)
        link = SocketLink(sock, "node")
        link.set_timeout(20)
        self._opened.append(link)
        return link

    def hello(self, node: Any, number: int = 0) -> Hello:
        """Greeting of one who has learned the incarnation; 16 share one name, as one peer may have."""
        session = secrets.token_bytes(16)
        there = node.endpoint
        return Hello(f"stranger-{number // 16}", 7, there.node_id, there.incarnation, session, self.transport)

    def greeted(self, node: Any, number: int = 0) -> SocketLink:
        link = self.dial(node)
        link.send(self.hello(node, number))
        assert isinstance(link.receive(), Welcome)
        return link

    def close(self) -> None:
        for link in self._opened:
            link.close()


@pytest.fixture
def strangers(transport: str) -> Iterator[Strangers]:
    found = Strangers(transport)
    yield found
    found.close()


def _connect(sock: socket.socket, path: str) -> None:
    """Connect to a unix socket, again while its backlog is full."""
    sock.settimeout(20)
    for _ in range(1000):
        try:
            return sock.connect(path)
        except BlockingIOError:
            time.sleep(0.01)
    raise AssertionError("the listener accepts nothing")


def answer(link: SocketLink) -> Message:
    """Return the next message other than an offer of memory."""
    while isinstance(message := link.receive(), Offer):
        os.close(link.take_fd())
    return message


def has_ended(link: SocketLink) -> bool:
    return link.peer_is_gone()


GREETINGS: dict[str, tuple[str, Callable[[Hello], Hello | Message]]] = {
    "another node": ("restarted", lambda hello: hello._replace(peer_node_id="x")),
    "an earlier incarnation": ("restarted", lambda hello: hello._replace(peer_incarnation=hello.peer_incarnation ^ 1)),
    "incarnation 0": ("restarted", lambda hello: hello._replace(peer_incarnation=0)),
    "a negative incarnation": ("malformed", lambda hello: hello._replace(peer_incarnation=-1)),
    "no greeting": ("malformed", lambda hello: Goodbye()),
    "no valid name": ("malformed", lambda hello: hello._replace(node_id="\n")),
    "an unknown transport of another node": (
        "restarted",
        lambda hello: hello._replace(peer_node_id="x", transport="carrier pigeon"),
    ),
}


@pytest.mark.parametrize(("code", "changed"), GREETINGS.values(), ids=GREETINGS)
def test_a_rejected_greeting_is_answered_with_a_fixed_reason_and_its_details_are_logged_once(
    make_node: MakeNode,
    strangers: Strangers,
    code: str,
    changed: Callable[[Hello], Hello],
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner = make_node(NAME, incarnation=INCARNATION)
    for _ in range(5):
        link = strangers.dial(owner)
        link.send(changed(strangers.hello(owner)))
        assert link.receive() == ConnectionReject(code, REJECTIONS[code])
        with pytest.raises(OSError):
            link.receive()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_no_reason_for_strangers_can_depend_on_the_node() -> None:
    assert all(isinstance(reason, str) and "{" not in reason for reason in REJECTIONS.values())
    assert set(REJECTIONS) == {"restarted", "full", "tls", "malformed"}


def test_a_peer_of_an_earlier_process_is_told_to_get_the_new_endpoint(make_node: MakeNode) -> None:
    caller, owner = make_node("a"), make_node(NAME, incarnation=INCARNATION)
    stale = replace(owner.endpoint, incarnation=INCARNATION - 1)
    with pytest.raises(PeerRestarted, match="get the new endpoint"):
        caller.messenger.connect(stale).notify(b"t", b"").result()
    caller.messenger.connect(owner.endpoint).notify(b"t", b"").result()
    assert owner.notes == [("a", b"t", b"")]


def test_the_previous_commit_s_peers_are_refused_by_their_protocol(make_node: MakeNode, strangers: Strangers) -> None:
    owner, link = make_node("b"), None
    greeting = encode(strangers.hello(owner))
    former = Framing(MAGIC, 4, (Hello, Welcome, ConnectionReject), 1 << 20)
    link = strangers.dial(owner)
    link._sock.sendall(former.encode(strangers.hello(owner)))
    reply = link._sock.recv(PREFIX.size, socket.MSG_WAITALL)
    assert (greeting[4], reply[4]) == (VERSION, VERSION)
    with pytest.raises(Exception, match=f"protocol version {VERSION}, but this side has 4: run versions of Moonpool"):
        former.decode_prefix(reply)
    assert owner.messenger.counters()["malformed_frames"] == 1


@pytest.mark.parametrize("greets", [True, False], ids=["greeted", "stalled in the handshake"])
def test_a_restarted_worker_gets_in_past_300_strangers(
    make_node: MakeNode, strangers: Strangers, wait_until: WaitUntil, patience: float, greets: bool
) -> None:
    owner = make_node("b", handshake_timeout_s=60.0)
    first = [strangers.greeted(owner, number) if greets else strangers.dial(owner) for number in range(300)]
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 256, "the budget is used up")
    worker = make_node("a", incarnation=2)
    began_s = time.monotonic()
    key, peer = owner.grant(), worker.messenger.connect(owner.endpoint)
    peer.write_notify(key, worker.region, [[0, 0, 1000]], b"t", b"", deadline_s=5.0 * patience).result()
    assert time.monotonic() - began_s < 2.0 * patience
    peer.read(key, worker.region, [[0, 0, 1000]], deadline_s=5.0 * patience).result()
    more = [strangers.greeted(owner, 1000 + number) if greets else strangers.dial(owner) for number in range(300)]
    peer.read(key, worker.region, [[0, 0, 1000]], deadline_s=5.0 * patience).result()
    wait_until(lambda: all(map(has_ended, first)), "the first strangers have given way")
    assert worker.messenger.counters()["connects"] == 2  # its two streams, which stayed
    assert not has_ended(more[-1])
    assert owner.lost == []


def test_connections_with_a_key_are_never_evicted(make_node: MakeNode, strangers: Strangers, patience: float) -> None:
    owner = make_node("b", max_inbound_connections=2)
    workers = [make_node(name) for name in ("a1", "a2")]
    key = owner.grant()
    for worker in workers:
        worker.messenger.connect(owner.endpoint).write(key, worker.region, [[0, 0, 10]]).result()
    link = strangers.dial(owner)
    assert link.receive() == ConnectionReject("full", REJECTIONS["full"])
    late = make_node("late")
    with pytest.raises(TransferDeadlineExceeded, match="no connection is free"):
        late.messenger.connect(owner.endpoint).write(key, late.region, [[0, 0, 10]], deadline_s=0.3).result()
    for worker in workers:
        worker.messenger.connect(owner.endpoint).write(key, worker.region, [[0, 0, 10]]).result()
        assert worker.messenger.counters()["connects"] == 1


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("kind", ["write", "read"])
def test_both_implementations_notice_a_valid_key_and_an_invalid_one(
    make_node: MakeNode,
    strangers: Strangers,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: WaitUntil,
    compiled: bool,
    kind: str,
) -> None:
    if not compiled:
        for responder in (TcpResponder, ShmResponder):
            monkeypatch.setattr(responder, "compiled_loop", lambda *_: None)
    owner, caller = make_node("b"), make_node("a")
    stranger = strangers.greeted(owner)
    stranger.send(Notify(1, b"t", b""))
    answer(stranger)
    stranger.send(Read(2, 1, 12345, 8, b"\0" * 8 + b"\x08" + b"\0" * 7))
    assert isinstance(answer(stranger), Refused)
    (unproven,) = owner.messenger._server._connections
    assert not unproven.has_presented_key
    peer, key = caller.messenger.connect(owner.endpoint), owner.grant()
    if kind == "write":
        peer.write(key, caller.region, [[0, 0, 10]]).result()
    else:
        peer.read(key, caller.region, [[0, 0, 10]]).result()
    proven = [one for one in owner.messenger._server._connections if one is not unproven]
    wait_until(lambda: any(one.has_presented_key for one in proven), "the key is noticed")
    assert not unproven.has_presented_key


def test_idle_strangers_are_closed_and_not_reported_as_lost_while_peers_with_a_key_stay(
    make_node: MakeNode, strangers: Strangers, wait_until: WaitUntil, patience: float
) -> None:
    owner = make_node("b", unproven_s=0.5 * patience, peer_loss_grace_s=0.1)
    worker = make_node("a")
    key, peer = owner.grant(), worker.messenger.connect(owner.endpoint)
    peer.write(key, worker.region, [[0, 0, 10]]).result()
    idle = [strangers.greeted(owner, number) for number in range(20)]
    wait_until(lambda: all(map(has_ended, idle)), "strangers are closed")
    time.sleep(0.6 * patience)
    peer.write(key, worker.region, [[0, 0, 10]]).result()
    assert worker.messenger.counters()["connects"] == 1
    assert owner.lost == []
    assert owner.messenger.counters()["connections_evicted"] == 20


def test_a_peer_that_was_evicted_connects_again_and_repeats_nothing(
    make_node: MakeNode, strangers: Strangers, wait_until: WaitUntil
) -> None:
    owner, caller = make_node("b", max_inbound_connections=2), make_node("a")
    peer = caller.messenger.connect(owner.endpoint)
    peer.notify(b"1", b"").result()
    for number in range(4):
        strangers.greeted(owner, number)
    peer.notify(b"2", b"").result()
    assert [tag for _, tag, _ in owner.notes] == [b"1", b"2"]


@pytest.mark.transports("shm")
def test_tcp_and_unix_sockets_have_budgets_of_their_own(make_node: MakeNode, wait_until: WaitUntil) -> None:
    owner = make_node("b", transport="auto", max_inbound_connections=4, handshake_timeout_s=60.0)
    callers = [make_node(f"a{number}") for number in range(4)]
    key = owner.grant()

    def write_all() -> None:
        for caller in callers:
            caller.messenger.connect(owner.endpoint).write(key, caller.region, [[0, 0, 10]]).result()

    write_all()
    over_tcp = Strangers("tcp")
    try:
        held = [over_tcp.greeted(owner, number) for number in range(4)]
        assert not any(map(has_ended, held))  # the four by unix socket take none of these places
        for number in range(8):
            over_tcp.greeted(owner, number)
        wait_until(lambda: all(map(has_ended, held)), "they give way to each other")
        write_all()
    finally:
        over_tcp.close()
    assert [caller.messenger.counters()["connects"] for caller in callers] == [1] * 4


@pytest.mark.transports("tcp")
def test_the_host_with_most_connections_gives_way_first(
    make_node: MakeNode, strangers: Strangers, wait_until: WaitUntil
) -> None:
    owner = make_node("b", max_inbound_connections=6, data_host="127.0.0.1")
    address = (owner.endpoint.tcp_host, owner.endpoint.tcp_port)
    slow = socket.create_connection(address, 20, source_address=("127.0.0.2", 0))  # the oldest, of another host
    try:
        crowd = [strangers.dial(owner) for _ in range(5)]
        wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 6, "all are accepted")
        crowd += [strangers.dial(owner) for _ in range(20)]
        wait_until(lambda: sum(map(has_ended, crowd)) == 20, "those of the crowd give way")
        slow.sendall(encode(strangers.hello(owner)))
        link = SocketLink(slow, "node")
        link.set_timeout(20)
        assert isinstance(link.receive(), Welcome)
    finally:
        slow.close()


@pytest.mark.transports("shm")
def test_another_user_s_process_is_refused_at_both_ends_of_a_unix_socket(
    make_node: MakeNode, strangers: Strangers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, caller = make_node("b"), make_node("a")
    own = os.geteuid()
    monkeypatch.setattr("rpc.unix_socket.os.geteuid", lambda: own + 1)
    with pytest.raises(OSError):
        strangers.dial(owner).receive()  # closed without a word
    assert owner.messenger.counters()["connections_turned_away"] == 1
    assert f"runs as user {own}, but only user {own + 1} may" in caplog.text
    with pytest.raises(TransferDeadlineExceeded, match=f"runs as user {own}, but only user"):
        caller.messenger.connect(owner.endpoint).notify(b"t", b"", deadline_s=0.3).result()
    monkeypatch.undo()
    caller.messenger.connect(owner.endpoint).notify(b"t", b"").result()


def test_a_flood_of_connections_leaves_no_thread(
    make_node: MakeNode, strangers: Strangers, wait_until: WaitUntil
) -> None:
    owner = make_node("b", max_inbound_connections=8, handshake_timeout_s=60.0)
    before = threading.active_count()
    for _ in range(200):
        strangers.dial(owner)
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 8, "the budget holds")
    assert threading.active_count() <= before + 8


@pytest.mark.transports("tcp")
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
def test_a_connection_keeps_its_place_while_its_first_write_is_in_progress(
    make_node: MakeNode,
    strangers: Strangers,
    monkeypatch: pytest.MonkeyPatch,
    wait_until: WaitUntil,
    compiled: bool,
) -> None:
    if not compiled:
        monkeypatch.setattr(TcpResponder, "compiled_loop", lambda *_: None)
    owner = make_node("b", max_inbound_connections=1)
    key, writer = owner.grant(), strangers.greeted(owner)
    rows = (0).to_bytes(8, "little") + (1000).to_bytes(8, "little")
    writer.send(Write(1, 1, key.region_id, key.token, 0, 1000, rows, False, b"", b""))
    writer._sock.sendall(bytes(10))
    (connection,) = owner.messenger._server._connections
    wait_until(lambda: connection.has_presented_key, "the key is noticed before the payload is complete")
    assert strangers.dial(owner).receive() == ConnectionReject("full", REJECTIONS["full"])
    writer._sock.sendall(bytes(990))
    assert writer.receive() == Ack(1, 1000)

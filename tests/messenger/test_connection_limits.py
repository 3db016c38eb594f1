"""Limits of connections: their number per peer, and peers that are silent, unresponsive or gone."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from messenger import PeerRestarted, TransferDeadlineExceeded
from messenger.frames import PREFIX, ConnectionReject, Hello, Welcome, decode_body, decode_prefix, encode
from messenger.link import DEAD_AFTER_S
from messenger.sockets import SocketLink

MakeNode = Callable[..., Any]
Dial = Callable[..., socket.socket]

pytestmark = pytest.mark.transports("tcp")


@pytest.fixture
def dial(make_node: MakeNode) -> Iterator[Dial]:
    """`dial(node)`: a socket connected to it; with `session` it has greeted as the node "greedy"."""
    opened: list[socket.socket] = []

    def connect(node: Any, session: int | None = None) -> socket.socket:
        sock = socket.create_connection((node.endpoint.tcp_host, node.endpoint.tcp_port), 20)
        opened.append(sock)
        if session is not None:
            name = session.to_bytes(16, "big")
            sock.sendall(encode(Hello("greedy", 7, node.endpoint.node_id, node.endpoint.incarnation, name, "tcp")))
        return sock

    yield connect
    for sock in opened:
        sock.close()


def answer_on(sock: socket.socket) -> Any:
    prefix = sock.recv(PREFIX.size, socket.MSG_WAITALL)
    kind, length = decode_prefix(prefix)
    return decode_body(kind, sock.recv(length, socket.MSG_WAITALL))


def test_one_peer_cannot_take_the_connections_of_all(make_node: MakeNode, dial: Dial) -> None:
    owner, other = (
        make_node("a", streams_per_peer=2, max_connections_per_peer=3, max_inbound_connections=8),
        make_node("b"),
    )
    for session in range(3):
        assert isinstance(answer_on(dial(owner, session)), Welcome)
    refusal = answer_on(dial(owner, 3))
    reason = "greedy has as many connections here as max_connections_per_peer allows"
    assert refusal == ConnectionReject("full", reason)
    assert owner.messenger.counters()["connections_turned_away"] == 1
    other.messenger.connect(owner.endpoint).notify(b"t", b"").result()
    assert owner.notes == [("b", b"t", b"")]


def test_a_stream_that_comes_back_takes_its_own_place(make_node: MakeNode, dial: Dial) -> None:
    owner = make_node("a", streams_per_peer=1, max_connections_per_peer=1)
    former = dial(owner, 0)
    assert isinstance(answer_on(former), Welcome)
    assert isinstance(answer_on(dial(owner, 0)), Welcome)
    assert former.recv(1) == b""


def test_a_place_that_was_given_up_is_free(make_node: MakeNode, dial: Dial, wait_until: Callable[..., None]) -> None:
    owner = make_node("a", streams_per_peer=1, max_connections_per_peer=1)
    former = dial(owner, 0)
    assert isinstance(answer_on(former), Welcome)
    former.close()
    wait_until(lambda: owner.messenger.counters()["connections_in_open"] == 0, "the place is free")
    assert isinstance(answer_on(dial(owner, 1)), Welcome)


def test_a_caller_is_told_which_limit_it_meets(make_node: MakeNode) -> None:
    owner = make_node("a", streams_per_peer=1, max_connections_per_peer=1)
    caller = make_node("b", streams_per_peer=2)
    key = owner.grant()
    peer = caller.messenger.connect(owner.endpoint)
    peer.notify(b"t", b"").result()
    with pytest.raises(TransferDeadlineExceeded, match="as many connections here as max_connections_per_peer allows"):
        peer.read(key, caller.region, [[0, 0, 10]], deadline_s=0.3).result()


def test_callers_that_say_nothing_give_way_to_those_that_greet(make_node: MakeNode, dial: Dial) -> None:
    owner, caller = make_node("a", max_inbound_connections=4, handshake_timeout_s=60.0), make_node("b")
    silent = [dial(owner) for _ in range(4)]
    caller.messenger.connect(owner.endpoint).notify(b"t", b"").result()
    assert silent[0].recv(1) == b""
    assert owner.notes == [("b", b"t", b"")]


def test_a_caller_that_greets_byte_by_byte_has_no_more_time_than_others(make_node: MakeNode, dial: Dial) -> None:
    owner = make_node("a", handshake_timeout_s=0.4)
    dribbling = dial(owner)
    dribbling.settimeout(0.05)
    greeting = encode(Hello("greedy", 7, "a", 1, bytes(16), "tcp"))
    num_sent = 0
    while not _is_closed(dribbling):
        dribbling.send(greeting[num_sent : num_sent + 1])
        num_sent += 1
    assert num_sent < len(greeting) / 2


def _is_closed(sock: socket.socket) -> bool:
    """Return True if the other side closes within the socket's time limit."""
    try:
        return not sock.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_full_queue_of_callers_ends_by_the_deadline_and_clears(make_node: MakeNode, make_child: Any) -> None:
    child, caller = make_child("a"), make_node("b", handshake_timeout_s=0.2)
    peer = caller.messenger.connect(child.endpoint)
    child.stop()
    crowd = [socket.socket() for _ in range(200)]
    for sock in crowd:
        sock.setblocking(False)
        sock.connect_ex((child.endpoint.tcp_host, child.endpoint.tcp_port))
    with pytest.raises(TransferDeadlineExceeded, match="cannot connect: "):
        peer.notify(b"t", b"", deadline_s=1.0).result()
    child.go_on()
    for sock in crowd:
        sock.close()
    peer.notify(b"t", b"").result()


def test_a_program_that_took_the_port_and_says_nothing_holds_nobody_longer_than_the_deadline(
    make_node: MakeNode,
) -> None:
    caller, gone = make_node("a", handshake_timeout_s=0.2), make_node("b")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = replace(gone.endpoint, tcp_port=silent.getsockname()[1])
        with pytest.raises(TransferDeadlineExceeded, match=r"cannot connect: .*(timed out|in time)"):
            caller.messenger.connect(endpoint).notify(b"t", b"", deadline_s=1.0).result()


def test_another_node_that_took_the_port_is_told_apart(make_node: MakeNode) -> None:
    caller, gone, heir = make_node("a"), make_node("b"), make_node("c")
    endpoint = replace(gone.endpoint, tcp_port=heir.endpoint.tcp_port)
    with pytest.raises(PeerRestarted, match="the greeting is for another node"):
        caller.messenger.connect(endpoint).notify(b"t", b"").result()
    assert heir.notes == []


def test_a_peer_that_comes_back_at_the_same_port_is_found_again(make_node: MakeNode) -> None:
    caller, first = make_node("a"), make_node("b")
    caller.messenger.connect(first.endpoint).notify(b"t", b"").result()
    port = first.endpoint.tcp_port
    first.messenger.close()
    again = make_node("b", incarnation=2, data_port=port)
    again.fill(5)
    key, peer = again.grant(), caller.messenger.connect(again.endpoint)
    peer.read(key, caller.region, [[0, 0, 1000]]).result()
    assert np.array_equal(caller.array[:1000], again.array[:1000])


def test_the_kernel_finds_a_vanished_host_whether_or_not_something_is_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        link = SocketLink(sock, "somebody")
        try:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * DEAD_AFTER_S
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s, every_s, count = (
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle_s + every_s * count <= DEAD_AFTER_S
        finally:
            link.close()


def test_a_listener_outlives_a_shortage_of_threads(
    make_node: MakeNode, dial: Dial, caplog: pytest.LogCaptureFixture
) -> None:
    owner, caller = make_node("a"), make_node("b")
    peer = caller.messenger.connect(owner.endpoint)
    former = threading.stack_size(1 << 46)  # more than there is: no thread can begin
    try:
        refusal = answer_on(dial(owner))
    finally:
        threading.stack_size(former)
    assert refusal.code == "full"
    assert "cannot start a thread" in caplog.text
    peer.notify(b"t", b"").result()
    assert owner.notes == [("b", b"t", b"")]


def test_a_listener_outlives_a_connection_that_it_cannot_serve(
    make_node: MakeNode, dial: Dial, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, caller = make_node("a"), make_node("b")
    with monkeypatch.context() as patch:
        patch.setattr("messenger.tcp.transport.SocketLink", lambda sock, address: 1 // 0)
        assert dial(owner).recv(1) == b""
    assert "cannot serve a connection from 127.0.0.1" in caplog.text
    caplog.records[0].exc_info = None  # whose frames keep the node
    caller.messenger.connect(owner.endpoint).notify(b"t", b"").result()
    assert owner.notes == [("b", b"t", b"")]


def test_a_greeting_of_megabytes_is_none(make_node: MakeNode, dial: Dial) -> None:
    owner = make_node("a", handshake_timeout_s=60.0)
    huge = dial(owner)
    huge.sendall(encode(Hello("x" * (1 << 20), 7, "a", 1, bytes(16), "tcp"))[: PREFIX.size])
    assert answer_on(huge).code == "malformed"


def test_a_long_greeting_has_no_more_time_than_others(make_node: MakeNode, dial: Dial) -> None:
    owner = make_node("a", handshake_timeout_s=0.4)
    dribbling = dial(owner)
    dribbling.settimeout(0.05)
    greeting = encode(Hello("x" * (40 << 10), 7, "a", 1, bytes(16), "tcp"))
    at = 30 << 10
    dribbling.sendall(greeting[:at])
    while not _is_closed(dribbling):
        dribbling.send(greeting[at : at + 1])
        at += 1
        assert at < len(greeting)


@pytest.mark.parametrize(
    ("node_id", "session"),
    [("x" * 257, bytes(16)), ("two\nlines", bytes(16)), ("", bytes(16)), ("x", bytes(65))],
    ids=["long name", "name of two lines", "no name", "long session"],
)
def test_what_is_kept_of_a_caller_is_small(make_node: MakeNode, dial: Dial, node_id: str, session: bytes) -> None:
    owner = make_node("a")
    sock = dial(owner)
    sock.sendall(encode(Hello(node_id, 7, "a", 1, session, "tcp")))
    assert answer_on(sock).code == "malformed"
    assert owner.messenger.counters()["malformed_frames"] == 1


def test_callers_that_never_come_back_are_forgotten(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("messenger.messenger._MAX_LOST", 4)
    owner = make_node("a")
    for incarnation in range(10):
        owner.messenger._peer_lost("gone", incarnation)
    owner.messenger._peer_lost("gone", 9)
    assert owner.lost == [("gone", incarnation) for incarnation in range(10)]
    assert len(owner.messenger._lost) == 4


def test_a_caller_that_came_back_in_time_and_left_again_has_the_whole_grace_again(
    make_node: MakeNode, dial: Dial, wait_until: Callable[..., None]
) -> None:
    grace_s = 1.0
    owner = make_node("owner", peer_loss_grace_s=grace_s)
    connected = owner.messenger._server.connections

    def greet_and_leave() -> float:
        sock = dial(owner, session=1)
        assert sock.recv(PREFIX.size)
        left_s = time.monotonic()
        sock.close()
        wait_until(lambda: not connected(), "it has left")
        return left_s

    greet_and_leave()
    time.sleep(grace_s / 2)
    told = len(owner.lost)
    left_s = greet_and_leave()
    wait_until(lambda: len(owner.lost) > told, "its loss is told")
    assert time.monotonic() - left_s >= grace_s

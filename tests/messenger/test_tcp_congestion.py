"""Within a host nothing paces what is sent; to other hosts the administrator's congestion control stays."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from messenger import Endpoint, MessengerConfig
from messenger.tcp.transport import TcpTransport
from settings.keys import assemble

NAME_NBYTES = 16
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def control_of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_NBYTES).rstrip(b"\0")


def choose(sock: socket.socket) -> None:
    """Congestion control that an administrator might have set for all sockets."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, chosen())


def chosen() -> bytes:
    others = sorted(set(ALLOWED.read_bytes().split()) - {b"reno"})
    if not others:
        pytest.skip("this kernel allows reno alone")
    return others[0]


@pytest.fixture
def tcp(tmp_path: Path) -> TcpTransport:
    return TcpTransport(assemble(MessengerConfig, transport="tcp", shm_dir=tmp_path))


@pytest.fixture
def listener(tcp: TcpTransport) -> Iterator[socket.socket]:
    with tcp.listen(1) as listener:
        choose(listener)
        yield listener


def connected(tcp: TcpTransport, listener: socket.socket, source: str) -> tuple[bytes, bytes]:
    """The caller's and the owner's congestion control of a connection from that address of this host."""
    endpoint = Endpoint("b", 1, "host", *listener.getsockname(), "")
    with tcp.new_socket(endpoint) as caller:
        choose(caller)
        caller.bind((source, 0))
        tcp.connect(caller, endpoint)
        accepted, _ = listener.accept()
        link = tcp.wrap_accepted(accepted, "the caller")
        try:
            return control_of(caller), control_of(accepted)
        finally:
            link.close()


def test_both_sides_send_unpaced_within_a_host(tcp: TcpTransport, listener: socket.socket) -> None:
    assert connected(tcp, listener, "127.0.0.1") == (b"reno", b"reno")


def test_towards_another_address_nothing_is_changed(tcp: TcpTransport, listener: socket.socket) -> None:
    assert connected(tcp, listener, "127.0.0.2") == (chosen(), chosen())

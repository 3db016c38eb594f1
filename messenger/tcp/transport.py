"""The tcp transport: where it listens, how it connects, and whether in the clear."""

import contextlib
import errno
import socket

from messenger.buffered import BufferedLink
from messenger.config import Endpoint, MessengerConfig
from messenger.link import Link
from messenger.resolving import resolve
from messenger.sockets import SocketLink
from messenger.tcp.requester import TcpRequester
from messenger.tcp.responder import TcpResponder
from messenger.tcp.tls_link import TlsLink
from messenger.transport import Door, Requester, Responder, Transport
from rpc.errors import AddressInUse, BindFailed
from rpc.tls import identity


class TcpTransport(Transport, Door):
    """Raises InvalidArgument for key material that cannot be used."""

    name = "tcp"

    def __init__(self, config: MessengerConfig) -> None:
        self._host = config.listen_host
        self._port = config.tcp_port
        self._resolve_s = config.handshake_timeout_s
        self._identity = None if config.tls is None else identity(config.tls)
        self._has_fast_lanes = config.tls is None and config.transport in ("auto", "tcp")

    def listen(self, backlog: int) -> socket.socket:
        if self._has_fast_lanes:
            # Numba takes long to import: a process that has no use for it does not wait for it.
            from messenger.native.owner_loop import owner_loop
            from messenger.native.row_receiver import receive_rows

            owner_loop()
            receive_rows()
        where = f"{self._host}:{self._port}"
        try:
            family, _, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=backlog)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"{where} is in use: stop its owner or take another tcp_port") from error
            raise BindFailed(f"cannot listen at {where}: {error}") from error

    def welcome(self, sock: socket.socket, address: str) -> BufferedLink:
        _unpaced_within_host(sock)
        if self._identity is None:
            return SocketLink(sock, address)
        return TlsLink(sock, address, self._identity.material(), caller=False)

    def unlisten(self) -> None:
        """A port leaves nothing behind."""

    def address_of(self, endpoint: Endpoint) -> str:
        return f"{endpoint.tcp_host}:{endpoint.tcp_port}"

    def new_socket(self, endpoint: Endpoint) -> socket.socket:
        family, kind, protocol, _, _ = resolve(endpoint.tcp_host, endpoint.tcp_port, self._resolve_s)
        return socket.socket(family, kind, protocol)

    def connect(self, sock: socket.socket, endpoint: Endpoint) -> None:
        sock.connect(resolve(endpoint.tcp_host, endpoint.tcp_port, self._resolve_s)[4])
        _unpaced_within_host(sock)

    def wrap(self, sock: socket.socket, address: str) -> BufferedLink:
        if self._identity is None:
            return SocketLink(sock, address)
        return TlsLink(sock, address, self._identity.material(), caller=True)

    def requester(self, link: Link) -> Requester:
        return TcpRequester(_buffered(link))

    def responder(self, link: Link) -> Responder:
        return TcpResponder(_buffered(link))


def _unpaced_within_host(sock: socket.socket) -> None:
    """Within a host there is nothing to be fair to: a congestion control that paces, as BBR does, costs timers alone.

    To other hosts it stays what the host's administrator chose.
    """
    with contextlib.suppress(OSError):
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _buffered(link: Link) -> BufferedLink:
    assert isinstance(link, BufferedLink)
    return link

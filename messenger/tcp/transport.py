"""The tcp transport: listening, connecting, name resolution, and moving payloads.

Payloads follow their frames, and are sent straight from the regions and received straight into them. With key material
configured, links are encrypted (`tls_link.py`), and Python serves all requests; otherwise a compiled loop does.
"""

import contextlib
import errno
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LookupTimeout
from typing import TYPE_CHECKING

from messenger.config import Endpoint, MessengerConfig
from messenger.counters import FloatSums
from messenger.errors import ProtocolError
from messenger.frames import Ack, Frame, Message, Read, Write
from messenger.grants import GrantTable
from messenger.link import BufferedLink, Cuttable, Link
from messenger.memory import AnyRegion, require_host_region, views
from messenger.operation import READ, Part, Transfer
from messenger.slices import LOCAL, REMOTE, Rows
from messenger.sockets import SocketLink
from messenger.tcp.tls_link import TlsLink
from messenger.transport import (
    PARTLY,
    WHOLE,
    Acceptor,
    Requester,
    Responder,
    SendStatus,
    Transport,
    notify_request,
    parse_rows,
    read_request,
    write_request,
)
from rpc.errors import AddressInUse, BindFailed
from rpc.tls import identity

if TYPE_CHECKING:
    from messenger.native.responder_loop import CompiledLoop


class TcpRequester(Requester):
    """Caller's side of a tcp link."""

    _link: BufferedLink
    takes_early_answers = True

    def __init__(self, link: BufferedLink) -> None:
        super().__init__(link)
        link.polls = True

    def begin(self, part: Part) -> SendStatus:
        transfer = part.transfer
        payload: Sequence[memoryview] = ()
        if transfer is None:
            frame = notify_request(part)
        elif part.operation.kind is READ:
            frame = _read(part, transfer)
        else:
            frame, payload = _write(part, transfer)
        return WHOLE if self._link.begin(frame, payload) else PARTLY

    def finish(self) -> SendStatus:
        self._link.finish()
        return WHOLE

    def receive(self, reads: bool) -> Message:
        return self._link.receive_before_payload() if reads else self._link.receive()

    def accept(self, part: Part, ack: Ack) -> bool:
        if part.operation.kind is READ and part.transfer is not None:
            if ack.nbytes != part.nbytes:
                raise ProtocolError(f"{self._link.address} sends {ack.nbytes} bytes, but {part.nbytes} were requested")
            slices = part.transfer.slices
            self._link.receive_rows(require_host_region(part.transfer.region), slices.packed_runs(LOCAL), slices.nbytes)
        return True

    def refused(self, part: Part) -> None:
        """Do nothing: tcp keeps no state of a part."""

    def _send_write(self, part: Part, transfer: Transfer) -> None:
        self._link.send(*_write(part, transfer))

    def _send_read(self, part: Part, transfer: Transfer) -> None:
        self._link.send(_read(part, transfer))


def _write(part: Part, transfer: Transfer) -> tuple[Frame, Sequence[memoryview]]:
    """Return the frame of a write, and the payload that follows it."""
    slices = transfer.slices
    return write_request(part, transfer, 0, slices.packed_runs(REMOTE)), views(transfer.region, slices.runs(LOCAL))


def _read(part: Part, transfer: Transfer) -> Frame:
    require_host_region(transfer.region)  # raises before anything is sent
    return read_request(part, transfer, transfer.slices.packed_runs(REMOTE))


class TcpResponder(Responder):
    """Owner's side of a tcp link."""

    _link: BufferedLink

    def compiled_loop(
        self, grants: GrantTable, mover: Cuttable, landed: FloatSums, served: FloatSums
    ) -> "CompiledLoop | None":
        if not isinstance(self._link, SocketLink):
            return None  # the compiled loop does not decrypt
        from messenger.native.responder_loop import CompiledLoop

        return CompiledLoop(self._link, grants, mover, landed, served)

    def target_rows(self, message: Write) -> Rows:
        return parse_rows(message.rows, 2, message.nbytes)

    def land(self, message: Write, rows: Rows, region: AnyRegion) -> None:
        self._link.receive_into(views(region, rows.tolist()))

    def skip(self, message: Write) -> None:
        self._link.drain(message.nbytes)

    def serve(self, message: Read, rows: Rows, region: AnyRegion) -> None:
        self._link.send(Ack(message.seq, message.nbytes), views(region, rows.tolist()))


__all__ = ["Address", "resolve"]

Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]

_lock = threading.Lock()
_asked: dict[tuple[str, int], Future[Address]] = {}


def resolve(host: str, port: int, timeout_s: float) -> Address:
    """Return the host's first address for a stream, as `socket.getaddrinfo`, within a time limit.

    The system's resolver has no time limit: a dead name server blocks it for minutes. A numeric address needs no name
    server. Raises OSError (TimeoutError if no answer comes in time, socket.gaierror if there is no address), and
    UnicodeError for an invalid name (a label that is empty or too long).
    """
    try:
        return _lookup(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    try:
        return _asking(host, port).result(timeout_s)
    except LookupTimeout:
        raise TimeoutError(f"no name server answered for {host!r} within {timeout_s:g} s") from None


def _asking(host: str, port: int) -> "Future[Address]":
    """Return the pending look-up of a name, or start one; `_asked` holds at most one per name, under `_lock`."""
    key = host, port
    with _lock:
        if key in _asked:
            return _asked[key]
        answer = _asked[key] = Future()

        def ask() -> None:
            try:
                found = _lookup(host, port, 0)
            except Exception as error:  # also UnicodeError, for an invalid name
                _forget(key)
                answer.set_exception(error)
            else:
                _forget(key)
                answer.set_result(found)

        try:
            # A daemon thread, so that the process can end while a name server does not answer.
            threading.Thread(target=ask, name=f"resolve-{host}", daemon=True).start()
        except RuntimeError as error:
            del _asked[key]
            raise OSError(f"cannot start a thread to look up {host!r}: {error}") from error
    return answer


def _forget(key: tuple[str, int]) -> None:
    with _lock:
        del _asked[key]


def _lookup(host: str, port: int, flags: int) -> Address:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]  # type: ignore[return-value]


class TcpTransport(Transport, Acceptor):
    """The tcp transport and its acceptor, by default at `data_host`.

    Raises InvalidArgument for key material that cannot be used.
    """

    name = "tcp"

    def __init__(self, config: MessengerConfig, host: str = "") -> None:
        self._host = host or config.transport.data_host
        self._port = config.host.data_port
        self._resolve_s = config.handshake_timeout_s
        self._identity = None if config.tls_files is None else identity(config.tls_files)
        self._has_compiled_loops = config.tls_files is None and config.transport.transport in ("auto", "tcp")

    def listen(self, backlog: int) -> socket.socket:
        if self._has_compiled_loops:
            # Imported late: numba takes long to import, and only some processes need it.
            from messenger.native.responder_loop import responder_loop
            from messenger.native.socket_io import receive_rows

            responder_loop()
            receive_rows()
        where = f"{self._host}:{self._port}"
        try:
            family, _, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=backlog)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"{where} is in use: stop its user or set another tcp_port") from error
            raise BindFailed(f"cannot listen at {where}: {error}") from error

    def wrap_accepted(self, sock: socket.socket, address: str) -> BufferedLink:
        _unpaced_within_host(sock)
        if self._identity is None:
            return SocketLink(sock, address)
        return TlsLink(sock, address, self._identity.material(), caller=False)

    def clean_up(self) -> None:
        """Do nothing: a port leaves nothing in the file system."""

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
    """Select a congestion control without pacing for connections within a host.

    Within a host there is no other traffic to share with, and pacing, as in BBR, only costs timers. Connections to
    other hosts keep the system's setting.
    """
    with contextlib.suppress(OSError):
        if sock.getsockname()[0] == sock.getpeername()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _buffered(link: Link) -> BufferedLink:
    assert isinstance(link, BufferedLink)
    return link

"""The tcp transport: payloads follow their frames, gathered from and scattered into the registered regions directly."""

import errno
import socket

from messenger.config import Endpoint, MessengerConfig
from messenger.errors import AddressInUse, BindFailed, ProtocolError
from messenger.frames import Ack, Read, Write
from messenger.link import Link
from messenger.memory import Region
from messenger.operation import Kind, Part, Transfer
from messenger.slices import LOCAL, REMOTE, Rows, runs
from messenger.transport import QUICK_NBYTES, QUICK_ROWS, Requester, Responder, Transport, parse_rows


class TcpRequester(Requester):
    def is_quick(self, part: Part) -> bool:
        sent_nbytes = 0 if part.operation.kind is Kind.READ else part.nbytes
        return sent_nbytes <= QUICK_NBYTES and (part.transfer is None or len(part.transfer.rows) <= QUICK_ROWS)

    def accept(self, part: Part, ack: Ack) -> bool:
        if part.operation.kind is Kind.READ and part.transfer is not None:
            if ack.nbytes != part.nbytes:
                raise ProtocolError(f"{self._link.address} sends {ack.nbytes} bytes where {part.nbytes} were asked")
            self._link.receive_into(_views(part.transfer.region, runs(part.transfer.rows, LOCAL)))
        return True

    def refused(self, part: Part) -> None:
        """Nothing was kept of it."""

    def _send_write(self, part: Part, transfer: Transfer) -> None:
        note = part.notification
        message = Write(
            seq=part.seq,
            operation=part.operation.number,
            region_id=transfer.key.region_id,
            token=transfer.key.token,
            source_id=0,
            nbytes=transfer.nbytes,
            rows=runs(transfer.rows, REMOTE).tobytes(),
            notify=note is not None,
            tag=note.tag if note else b"",
            payload=note.payload if note else b"",
        )
        self._link.send(message, _views(transfer.region, runs(transfer.rows, LOCAL)))

    def _send_read(self, part: Part, transfer: Transfer) -> None:
        rows = runs(transfer.rows, REMOTE).tobytes()
        self._link.send(Read(part.seq, transfer.key.region_id, transfer.key.token, transfer.nbytes, rows))


class TcpResponder(Responder):
    def target_rows(self, message: Write) -> Rows:
        return parse_rows(message.rows, 2, message.nbytes)

    def land(self, message: Write, rows: Rows, region: Region) -> None:
        self._link.receive_into(_views(region, rows))

    def skip(self, message: Write) -> None:
        self._link.drain(message.nbytes)

    def serve(self, message: Read, rows: Rows, region: Region) -> None:
        self._link.send(Ack(message.seq, message.nbytes), _views(region, rows))


class TcpTransport(Transport):
    name = "tcp"

    def __init__(self, config: MessengerConfig) -> None:
        self._host = config.listen_host
        self._port = config.tcp_port

    def listen(self, backlog: int) -> socket.socket:
        where = f"{self._host}:{self._port}"
        try:
            family, _, _, _, address = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=backlog)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"{where} is in use: stop its owner or take another tcp_port") from error
            raise BindFailed(f"cannot listen at {where}: {error}") from error

    def unlisten(self) -> None:
        """A port leaves nothing behind."""

    def address_of(self, endpoint: Endpoint) -> str:
        return f"{endpoint.tcp_host}:{endpoint.tcp_port}"

    def new_socket(self, endpoint: Endpoint) -> socket.socket:
        family, kind, protocol, _, _ = _resolve(endpoint)
        return socket.socket(family, kind, protocol)

    def connect(self, sock: socket.socket, endpoint: Endpoint) -> None:
        sock.connect(_resolve(endpoint)[4])

    def requester(self, link: Link) -> Requester:
        return TcpRequester(link)

    def responder(self, link: Link) -> Responder:
        return TcpResponder(link)


def _views(region: Region, rows: Rows) -> list[memoryview]:
    view = region.view
    return [view[offset : offset + nbytes] for offset, nbytes in rows.tolist()]


def _resolve(endpoint: Endpoint) -> tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]:
    return socket.getaddrinfo(endpoint.tcp_host, endpoint.tcp_port, type=socket.SOCK_STREAM)[0]  # type: ignore[return-value]

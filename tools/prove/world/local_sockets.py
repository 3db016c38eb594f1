"""Sockets between a process and its children: `socket.socketpair`, and descriptors that are sent over one.

A pair is a connection of the process with itself; the children are threads of it. A socket that is sent belongs to its
receiver from then on, and the sender's `close` of it has no effect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tools.prove.world import sockets
from tools.prove.world.sockets import _Socket, by_fileno
from tools.prove.world.tcp import TcpConnection

if TYPE_CHECKING:
    from typing_extensions import Buffer

_sent: WeakKeyDictionary[TcpConnection, deque[_Socket]] = WeakKeyDictionary()  # by the receiver's side
_peers: WeakKeyDictionary[TcpConnection, TcpConnection] = WeakKeyDictionary()


def socketpair(*_: Any) -> tuple[_Socket, _Socket]:
    """As socket.socketpair."""
    with _Socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        ours = _Socket()
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
    one, other = ours._connected(), theirs._connected()
    _peers[one], _peers[other] = other, one
    return ours, theirs


def send_fds(sock: _Socket, buffers: Iterable[Buffer], fds: Iterable[int]) -> int:
    """As socket.send_fds."""
    given = _sent.setdefault(_peers[sock._connected()], deque())
    for fd in fds:
        own, moved = by_fileno(fd), _Socket()
        moved._connection, own._connection = own._connection, None
        given.append(moved)
    return sock.sendmsg(buffers)


def receive_socket(sock: _Socket) -> _Socket | None:
    """Return the next socket that was sent with one byte; None at the end of the stream."""
    return _sent[sock._connected()].popleft() if sock.recv(1) else None


sockets.socket.socketpair = socketpair  # type: ignore[attr-defined]
sockets.socket.send_fds = send_fds  # type: ignore[attr-defined]

"""The simulated `socket` and `select`: stream sockets over IPv4 for simulated threads, by the simulated network.

Each process has its own descriptor numbers, from 1000 on; the lowest free one is used again, as by the kernel. Host
names and addresses are those of `addresses.py`, the behaviour of connections is that of `tcp.py`.
"""

from __future__ import annotations

import errno
import select as real_select
import socket as real
import struct
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tools.prove.world.addresses import ANY, address_of, free_port, getaddrinfo, host_at
from tools.prove.world.clock import _module
from tools.prove.world.network import End
from tools.prove.world.scheduler import SECOND_NS, ProcessState, world
from tools.prove.world.tcp import Address, TcpConnection, Waiters, system_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["REPLACED", "by_fileno", "select", "socket"]

_FIRST_FD = 1000
_SYN_AGAIN_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # a SYN without an answer is sent again after these times
_CONNECT_S = 63.0
_TCP_INFO_NBYTES, _RTT_AT, _ACKED_AT = 136, 68, 120  # of Linux's struct tcp_info


def _process() -> ProcessState:
    thread = world().current
    assert thread is not None, "the scheduler's callbacks must not use sockets"
    return thread.process


class _Listener:
    """Listening socket in the kernel."""

    def __init__(self, process: ProcessState, own: Address, backlog: int) -> None:
        self.own, self.is_shut = own, False
        self.accepted: deque[TcpConnection] = deque()
        self.waiters = Waiters()
        self._process, self._backlog = process, max(1, backlog)
        self._address = "tcp", process.host, own[1]
        world().network.listen(process, self._address, self._connected)

    def _connected(self, end: End) -> None:
        if len(self.accepted) >= self._backlog:
            end.reset()
            return
        caller = address_of(end.peer.process.host), free_port()
        _ports[end.peer] = caller[1]
        self.accepted.append(TcpConnection(end, (address_of(self._process.host), self.own[1]), caller))
        self.waiters.wake()

    def is_readable(self) -> bool:
        """Return True if `accept` would not block."""
        return bool(self.accepted) or self.is_shut

    def shut(self) -> None:
        """Accept no more connections, and end those that nobody has accepted."""
        if not self.is_shut:
            self.is_shut = True
            world().network.stop_listening(self._process, self._address)
            while self.accepted:
                self.accepted.popleft().close(reset=True)
            self.waiters.wake()


_ports: WeakKeyDictionary[End, int] = WeakKeyDictionary()  # of the callers' sides


class _Dialing:
    """A connection that is being made: SYN is sent again until there is an answer."""

    def __init__(self, process: ProcessState, host: str, port: int) -> None:
        self.waiters = Waiters()
        self.result: End | OSError | None = None
        self._process, self._host, self._address = process, host, ("tcp", host, port)
        self._again = iter(_SYN_AGAIN_S)
        self._dial()

    def _dial(self) -> None:
        if self.result is None and not self._process.is_dead:
            world().network.dial(self._process, self._host, self._address, self._answered, _CONNECT_S)
            seconds = next(self._again, None)
            if seconds is not None:
                world().at(seconds, self._dial)

    def _answered(self, result: End | OSError) -> None:
        if self.result is None:
            self.end(result)
        elif isinstance(result, End):
            result.reset()

    def end(self, result: End | OSError) -> None:
        """Set the outcome."""
        self.result = result
        self.waiters.wake()


class _Socket:
    """The simulated `socket.socket`."""

    def __init__(self, family: int = real.AF_INET, type: int = real.SOCK_STREAM, proto: int = 0) -> None:
        if family not in (real.AF_INET, -1) or type not in (real.SOCK_STREAM, -1):
            raise system_error(errno.EAFNOSUPPORT)
        self.family, self.type, self.proto = real.AF_INET, real.SOCK_STREAM, proto
        self._timeout_s = real.getdefaulttimeout()
        self._options: dict[tuple[int, int], bytes | int] = {}
        self._bound: Address | None = None
        self._listener: _Listener | None = None
        self._dialing: _Dialing | None = None
        self._connection: TcpConnection | None = None
        self._is_shut = (False, False)  # before it was connected
        self._process = _process()
        self._fd = _descriptors(self._process).add(self)

    def __enter__(self) -> _Socket:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor; -1 once it is closed."""
        return self._fd

    # Time limits.

    def settimeout(self, value: float | None) -> None:
        """As socket.settimeout."""
        if value is not None and value < 0:
            raise ValueError("Timeout value out of range")
        self._timeout_s = value

    def gettimeout(self) -> float | None:
        """As socket.gettimeout."""
        return self._timeout_s

    def setblocking(self, flag: bool) -> None:
        """As socket.setblocking."""
        self._timeout_s = None if flag else 0.0

    def getblocking(self) -> bool:
        """As socket.getblocking."""
        return self._timeout_s != 0

    def _until_ns(self) -> int | None:
        return None if self._timeout_s is None else world().now_ns + int(self._timeout_s * SECOND_NS)

    def _blocks(self, flags: int) -> bool:
        # Python polls a socket with a time limit before each call, whatever its flags.
        return self._timeout_s != 0 and not (self._timeout_s is None and flags & real.MSG_DONTWAIT)

    # Addresses.

    def bind(self, address: Address) -> None:
        """As socket.bind."""
        self._open()
        host, port = getaddrinfo(address[0] or ANY, address[1])[0][4]
        if host_at(host, self._process.host) != self._process.host:
            raise system_error(errno.EADDRNOTAVAIL)
        if self._bound is not None:
            raise system_error(errno.EINVAL)
        self._bound = host, port or free_port()

    def getsockname(self) -> Address:
        """As socket.getsockname."""
        self._open()
        if self._connection is not None:
            return self._connection.own
        return self._bound or (ANY, 0)

    def getpeername(self) -> Address:
        """As socket.getpeername."""
        return self._connected().other

    # Connecting.

    def listen(self, backlog: int = 128) -> None:
        """As socket.listen."""
        self._open()
        if self._bound is None:
            self._bound = ANY, free_port()
        if self._listener is None:
            self._listener = _Listener(self._process, self._bound, backlog)

    def accept(self) -> tuple[_Socket, Address]:
        """As socket.accept."""
        self._open()
        listener = self._listener
        if listener is None:
            raise system_error(errno.EINVAL)
        if not listener.is_readable():
            if self._timeout_s == 0:
                raise system_error(errno.EAGAIN)
            if not listener.waiters.wait(listener.is_readable, self._until_ns()):
                raise TimeoutError("timed out")
        if listener.is_shut:
            raise system_error(errno.EINVAL)
        made = _Socket()
        made._connection = connection = listener.accepted.popleft()
        return made, connection.other

    def connect(self, address: Address) -> None:
        """As socket.connect, for sockets that may block."""
        self._open()
        if self._connection is not None:
            raise system_error(errno.EISCONN)
        if self._timeout_s == 0:
            raise NotImplementedError("simulated sockets connect in blocking calls only")
        host, port = getaddrinfo(address[0], address[1])[0][4]
        self._dialing = dialing = _Dialing(self._process, host_at(host, self._process.host), port)
        if not dialing.waiters.wait(lambda: dialing.result is not None, self._until_ns()):
            dialing.end(TimeoutError("timed out"))
        self._dialing, result = None, dialing.result
        if isinstance(result, OSError):
            raise result
        assert result is not None
        own = address_of(self._process.host), _ports.pop(result)
        self._connection = connection = TcpConnection(result, own, (host, port))
        connection.is_read_shut, connection.is_write_shut = self._is_shut
        self._watch()

    def shutdown(self, how: int) -> None:
        """As socket.shutdown."""
        self._open()
        ends_reading, ends_writing = how in (real.SHUT_RD, real.SHUT_RDWR), how in (real.SHUT_WR, real.SHUT_RDWR)
        if self._listener is not None:
            if ends_reading:
                self._listener.shut()
        elif self._dialing is not None:
            self._dialing.end(system_error(errno.ECONNRESET))
        elif self._connection is not None:
            self._connection.shut(reading=ends_reading, writing=ends_writing)
        else:  # Linux keeps it for the connection that is made later
            self._is_shut = self._is_shut[0] or ends_reading, self._is_shut[1] or ends_writing
            raise system_error(errno.ENOTCONN)

    def close(self) -> None:
        """As socket.close. Threads that wait in a call of this socket go on waiting, as they do on Linux."""
        if self._fd < 0:
            return
        world().point()
        _descriptors(self._process).remove(self._fd)
        self._fd = -1
        if self._listener is not None:
            self._listener.shut()
        if self._connection is not None:
            lingers, seconds = struct.unpack("ii", _as_bytes(self._options.get(_LINGER, bytes(8)), 8))
            self._connection.close(reset=bool(lingers) and not seconds)

    # Options.

    def setsockopt(self, level: int, option: int, value: int | Buffer) -> None:
        """As socket.setsockopt; keepalive, its times, TCP_USER_TIMEOUT and SO_LINGER have an effect."""
        self._open()
        self._options[level, option] = value if isinstance(value, int) else bytes(value)
        self._watch()

    def getsockopt(self, level: int, option: int, nbytes: int = 0) -> int | bytes:
        """As socket.getsockopt."""
        self._open()
        connection = self._connection
        if (level, option) == (real.IPPROTO_TCP, real.TCP_INFO):
            return self._tcp_info()[:nbytes]
        if (level, option) == (real.SOL_SOCKET, real.SO_ERROR):
            return 0 if connection is None else connection.take_error()
        if level == real.SOL_SOCKET and option in (real.SO_RCVBUF, real.SO_SNDBUF) and connection is not None:
            return connection.buffer_nbytes
        value = self._options.get((level, option), 0)
        return _as_bytes(value, nbytes) if nbytes else value

    def _tcp_info(self) -> bytes:
        info = bytearray(_TCP_INFO_NBYTES)
        connection = self._connection
        if connection is not None:
            struct.pack_into("@I", info, _RTT_AT, max(1, int(2e6 * world().network.latency_s)))
            struct.pack_into("@QQ", info, _ACKED_AT, connection.num_acked, connection.total_received)
        return bytes(info)

    def _watch(self) -> None:
        connection, options = self._connection, self._options
        if connection is not None and options.get(_KEEPALIVE):
            idle_s, interval_s = int(options.get(_IDLE, 7200)), int(options.get(_INTERVAL, 75))
            dead_s = int(options.get(_USER_TIMEOUT, 0)) / 1000 or idle_s + interval_s * int(options.get(_COUNT, 9))
            connection.watch(idle_s, interval_s, dead_s)

    # Bytes.

    def send(self, data: Buffer, flags: int = 0) -> int:
        """As socket.send."""
        return self.sendmsg((data,), (), flags)

    def sendall(self, data: Buffer, flags: int = 0) -> None:
        """As socket.sendall."""
        connection, rest, until_ns = self._connected(errno.EPIPE), memoryview(data).cast("B"), self._until_ns()
        while rest:
            sent = connection.send((rest,), blocks=self._blocks(flags), until_ns=until_ns)
            rest = rest[sent:]

    def sendmsg(self, buffers: Iterable[Buffer], ancillary: Iterable[Any] = (), flags: int = 0) -> int:
        """As socket.sendmsg, without ancillary data."""
        views = [memoryview(each).cast("B") for each in buffers]
        return self._connected(errno.EPIPE).send(views, blocks=self._blocks(flags), until_ns=self._until_ns())

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        """As socket.recv."""
        buffer = bytearray(nbytes)
        return bytes(buffer[: self.recv_into(buffer, nbytes, flags)])

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0) -> int:
        """As socket.recv_into."""
        view = memoryview(buffer).cast("B")
        return self.recvmsg_into((view[:nbytes] if nbytes else view,), 0, flags)[0]

    def recvmsg_into(
        self, buffers: Iterable[Buffer], ancillary_nbytes: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, None]:
        """As socket.recvmsg_into; no ancillary data ever comes."""
        views = [memoryview(each).cast("B") for each in buffers]
        takes_all = bool(flags & real.MSG_WAITALL) and self._timeout_s is None
        connection = self._connected()
        received = connection.receive(views, blocks=self._blocks(flags), until_ns=self._until_ns(), takes_all=takes_all)
        return received, [], 0, None

    # What `select` sees.

    def events(self) -> int:
        """Return the events of poll(2) that hold now."""
        if self._listener is not None:
            return real_select.POLLIN if self._listener.is_readable() else 0
        connection = self._connection
        if connection is None:
            return real_select.POLLOUT | real_select.POLLHUP
        found = real_select.POLLIN * connection.is_readable | real_select.POLLOUT * connection.is_writable
        if connection.has_fin or connection.is_dead or connection.is_read_shut:
            found |= real_select.POLLRDHUP
        if connection.is_dead or ((connection.is_read_shut or connection.has_fin) and connection.is_write_shut):
            found |= real_select.POLLHUP
        return found | real_select.POLLERR * bool(connection.error)

    def waiters(self) -> Waiters:
        """Return the waiters for bytes, or for connections to accept."""
        return self._listener.waiters if self._listener is not None else self._connected().readers

    def _open(self) -> None:
        world().point()
        if self._fd < 0:
            raise system_error(errno.EBADF)

    def _connected(self, number: int = errno.ENOTCONN) -> TcpConnection:
        self._open()
        if self._connection is None:
            raise system_error(number)
        return self._connection


_LINGER = real.SOL_SOCKET, real.SO_LINGER
_KEEPALIVE = real.SOL_SOCKET, real.SO_KEEPALIVE
_IDLE, _INTERVAL = (real.IPPROTO_TCP, real.TCP_KEEPIDLE), (real.IPPROTO_TCP, real.TCP_KEEPINTVL)
_COUNT, _USER_TIMEOUT = (real.IPPROTO_TCP, real.TCP_KEEPCNT), (real.IPPROTO_TCP, real.TCP_USER_TIMEOUT)


def _as_bytes(value: int | bytes, nbytes: int) -> bytes:
    return value[:nbytes] if isinstance(value, bytes) else value.to_bytes(nbytes, "little", signed=True)


class _Descriptors:
    """Open sockets of one process by descriptor."""

    def __init__(self) -> None:
        self._sockets: dict[int, _Socket] = {}

    def add(self, new: _Socket) -> int:
        """Return the lowest free number, which is now that of the socket."""
        fd = _FIRST_FD
        while fd in self._sockets:
            fd += 1
        self._sockets[fd] = new
        return fd

    def remove(self, fd: int) -> None:
        """Free a number."""
        del self._sockets[fd]

    def get(self, fd: int) -> _Socket | None:
        """Return the socket that has the number now."""
        return self._sockets.get(fd)


_by_process: WeakKeyDictionary[ProcessState, _Descriptors] = WeakKeyDictionary()


def _descriptors(process: ProcessState) -> _Descriptors:
    return _by_process.setdefault(process, _Descriptors())


def by_fileno(fd: int) -> _Socket:
    """Return the running process's socket with this descriptor. Raises OSError if it is closed."""
    found = _descriptors(_process()).get(fd)
    if found is None:
        raise system_error(errno.EBADF)
    return found


class _Poll:
    """The simulated `select.poll`, for simulated sockets. It keeps descriptor numbers, not sockets."""

    def __init__(self) -> None:
        self._process = _process()
        self._events: dict[int, int] = {}

    def register(
        self, fd: Any, eventmask: int = real_select.POLLIN | real_select.POLLPRI | real_select.POLLOUT
    ) -> None:
        """As poll.register."""
        number = fd if isinstance(fd, int) else fd.fileno()
        if number < _FIRST_FD:
            raise NotImplementedError("the simulated poll knows simulated sockets only")
        self._events[number] = eventmask

    modify = register

    def unregister(self, fd: Any) -> None:
        """As poll.unregister."""
        del self._events[fd if isinstance(fd, int) else fd.fileno()]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """As poll.poll; a call that blocks waits for one socket's input."""
        world().point()
        until_ns = None if timeout is None or timeout < 0 else world().now_ns + int(timeout * 1e6)
        if not self._now() and timeout != 0:
            (fd,) = self._events
            by_fileno(fd).waiters().wait(lambda: bool(self._now()), until_ns)
        return self._now()

    def _now(self) -> list[tuple[int, int]]:
        found = []
        for fd, wanted in self._events.items():
            one = _descriptors(self._process).get(fd)
            always = real_select.POLLERR | real_select.POLLHUP
            events = real_select.POLLNVAL if one is None else one.events() & (wanted | always)
            if events:
                found.append((fd, events))
        return found


def _create_server(
    address: Address, *, family: int = real.AF_INET, backlog: int | None = None, **_options: Any
) -> _Socket:
    made = _Socket(family, real.SOCK_STREAM)
    try:
        made.bind(address)
        made.listen(128 if backlog is None else backlog)
    except BaseException:
        made.close()
        raise
    return made


def _create_connection(address: Address, timeout: float | None = None, **_options: Any) -> _Socket:
    made = _Socket()
    made.settimeout(timeout)
    try:
        made.connect(address)
    except BaseException:
        made.close()
        raise
    return made


def _not_simulated(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("simulated sockets are stream sockets over IPv4")


socket = _module(
    "socket",
    real,
    socket=_Socket,
    SocketType=_Socket,
    create_server=_create_server,
    create_connection=_create_connection,
    getaddrinfo=getaddrinfo,
    gethostname=lambda: _process().host,
    gethostbyname=lambda name: getaddrinfo(name, 0)[0][4][0],
    fromfd=_not_simulated,
    socketpair=_not_simulated,
    send_fds=_not_simulated,
    recv_fds=_not_simulated,
)
select = _module("select", real_select, poll=_Poll, select=_not_simulated, epoll=_not_simulated)
REPLACED = {"select": select, "socket": socket}
"""Modules to install."""

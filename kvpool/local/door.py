"""The pool node's door for processes of its host: hands over the arena and its index, takes puts, touches, reports.

A unix socket of mode 0600 in the node's socket folder. All runs in the node's event loop, without gRPC, so that a put
is one short round trip; only long copies run in threads. A caller that breaks the protocol is told so and sent away;
the node takes no harm from what callers send.
"""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import socket
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvpool.address import KEY_NBYTES
from kvpool.errors import KvPoolError
from kvpool.local.frames import (
    PREFIX,
    AskIndex,
    Corrupt,
    Hello,
    Index,
    Message,
    Offer,
    Offered,
    Put,
    Refused,
    Stored,
    Touch,
    Welcome,
    Withdraw,
    decode_body,
    decode_prefix,
    encode,
)
from kvpool.local.intake import Caller, Intake
from kvpool.local.mapping import Mapped
from kvpool.local.shared_index import SharedIndex
from kvpool.node import PoolNode
from messenger import unix_path
from messenger.errors import BindFailed, ProtocolError
from messenger.memory import PeerMemory

__all__ = ["Door", "open_door"]

_log = logging.getLogger(__name__)

_MAX_CALLERS = 256
_MAX_REGIONS = 64  # mapped per caller
_MAX_UNSENT_NBYTES = 1 << 20  # of answers that a caller does not take
_READ_NBYTES = 1 << 18
_MAX_FDS = 4
_COPY_THREADS = 2
_HELLO_S = 10.0  # until when a caller must have said who it is


async def open_door(node: PoolNode) -> "Door | None":
    """A started node's door, in the folder of its messenger's socket; None where it has none (tcp alone).

    Raises AddressInUse or BindFailed.
    """
    shm_socket = node.messenger.endpoint.shm_socket
    if not shm_socket:
        return None
    door = Door(node, await asyncio.to_thread(_ready_index, node.incarnation), Path(shm_socket).parent)
    door.open()
    return door


class Door:
    """Serves one PoolNode, from `open` to `close`."""

    def __init__(self, node: PoolNode, index: SharedIndex, folder: Path) -> None:
        self.node = node
        self.index = index
        name = hashlib.blake2b(node.config.node_id.encode(), digest_size=8).hexdigest()
        self.path = folder / f"d-{name}.sock"
        self.threads = ThreadPoolExecutor(_COPY_THREADS, "moonpool-door")
        self.intake = Intake(node, Mapped.of(node.memory.array), self.threads)
        self.callers: set[_Connection] = set()
        self.puts: set[asyncio.Task[None]] = set()
        self._identity: tuple[int, int] | None = None

    def open(self) -> None:
        """Listen. Raises AddressInUse or BindFailed."""
        unix_path.claim(self.path)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.setblocking(False)
            before = os.umask(0o177)
            try:
                self._listener.bind(os.fspath(self.path))
            finally:
                os.umask(before)
            self._listener.listen(64)
        except OSError as error:
            self._listener.close()
            raise BindFailed(f"cannot listen at {self.path}: {error}") from error
        self._identity = unix_path.identity(self.path)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
        self.node.index, self.node.door = self.index, os.fspath(self.path)
        self.node.tell()

    async def close(self) -> None:
        """Send everybody away; readers see at once that the index is closed."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        if unix_path.identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        for caller in list(self.callers):
            caller.close()
        await asyncio.gather(*self.puts)
        self.node.index, self.node.door = None, ""
        self.index.close()
        await asyncio.to_thread(self.threads.shutdown)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED):
                _log.warning("the host door could not take a caller: %s", error)
            return
        if len(self.callers) >= _MAX_CALLERS:
            _log.warning("the host door turned a caller away: %d are here", len(self.callers))
            sock.close()
            return
        self.callers.add(_Connection(self, sock))


class _Connection:
    """One caller. Its requests are carried out one after the other."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._door = door
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._caller: Caller | None = None
        self._regions: dict[int, Mapped] = {}
        self._received = bytearray()
        self._fds: list[int] = []
        self._unsent = bytearray()
        self._putting: asyncio.Task[None] | None = None
        self._loop.add_reader(sock.fileno(), self._readable)
        self._silent = self._loop.call_later(_HELLO_S, self._refuse, "ProtocolError", "no Hello came")

    def close(self) -> None:
        """Let go of the caller and of its memory. A put under way goes on to its end; nobody is told."""
        if self._sock.fileno() < 0:
            return
        self._silent.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._regions.clear()
        self._received.clear()
        self._door.callers.discard(self)

    def _readable(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(self._sock, _READ_NBYTES, _MAX_FDS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        self._fds += fds
        if not data:
            self.close()
        elif flags & socket.MSG_CTRUNC or len(self._fds) > _MAX_FDS:
            self._refuse("ProtocolError", "too many descriptors at once")
        else:
            self._received += data
            self._work()

    def _work(self) -> None:
        """Carry out what has come, until a put must be waited for."""
        try:
            while self._putting is None and (message := self._next()) is not None:
                self._do(message)
        except ProtocolError as error:
            _log.warning("a caller of the host door was sent away: %s", error)
            self._refuse("ProtocolError", str(error))
        except Exception:
            _log.exception("a request of a process of this host failed")
            self.close()

    def _next(self) -> Message | None:
        """The next whole message; None when it has not come yet."""
        if len(self._received) < PREFIX.size:
            return None
        kind, nbytes = decode_prefix(self._received[: PREFIX.size])
        end = PREFIX.size + nbytes
        if len(self._received) < end:
            return None
        body = bytes(memoryview(self._received)[PREFIX.size : end])
        del self._received[:end]
        return decode_body(kind, body)

    def _do(self, message: Message) -> None:
        if (self._caller is None) != isinstance(message, Hello):
            raise ProtocolError(
                f"{type(message).__name__} where {'only' if self._caller is None else 'no'} Hello can be"
            )
        try:
            self._answer(message)
        except KvPoolError as error:
            self._send(Refused(type(error).__name__, str(error)))

    def _answer(self, message: Message) -> None:
        node, index = self._door.node, self._door.index
        match message:
            case Hello():
                self._silent.cancel()
                self._caller = Caller(message.owner, message.owner_incarnation)
                told = Welcome(node.config.node_id, node.incarnation, node.memory.nbytes, index.nbytes)
                self._send(told, [node.memory.fd, index.memory.fd])
            case AskIndex():
                self._send(Index(index.nbytes), [index.memory.fd])
            case Offer():
                self._take_offer(message)
            case Withdraw():
                self._regions.pop(message.region_id, None)
            case Put():
                self._put(message)
            case Touch():
                node.core.use(time.monotonic_ns(), *_address(message))
            case Corrupt():
                node.core.quarantine(*_address(message))
                node.tell()
            case _:
                raise ProtocolError(f"{type(message).__name__} is no request")

    def _take_offer(self, message: Offer) -> None:
        if not self._fds or len(self._regions) >= _MAX_REGIONS:
            raise ProtocolError(f"memory without a descriptor, or beyond the {_MAX_REGIONS} that a caller may offer")
        self._regions[message.region_id] = Mapped.of(PeerMemory(self._fds.pop(0), message.nbytes).array)
        self._send(Offered())

    def _put(self, message: Put) -> None:
        source = self._regions.get(message.region_id)
        if source is None or self._caller is None:
            raise ProtocolError(f"a put from memory {message.region_id}, which was never offered")
        stored = self._door.intake.put(self._caller, message, source)
        if isinstance(stored, bytes):
            self._send(Stored(stored))
        else:
            self._loop.remove_reader(self._sock.fileno())
            self._putting = self._loop.create_task(self._finish(stored))
            self._door.puts.add(self._putting)
            self._putting.add_done_callback(self._door.puts.discard)

    async def _finish(self, stored: Awaitable[bytes]) -> None:
        """Answer a put when it is done, and go on with what came meanwhile."""
        try:
            answer: Message = Stored(await stored)
        except KvPoolError as error:
            answer = Refused(type(error).__name__, str(error))
        except Exception:
            _log.exception("a put of a process of this host failed")
            self.close()
            return
        self._putting = None
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._send(answer)
            self._work()

    def _send(self, message: Message, fds: list[int] | None = None) -> None:
        if self._sock.fileno() < 0:
            return
        data, sent = encode(message), 0
        try:
            if fds:
                sent = socket.send_fds(self._sock, [data], fds)
            elif not self._unsent:
                sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        if sent == len(data):
            return
        if (fds and not sent) or len(self._unsent) > _MAX_UNSENT_NBYTES:
            _log.warning("a caller of the host door was sent away: it takes no answers")
            self.close()
            return
        self._unsent += data[sent:]
        self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            try:
                del self._unsent[: self._sock.send(self._unsent)]
            except ConnectionError:
                self.close()
                return
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _refuse(self, kind: str, reason: str) -> None:
        self._send(Refused(kind, reason))
        self.close()


def _ready_index(incarnation: int) -> SharedIndex:
    """An empty index, with all that the door needs compiled: that takes a moment once per installation."""
    from kvpool.local.copy_kernels import copy_kernel

    copy_kernel()
    return SharedIndex(incarnation)


def _address(message: Touch | Corrupt) -> tuple[bytes, list[bytes]]:
    if len(message.kv_namespace) != KEY_NBYTES or len(message.chain) % KEY_NBYTES:
        raise ProtocolError(f"a namespace of {len(message.kv_namespace)} bytes, keys of {len(message.chain)}")
    chain = [message.chain[i : i + KEY_NBYTES] for i in range(0, len(message.chain), KEY_NBYTES)]
    return message.kv_namespace, chain

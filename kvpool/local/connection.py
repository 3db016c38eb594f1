"""One caller of a pool node's door: its frames in, answers out, what it has offered. Decisions are the node's.

Requests are carried out one after the other, in the node's event loop. Whoever breaks the protocol is told so and sent
away.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable

from kvpool.address import KEY_NBYTES
from kvpool.errors import KvPoolError
from kvpool.local.frames import (
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
from messenger.errors import ProtocolError
from messenger.frames import PREFIX
from messenger.memory import PeerMemory

__all__ = ["LANDING_NBYTES", "Connection"]

_log = logging.getLogger(__name__)

_MAX_REGIONS = 64  # mapped per caller
_MAX_UNSENT_NBYTES = 1 << 20  # of answers that a caller does not take
LANDING_NBYTES = 1 << 18
_MAX_FDS = 4
_FD = struct.Struct("@i")
_ANCILLARY_NBYTES = socket.CMSG_LEN(_MAX_FDS * _FD.size)
_HELLO_S = 10.0  # until when a caller must have said who it is


class Connection:
    """From accept to `close`; `on_close` is called with it then, once."""

    def __init__(
        self,
        sock: socket.socket,
        node: PoolNode,
        index: SharedIndex,
        intake: Intake,
        landing: memoryview,
        on_close: "Callable[[Connection], None]",
    ) -> None:
        """`landing` is where bytes come in; they are taken on at once, so all callers of a door share it."""
        sock.setblocking(False)
        self._sock = sock
        self._node, self._index, self._intake = node, index, intake
        self._landing = landing
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._caller: Caller | None = None
        self._regions: dict[int, Mapped] = {}
        self._received = bytearray()
        self._fds: list[int] = []
        self._unsent = bytearray()
        self.putting: asyncio.Task[None] | None = None  # a put that takes its time
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
        self._on_close(self)

    def _readable(self) -> None:
        try:
            nbytes, ancillary, flags, _ = self._sock.recvmsg_into([self._landing], _ANCILLARY_NBYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds += [fd for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size])]
        if not nbytes:
            self.close()
        elif flags & socket.MSG_CTRUNC or len(self._fds) > _MAX_FDS:
            self._refuse("ProtocolError", "too many descriptors at once")
        else:
            self._received += self._landing[:nbytes]
            self._work()

    def _work(self) -> None:
        """Carry out what has come, until a put must be waited for."""
        try:
            while self.putting is None and (message := self._next()) is not None:
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
        kind, nbytes = decode_prefix(self._received)
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
        node, index = self._node, self._index
        match message:
            case Put():
                self._put(message)
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
        stored = self._intake.put(self._caller, message, source, self._is_there)
        if isinstance(stored, bytes):
            self._send(Stored(stored))
        else:
            self._loop.remove_reader(self._sock.fileno())
            self.putting = self._loop.create_task(self._finish(stored))

    def _is_there(self) -> bool:
        """Whether the caller, who waits for an answer, has not hung up."""
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

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
        self.putting = None
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


def _address(message: Touch | Corrupt) -> tuple[bytes, list[bytes]]:
    if len(message.kv_namespace) != KEY_NBYTES or len(message.chain) % KEY_NBYTES:
        raise ProtocolError(f"a namespace of {len(message.kv_namespace)} bytes, keys of {len(message.chain)}")
    chain = [message.chain[i : i + KEY_NBYTES] for i in range(0, len(message.chain), KEY_NBYTES)]
    return message.kv_namespace, chain

"""A process's end of a pool node's door: connects, asks and is answered. Blocking, one request at a time.

Descriptors that come with answers become read-only mappings here. What is read from them is `kvpool.local.pool`'s.
"""

import contextlib
import os
import socket
import struct
import threading
from pathlib import Path
from typing import NoReturn, TypeVar

from kvpool import errors
from kvpool.errors import DoorClosed, KvPoolError
from kvpool.local.frames import (
    AskIndex,
    Hello,
    Index,
    Message,
    Refused,
    Welcome,
    decode_body,
    decode_prefix,
    encode,
)
from messenger.errors import ProtocolError
from messenger.frames import PREFIX
from messenger.memory import PeerMemory

__all__ = ["DoorCaller"]

_READ_NBYTES = 1 << 16
_WITH_DESCRIPTORS = (Welcome, Index)
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)

Answer = TypeVar("Answer", bound=Message)


class DoorCaller:
    """One connection. Every call but `alive` raises DoorClosed once it is lost; it does not come back."""

    def __init__(self, path: Path, *, owner: str, owner_incarnation: int, deadline_s: float) -> None:
        """Connect and say who calls. No answer may take longer than `deadline_s`, this one included."""
        self.path = path
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._sock = socket.socket(socket.AF_UNIX)
        try:
            # The kernel's own time limits: Python's cost a call more per call.
            limit = struct.pack("@ll", int(deadline_s), int(deadline_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._sock.connect(os.fspath(path))
        except OSError as error:
            self._sock.close()
            raise DoorClosed(f"no pool node answers at {path}: {error}") from error
        try:
            welcome = self.ask(Hello(owner, owner_incarnation), Welcome)
            self.node_id, self.incarnation = welcome.node_id, welcome.incarnation
            self.arena = self._mapped(welcome.arena_nbytes)
            self.index = self._mapped(welcome.index_nbytes)
        except BaseException:
            self.close()
            raise

    def alive(self) -> bool:
        """Whether the pool node is there: it has neither ended nor sent this caller away. Asks the kernel only."""
        try:
            return bool(self._sock.recv(1, _LOOK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def ask(self, request: Message, answer_type: type[Answer], fd: int | None = None) -> Answer:
        """The answer; raises the KvPoolError that came instead."""
        with self._lock:
            self._send(request, fd)
            answer = self._receive(answer_type in _WITH_DESCRIPTORS)
        if isinstance(answer, Refused):
            raise _refusal(answer)
        if not isinstance(answer, answer_type):
            self.close()
            raise DoorClosed(f"the pool node at {self.path} answered {type(answer).__name__}")
        return answer

    def tell(self, message: Message) -> None:
        """Send what has no answer."""
        with self._lock:
            self._send(message, None)

    def tell_if_free(self, message: Message) -> bool:
        """As `tell`, unless another thread has a request under way: then nothing is sent."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._send(message, None)
        finally:
            self._lock.release()
        return True

    def renew_index(self) -> PeerMemory:
        """The index that is in use now, mapped."""
        answer = self.ask(AskIndex(), Index)
        self.index = self._mapped(answer.nbytes)
        return self.index

    def close(self) -> None:
        """Hang up. Closing twice is allowed."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _mapped(self, nbytes: int) -> PeerMemory:
        if not self._fds:
            self.close()
            raise DoorClosed(f"the pool node at {self.path} sent no descriptor")
        try:
            return PeerMemory(self._fds.pop(0), nbytes)
        except ProtocolError as error:
            self.close()
            raise DoorClosed(f"the pool node at {self.path} sent no memory: {error}") from error

    def _send(self, message: Message, fd: int | None) -> None:
        data = memoryview(encode(message))
        try:
            if fd is not None:
                data = data[socket.send_fds(self._sock, [data], [fd]) :]
            self._sock.sendall(data)
        except OSError as error:
            self._lost(error)

    def _receive(self, with_descriptors: bool) -> Message:
        """The one answer that is under way; nothing comes that was not asked for."""
        try:
            data = self._at_least(PREFIX.size, b"", with_descriptors)
            kind, nbytes = decode_prefix(data[: PREFIX.size])
            data = self._at_least(PREFIX.size + nbytes, data, with_descriptors)
            return decode_body(kind, data[PREFIX.size :])
        except (OSError, ProtocolError) as error:
            self._lost(error)

    def _at_least(self, nbytes: int, data: bytes, with_descriptors: bool) -> bytes:
        while len(data) < nbytes:
            if with_descriptors:
                part, fds, _, _ = socket.recv_fds(self._sock, _READ_NBYTES, 4)
                self._fds += fds
            else:
                part = self._sock.recv(_READ_NBYTES)
            if not part:
                raise ConnectionResetError("it hung up")
            data += part
        return data

    def _lost(self, error: Exception) -> NoReturn:
        self.close()
        raise DoorClosed(f"the pool node at {self.path} is gone: {error}") from error


def _refusal(answer: Refused) -> KvPoolError:
    kind = getattr(errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, KvPoolError):
        return kind(answer.reason)
    return DoorClosed(f"the pool node sent this caller away: {answer.reason}")

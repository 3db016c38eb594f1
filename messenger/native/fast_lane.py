"""A compiled owner loop at work on one connection: its memory, and what it hands over to Python."""

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from messenger.counters import FloatSums
from messenger.frames import Ack, Notify, Read, Write, prefix
from messenger.grants import GrantTable
from messenger.link import Cuttable
from messenger.memory import PeerMemory
from messenger.native import socket_io as loop
from messenger.native.owner_loop import owner_loop
from messenger.native.socket_state import SocketState
from messenger.sessions import Session
from messenger.sockets import SocketLink

__all__ = ["CompiledLoop", "Note"]

MAX_BUFFER_NBYTES = 1 << 20
"""Frames that are longer are left to Python."""

_CONTROL_HEAD = struct.Struct("@Nii")
_HEADS = ((loop.WRITE_HEAD, Write), (loop.NOTIFY_HEAD, Notify), (loop.READ_HEAD, Read), (loop.ACK_HEAD, Ack))


class Note(NamedTuple):
    """What was written with it has landed; it takes effect if the caller still wants it."""

    seq: int
    tag: bytes
    payload: bytes


class CompiledLoop:
    """Used by the connection's thread alone."""

    def __init__(
        self, link: SocketLink, grants: GrantTable, mover: Cuttable, landed: FloatSums, served: FloatSums
    ) -> None:
        self._link = link
        self._grants = grants
        self._slots = grants.slots()
        self._inside = self._slots.open_loop(mover)
        self._waiting = memoryview(self._slots.waiting)  # type: ignore[arg-type]
        self._loop = owner_loop()
        self._socket = SocketState(link)
        self._state = self._socket.numbers
        self._flows = landed, served
        for place, array in (
            (loop.SLOTS, self._slots.words),
            (loop.INSIDE, self._inside),
            (loop.WAITING, self._slots.waiting),
            (loop.LANDED, landed),
            (loop.SERVED, served),
        ):
            self._state[place] = array.ctypes.data
        for place, kind in _HEADS:
            self._state[place] = int.from_bytes(prefix(kind, 0)[:8], "little")
        self._state[loop.IS_UNIX] = link.is_unix
        self._offer(np.zeros((0, 3), np.int64))

    def close(self) -> None:
        """Its thread has ended its work."""
        self._slots.close_loop(self._inside)

    def offered(self, memories: Iterable[tuple[int, PeerMemory]]) -> None:
        """The caller's memories by their numbers, which somebody else keeps mapped; those of before are forgotten."""
        rows = [(number, memory.address, memory.nbytes) for number, memory in memories]
        self._offer(np.array(rows, np.int64).reshape(-1, 3))

    def run(self, session: Session) -> Note | None:
        """Take requests until one has a notification, or the next frame (None) is for Python to receive.

        The answer to a notification is sent by the next call. Raises OSError when the connection has ended.
        """
        state = self._state
        state[loop.LAST_SEQ], state[loop.HIGHEST_REFUSED] = session.last_seq, session.highest_refused
        self._socket.borrow()
        try:
            while True:
                why = self._run()
                if why == loop.NOTE:
                    tag_at, payload_at, end = state[loop.TAG_AT], state[loop.PAYLOAD_AT], state[loop.NOTE_END]
                    buffer = self._socket.buffer
                    tag, payload = bytes(buffer[tag_at:payload_at]), bytes(buffer[payload_at:end])
                    return Note(state[loop.ACK_SEQ], tag, payload)
                if why == loop.FRAME or (why == loop.GROW and state[loop.WANTED] > MAX_BUFFER_NBYTES):
                    return None
                if why == loop.GROW:
                    self._socket.give_back()
                    self._socket.borrow(2 * state[loop.WANTED])
                elif why == loop.DESCRIPTORS:
                    self._link.keep_fds(_passed_fds(self._socket.scratch, state[loop.CONTROL_NBYTES]))
                elif why == loop.ENDED:
                    raise self._socket.error()
        finally:
            session.last_seq = state[loop.LAST_SEQ]
            self._socket.give_back()

    def _run(self) -> int:
        why: int = self._loop(self._socket.array)
        if self._waiting[0]:
            self._grants.left()
        return why

    def _offer(self, sources: npt.NDArray[np.int64]) -> None:
        self._sources = sources
        self._state[loop.SOURCES], self._state[loop.NUM_SOURCES] = sources.ctypes.data, len(sources)


def _passed_fds(scratch: npt.NDArray[np.int64], nbytes: int) -> list[int]:
    """The descriptors in the control messages (cmsg(3)) that the loop received."""
    control = scratch[loop.CONTROL_AT :].tobytes()[:nbytes]
    fds: list[int] = []
    while len(control) >= _CONTROL_HEAD.size:
        length, _, _ = _CONTROL_HEAD.unpack_from(control)  # SCM_RIGHTS: sockets get no other kind unless they ask
        data = control[_CONTROL_HEAD.size : length]
        fds += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
        control = control[max(-(-length // 8) * 8, _CONTROL_HEAD.size) :]
    return fds

"""References in Python for the messenger's compiled modules that use sockets: the same behaviour, byte for byte.

Without a compiled responder loop, `messenger.inbound`, which defines the loop's behaviour, serves all requests. The
other compiled modules of the messenger touch memory alone, and run unmodified.
"""

from __future__ import annotations

import ctypes
import struct
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tools.prove.world.sockets import by_fileno, socket

if TYPE_CHECKING:
    from messenger.link import BufferedLink

__all__ = ["REPLACED"]

_ROW = struct.Struct("@qq")
_MAX_VIEWS = 1024  # Linux's IOV_MAX


class ReferenceReceiver:
    """Receiving side of a link, as messenger.native.socket_io.NativeReceiver. One thread at a time."""

    def __init__(self, link: BufferedLink, *, is_unix: bool) -> None:
        self._link = link
        self._socket = by_fileno(link.fileno())

    def receive_some(self, buffer: memoryview, start: int, nbytes: int) -> tuple[int, list[int]]:
        """Receive 1 to `nbytes` bytes at `start` of the buffer; returns their number, 0 at the end, and no descriptors.

        Raises OSError.
        """
        return self._socket.recv_into(buffer[start : start + nbytes]), []

    def receive(self, address: int, rows: bytes, nbytes: int) -> None:
        """Receive `nbytes` bytes into rows, int64 [n, 2] of (offset from the address, bytes). Raises OSError."""
        pending = [view for view in _views(address, list(_ROW.iter_unpack(rows))) if len(view)]
        buffer, start, end = self._link.lend_buffer()
        at = 0
        while at < len(pending) and start < end:
            ready = min(len(pending[at]), end - start)
            pending[at][:ready] = buffer[start : start + ready]
            start += ready
            pending[at] = pending[at][ready:]
            at += not len(pending[at])
        self._link.return_buffer(start, end)
        while at < len(pending):
            moved = self._socket.recvmsg_into(pending[at : at + _MAX_VIEWS], 0, socket.MSG_WAITALL)[0]
            if not moved:
                from messenger.link import LinkClosed

                raise LinkClosed(f"{self._link.address} closed the connection")
            while moved and moved >= len(pending[at]):
                moved -= len(pending[at])
                at += 1
            if moved:
                pending[at] = pending[at][moved:]


def _views(address: int, rows: list[tuple[int, int]]) -> list[memoryview]:
    """Return the memory of rows of (offset from the address, bytes)."""
    first = min((offset for offset, _ in rows), default=0)
    end = max((offset + nbytes for offset, nbytes in rows), default=0)
    memory = memoryview((ctypes.c_ubyte * (end - first)).from_address(address + first)).cast("B")
    return [memory[offset - first : offset - first + nbytes] for offset, nbytes in rows]


def _nothing(*_: Any) -> None:
    """Stand for a compiled function that is never called, or for the loop that there is not."""


_socket_io = ModuleType("messenger.native.socket_io", __doc__)
_socket_io.__dict__.update(
    NativeReceiver=ReferenceReceiver,
    receive_rows=_nothing,
    receive=_nothing,  # these two are part of functions of unit_digests that only the compiled loop calls
    row_at=_nothing,
)
_responder_loop = ModuleType("messenger.native.responder_loop", __doc__)
_responder_loop.__dict__.update(CompiledLoop=_nothing, responder_loop=_nothing)
REPLACED = {_socket_io.__name__: _socket_io, _responder_loop.__name__: _responder_loop}
"""Modules to install."""

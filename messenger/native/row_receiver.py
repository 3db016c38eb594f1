"""A payload into its rows by one call without the GIL, for who receives it outside an owner's loop: a reader.

So between a payload's first byte and its last the thread asks for the GIL once, however often it sleeps; and when a
signal came, or nothing for half a second, so that Python acts on a Ctrl-C there though the sender stands still.
"""

import errno
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.np.numpy_support import carray

from jit.compiling import compiled
from messenger.link import BufferedLink
from messenger.native.libc import pointer_i64, pointer_u8
from messenger.native.socket_io import (
    BUFFER,
    BUFFER_NBYTES,
    ERRNO,
    FD,
    LEFT_NBYTES,
    NUM_SCRATCH,
    RETURNS,
    SCRATCH,
    receive,
)
from messenger.native.socket_state import SocketState

__all__ = ["RowReceiver", "receive_rows"]


class RowReceiver:
    """Used by one thread at a time."""

    def __init__(self, link: BufferedLink) -> None:
        self._socket = SocketState(link)
        self._socket.numbers[RETURNS] = 1
        self._receive = receive_rows()

    def receive(self, address: int, rows: bytes, nbytes: int) -> None:
        """`rows` are int64 [n, 2] of (offset from the address, bytes), `nbytes` together. Raises OSError."""
        left = np.frombuffer(rows, np.int64)
        numbers = self._socket.numbers
        self._socket.borrow()
        try:
            while not self._receive(self._socket.array, address, left, nbytes):
                if numbers[ERRNO] != errno.EINTR:
                    raise self._socket.error()
                left, nbytes = _after(left, nbytes - numbers[LEFT_NBYTES]), numbers[LEFT_NBYTES]
        finally:
            self._socket.give_back()


def _after(rows: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.int64]:
    """What of the rows follows so many bytes, of which there are more."""
    ends = np.cumsum(rows[1::2])
    whole = int(np.searchsorted(ends, nbytes, side="right"))
    rest = rows[2 * whole :].copy()
    begun = nbytes - (int(ends[whole - 1]) if whole else 0)
    rest[0] += begun
    rest[1] -= begun
    return rest


@functools.cache
def receive_rows() -> Any:
    """`receive(state, address, rows, nbytes) -> whether all came`. Compiled, or loaded, at the first call."""
    rows = types.Array(types.int64, 1, "C", readonly=True)
    return compiled(_receive, types.boolean(types.Array(types.int64, 1, "C"), types.int64, rows, types.int64))


def _receive(state, address, rows, nbytes):  # type: ignore[no-untyped-def]
    scratch = carray(pointer_i64(state[SCRATCH]), NUM_SCRATCH)
    buffer = carray(pointer_u8(state[BUFFER]), state[BUFFER_NBYTES])
    rows_at = np.int64(rows.ctypes.data)
    return receive(np.int32(state[FD]), state, scratch, buffer, rows_at, len(rows) // 2, address, nbytes)

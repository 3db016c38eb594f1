"""A link's socket as compiled loops know it: its descriptor, the link's buffer, and the memory for calls' arguments."""

import os

import numpy as np

from messenger.link import BufferedLink, LinkClosed
from messenger.native import socket_io as loop

__all__ = ["SocketState"]


class SocketState:
    """Used by one thread at a time, between `borrow` and `give_back` of the link's buffer."""

    def __init__(self, link: BufferedLink) -> None:
        self._link = link
        self.array = np.zeros(loop.NUM_STATE, np.int64)
        self.numbers = memoryview(self.array)  # type: ignore[arg-type]
        """The same memory, in which a number is read and set several times as fast."""
        self.scratch = np.zeros(loop.NUM_SCRATCH, np.int64)
        self.buffer = memoryview(b"")
        self.numbers[loop.FD], self.numbers[loop.SCRATCH] = link.fileno(), self.scratch.ctypes.data

    def borrow(self, nbytes: int = 0) -> None:
        """The link's buffer, of at least so many bytes."""
        numbers = self.numbers
        buffer, numbers[loop.START], numbers[loop.END] = self._link.lend_buffer(nbytes)
        if buffer is not self.buffer:
            self.buffer, numbers[loop.BUFFER_NBYTES] = buffer, len(buffer)
            numbers[loop.BUFFER] = np.frombuffer(buffer, np.uint8).ctypes.data

    def give_back(self) -> None:
        """As the loop has left it."""
        self._link.return_buffer(self.numbers[loop.START], self.numbers[loop.END])

    def error(self) -> OSError:
        """Why the connection ended."""
        errno: int = self.numbers[loop.ERRNO]
        return (
            OSError(errno, os.strerror(errno)) if errno else LinkClosed(f"{self._link.address} closed the connection")
        )

"""Requests on their way to one queue pair: made with the connection's lock held, handed to the device without it.

The device gets in one call, as one chain, whatever was made by then: whoever rings while another thread does leaves it
to that one, which looks again before it goes, though not for ever. A soft device sends within the call, for as long as
the bytes take.
"""

import contextlib
import ctypes
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_NEXT_AT: Final = 8  # in struct ibv_send_wr
_ROUNDS: Final = 8
"""So often a thread posts what others added while it posted."""


class Doorbell:
    """`post(address of a chain)` returns an errno. `add` one thread at a time, the others any."""

    def __init__(self, post: Callable[[int], int], device: str) -> None:
        self._post = post
        self._device = device
        self.made: deque[tuple[int, int, object]] = deque()
        """Chains that nobody has begun to post."""
        self._ringing = threading.Lock()
        self._closed = False

    def add(self, first: int, last: int, memory: object) -> None:
        """A chain, from the address of its first request to that of its last; the memory lives until it was posted."""
        self.made.append((first, last, memory))

    def ring(self) -> bool:
        """Post what was added, or leave it to who does so now. Raises OSError when the queue pair does not take it.

        True: others have added so much meanwhile that somebody else should go on, and nobody does.
        """
        for _ in range(_ROUNDS):
            if not self.made or not self._ringing.acquire(blocking=False):
                return False
            try:
                self._post_all()
            finally:
                self._ringing.release()
        return bool(self.made)

    def alone(self, post: Callable[[], None]) -> None:
        """Post what was added, and then something else, behind it. Raises what `post` raises, and OSError."""
        with self._ringing:
            self._post_all()
            post()

    def clear(self) -> None:
        """Forget what was added."""
        self.made.clear()

    def close(self) -> None:
        """Nothing is posted after this."""
        with self._ringing:
            self._closed = True
            self.made.clear()

    def _post_all(self) -> None:
        chains = []
        with contextlib.suppress(IndexError):  # it may be cleared in between
            while self.made:
                chains.append(self.made.popleft())
        if not chains or self._closed:
            return
        for (_, last, _), (following, _, _) in itertools.pairwise(chains):
            ctypes.c_uint64.from_address(last + _NEXT_AT).value = following
        code = self._post(chains[0][0])
        if code:
            raise OSError(code, f"{self._device} takes no more work: {os.strerror(code)}")

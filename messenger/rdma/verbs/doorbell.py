"""Requests on their way to one queue pair: built with the connection's lock held, posted without it.

One call posts everything built so far as one chain. A thread that rings while another posts leaves its work to that
thread, which checks again before it returns, a bounded number of times. A soft device sends within the call, for as
long as the bytes take.
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
"""Rounds in which a thread posts what others added while it posted."""


class Doorbell:
    """Posting of request chains. `post(address of a chain)` returns an errno. `add` is for one thread at a time, the
    other methods for any.
    """

    def __init__(self, post: Callable[[int], int], device: str) -> None:
        self._post = post
        self._device = device
        self.made: deque[tuple[int, int, object]] = deque()
        """Chains that no thread has begun to post."""
        self._ringing = threading.Lock()
        self._closed = False

    def add(self, first: int, last: int, memory: object) -> None:
        """Add a chain by the addresses of its first and last request; the memory must live until it was posted."""
        self.made.append((first, last, memory))

    def ring(self) -> bool:
        """Post what was added, or leave it to the thread that is posting. Raises OSError when the queue pair rejects
        it.

        Return True if others have added so much meanwhile that another thread should continue, and none does.
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
        """Post what was added, then run another action behind it. Raises what the action raises, and OSError."""
        with self._ringing:
            self._post_all()
            post()

    def clear(self) -> None:
        """Discard what was added."""
        self.made.clear()

    def close(self) -> None:
        """Post nothing from now on."""
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

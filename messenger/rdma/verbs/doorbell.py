"""Posting of requests to one queue pair: they are built with the connection's lock held, and posted without it.

One call posts everything built so far as one chain. A soft device sends within the call, for as long as the bytes take,
so several threads share the work:

    `made`       chains that no thread has begun to post: appended by `add` (under the connection's lock), removed by
                 the thread that posts
    `_ringing`   held by the thread that posts. A thread that calls `ring` meanwhile leaves its chains to that thread,
                 which checks `made` again before it returns, a bounded number of times
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
"""Most rounds in which a thread posts chains that others added while it posted."""


class Doorbell:
    """Queue of request chains. `post(address of a chain)` returns an errno.

    `add` is for one thread at a time, the other methods for any.
    """

    def __init__(self, post: Callable[[int], int], device: str) -> None:
        self._post = post
        self._device = device
        self.made: deque[tuple[int, int, object]] = deque()
        """Chains that no thread has begun to post."""
        self._ringing = threading.Lock()
        self._closed = False

    def add(self, first: int, last: int, memory: object) -> None:
        """Add a chain by the addresses of its first and last request; `memory` is kept alive until it was posted."""
        self.made.append((first, last, memory))

    def ring(self) -> bool:
        """Post the added chains, or leave them to the thread that is posting.

        Returns True if chains are left after the last round and no thread is posting them, so that another thread
        should call `ring`. Raises OSError if the queue pair rejects a chain.
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
        """Post the added chains, then call `post`. Raises OSError, and what `post` raises."""
        with self._ringing:
            self._post_all()
            post()

    def clear(self) -> None:
        """Discard the added chains."""
        self.made.clear()

    def close(self) -> None:
        """Discard the added chains and post nothing from now on."""
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

"""Threads that send pushes: in order towards each destination, and concurrently towards different ones.

A destination whose pushes take long (digests of a long prompt, copies that have not ended) occupies one thread; the
others serve the remaining destinations. A destination that has been served goes to the end of the queue.

`_lock` guards `_waiting`: the jobs of every destination that is being served or is in the executor's queue. A
destination has at most one entry there, so that its jobs never run concurrently.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

log = logging.getLogger(__name__)

NUM_SENDERS = 4


class PushSenders:
    """Executor that runs the jobs of one destination one after another."""

    def __init__(self, num_threads: int = NUM_SENDERS) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="push")
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Callable[[], object]]] = {}

    def submit(self, destination: Hashable, job: Callable[..., object], *arguments: Any) -> None:
        """Run `job(*arguments)` after the earlier jobs of the destination. Raises RuntimeError after `close`.

        Wakes a thread only if the destination has no job at present.
        """
        one = partial(job, *arguments)
        with self._lock:
            waiting = self._waiting.get(destination)
            if waiting is not None:
                waiting.append(one)
                return
            self._threads.submit(self._serve, destination)
            self._waiting[destination] = deque([one])

    def close(self) -> None:
        """Run all jobs that were submitted, and end the threads."""
        self._threads.shutdown()

    def _serve(self, destination: Hashable) -> None:
        """Run the destination's first job, and then others if nobody else waits for a thread."""
        while True:
            with self._lock:
                job = self._waiting[destination].popleft()
            try:
                job()
            except Exception:
                log.exception("a push failed without reporting it")
            with self._lock:
                if not self._waiting[destination]:
                    del self._waiting[destination]
                    return
                if len(self._waiting) > 1 and self._queue_again(destination):
                    return

    def _queue_again(self, destination: Hashable) -> bool:
        """Queue the destination behind the others; return False if the threads are ending."""
        try:
            self._threads.submit(self._serve, destination)
        except RuntimeError:
            return False
        return True

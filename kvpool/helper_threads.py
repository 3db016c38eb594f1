"""Threads that help their callers with work made of pieces, which each of them takes one after the other.

The work's progress, among any number of threads:

    caller    share ────────── finish: takes pieces ── no piece left ── `closed`, waits for num_helpers == 0 ── returns
    helper      └─ join: num_helpers += 1 ── takes pieces ── no piece left ── leave: num_helpers -= 1
    late helper                                            finds the work closed, and skips it

`SharedWork._changed` guards `_closed` and `_num_helpers`. So no thread touches the work's memory after `finish` has
returned, and work never waits for a helper that has not begun.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class SharedWork:
    """Work in progress. The caller must always call `finish` before it releases the work's memory."""

    def __init__(self, run: Callable[[], None]) -> None:
        """Share `run`, which any number of threads call at a time: it takes pieces until none is left."""
        self._run = run
        self._num_helpers = 0
        self._closed = False
        self._changed = threading.Condition()

    def help(self) -> None:
        """Run remaining pieces in a helper, unless the work is over."""
        with self._changed:
            if self._closed:
                return
            self._num_helpers += 1
        try:
            self._run()
        finally:
            with self._changed:
                self._num_helpers -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Run the remaining pieces, and wait until no helper runs one."""
        try:
            self._run()
        finally:
            with self._changed:
                self._closed = True
                self._changed.wait_for(lambda: not self._num_helpers)


class HelperThreads:
    """A number of threads, shared by all callers; `stop` ends them."""

    def __init__(self, count: int, name: str, at_start: Callable[[], None] = lambda: None) -> None:
        """Start `count` threads, each of which first calls `at_start`."""
        self._waiting: SimpleQueue[SharedWork | None] = SimpleQueue()
        self._at_start = at_start
        self._threads = [threading.Thread(target=self._help, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def share(self, run: Callable[[], None], most: int) -> SharedWork:
        """Start `run` in up to `most` helpers, as they become free."""
        work = SharedWork(run)
        for _ in range(min(len(self._threads), most)):
            self._waiting.put(work)
        return work

    def stop(self) -> None:
        """Stop the threads; no work may be in progress."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _help(self) -> None:
        self._at_start()
        while (work := self._waiting.get()) is not None:
            work.help()
            del work

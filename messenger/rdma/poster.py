"""A thread that hands requests to a soft device, which sends within the call: so that no caller waits for that."""

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Poster:
    """Calls `ring` on its own thread, which begins with the first `wake`. Any thread."""

    def __init__(self, ring: Callable[[], None], name: str) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None
        self._closed = False

    def wake(self) -> None:
        """Ring soon."""
        if self._thread is None:
            self._begin()
        self._wakes.put(True)

    def close(self) -> None:
        """Returns when it rings no more; not on its own thread."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._wakes.put(False)
            thread.join()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while self._wakes.get():
            self._ring()

"""Virtual time: a heap of things that will happen. Things of one moment happen in the order they were asked for."""

import heapq
from collections.abc import Callable

__all__ = ["NS", "Clock"]

NS = 1_000_000_000


class Clock:
    """Integer nanoseconds from 0."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        """Do `action` at `time_ns`, or now if that has passed."""
        self._asked += 1
        heapq.heappush(self._heap, (max(time_ns, self.now_ns), self._asked, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do `action` so many nanoseconds from now."""
        self.at(self.now_ns + delay_ns, action)

    def run(self, keep_going: Callable[[], bool]) -> None:
        """Let things happen, one after the other, for as long as `keep_going()` and there are any."""
        heap = self._heap
        while heap and keep_going():
            self.now_ns, _, action = heapq.heappop(heap)
            action()

"""Virtual time: a heap of things that will happen. Things of one moment happen in the order they were asked for.

Links of finite speed: whoever sends on one waits for those before it. Congestion is nothing else.
"""

import heapq
from collections.abc import Callable

NS = 1_000_000_000


class VirtualClock:
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


class SimulatedLink:
    """One direction of a node's network, or a host's memory or SSD."""

    def __init__(self) -> None:
        self.free_ns = 0


def send(now_ns: int, links: tuple[SimulatedLink, ...], duration_ns: int) -> int:
    """Bytes that take `duration_ns` alone go over all `links` at once, as soon as all are free: when they arrive."""
    begin_ns = max(now_ns, *(link.free_ns for link in links))
    for link in links:
        link.free_ns = begin_ns + duration_ns
    return begin_ns + duration_ns

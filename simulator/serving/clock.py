"""Virtual clock and links. Events with equal times run in the order in which they were scheduled.

Links have finite bandwidth: a transfer waits for earlier ones on its links. There is no other model of congestion.
"""

import heapq
from collections.abc import Callable

NS = 1_000_000_000


class VirtualClock:
    """Event heap with a clock in integer nanoseconds from 0."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        """Schedule `action` at `time_ns`, or now if that has passed."""
        self._asked += 1
        heapq.heappush(self._heap, (max(time_ns, self.now_ns), self._asked, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Schedule `action` after `delay_ns` nanoseconds."""
        self.at(self.now_ns + delay_ns, action)

    def run(self, keep_going: Callable[[], bool]) -> None:
        """Run events in order until none are left or `keep_going()` returns False."""
        heap = self._heap
        while heap and keep_going():
            self.now_ns, _, action = heapq.heappop(heap)
            action()


class SimulatedLink:
    """One direction of a node's network, or a host's memory or SSD."""

    def __init__(self) -> None:
        self.free_ns = 0


def send(now_ns: int, links: tuple[SimulatedLink, ...], duration_ns: int) -> int:
    """Occupy all `links` for a transfer of `duration_ns`, starting when all are free; return the time of arrival."""
    begin_ns = max(now_ns, *(link.free_ns for link in links))
    for link in links:
        link.free_ns = begin_ns + duration_ns
    return begin_ns + duration_ns

"""Virtual time and links. Events of one moment run in the order of their scheduling.

Links have finite speed: a transfer waits for the earlier ones on its links. There is no other model of congestion.
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
        """Schedule `action` in so many nanoseconds."""
        self.at(self.now_ns + delay_ns, action)

    def run(self, keep_going: Callable[[], bool]) -> None:
        """Run events in order while `keep_going()` is true and there are any."""
        heap = self._heap
        while heap and keep_going():
            self.now_ns, _, action = heapq.heappop(heap)
            action()


class SimulatedLink:
    """One direction of a node's network, or a host's memory or SSD."""

    def __init__(self) -> None:
        self.free_ns = 0


def send(now_ns: int, links: tuple[SimulatedLink, ...], duration_ns: int) -> int:
    """Transfer bytes that take `duration_ns` without contention over all `links`, starting when all are free. Return
    the time of arrival."""
    begin_ns = max(now_ns, *(link.free_ns for link in links))
    for link in links:
        link.free_ns = begin_ns + duration_ns
    return begin_ns + duration_ns

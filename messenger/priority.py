"""Whose bytes go first: classes of urgency, turns within a queue, and background that yields to what is urgent.

Pure: time is an argument, and whoever shares these objects between threads locks them.

What the traffic to all peers shares: background yields to urgent operations, whoever they go to.
"""

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum

MAX_PASSED = 8
"""How often a waiting part of a lower class is passed over before its turn comes all the same."""

BACKGROUND_PART_NBYTES = 1 << 20
MAX_BACKGROUND_PARTS = 4
"""Background travels in small parts, few at a time on a connection: an urgent one never waits for more than these."""

HELD_S = 0.05
"""How long, at most, background towards a peer is held back for urgent bytes before one part of it goes."""
FRESH_S = 0.1
"""Urgent bytes that have not moved for so long hold nobody back: their peer is slow, or stands still."""


class Priority(IntEnum):
    """URGENT: somebody's next token waits for it. BACKGROUND: nobody waits. Order and notifications hold within one."""

    URGENT = 0
    NORMAL = 1
    BACKGROUND = 2


# As of messenger.operation.Kind.
URGENT, BACKGROUND = Priority.URGENT, Priority.BACKGROUND


class Turns:
    """Which class begins a part next, in one queue: the highest, unless a lower one was passed over too often."""

    def __init__(self) -> None:
        self._passed = [0] * len(Priority)

    def pick(self, waiting: Sequence[bool]) -> int | None:
        """One of the classes that have a part waiting; None when there is none. It counts as taken."""
        first = next((each for each in Priority if waiting[each]), None)
        if first is None:
            return None
        chosen = first
        for each in Priority:
            if not waiting[each]:
                self._passed[each] = 0
            elif self._passed[each] >= max(MAX_PASSED, self._passed[chosen] + 1) and each > first:
                chosen = each
        for each in Priority:
            if waiting[each]:
                self._passed[each] += 1
        self._passed[chosen] = 0
        return chosen


class Yielding:
    """How long background is held back while urgent operations are open, to whatever peer."""

    def __init__(self) -> None:
        self._open = 0
        self._moved_s = 0.0

    def opened(self, now_s: float) -> None:
        """An urgent operation was submitted."""
        self._open += 1
        self._moved_s = now_s

    def moved(self, now_s: float) -> None:
        """Urgent bytes were acknowledged."""
        self._moved_s = now_s

    def closed(self) -> bool:
        """An urgent operation ended; whether none is left."""
        self._open -= 1
        return not self._open

    def until_s(self, last_s: float, now_s: float) -> float:
        """When background may begin towards a peer to which its last part began at `last_s`; `now_s` or before: now."""
        if not self._open:
            return now_s
        return min(self._moved_s + FRESH_S, last_s + HELD_S)


class Road:
    """Any thread. Nobody waits here: who may not go yet is told when to ask again, and called if that is sooner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._yielding = Yielding()
        self._held: set[Callable[[], None]] = set()

    def opened(self, now_s: float) -> None:
        """An urgent operation was submitted."""
        with self._lock:
            self._yielding.opened(now_s)

    def moved(self, now_s: float) -> None:
        """Urgent bytes were acknowledged."""
        with self._lock:
            self._yielding.moved(now_s)

    def closed(self) -> list[Callable[[], None]]:
        """An urgent operation ended: who is to be called now, with no lock held."""
        with self._lock:
            if not self._yielding.closed():
                return []
            held, self._held = list(self._held), set()
            return held

    def until_s(self, last_s: float, now_s: float, call: Callable[[], None]) -> float:
        """As `Yielding.until_s`; who has to wait is called when the last urgent operation ends."""
        with self._lock:
            until_s = self._yielding.until_s(last_s, now_s)
            if until_s > now_s:
                self._held.add(call)
            return until_s

"""Priorities: the choice of the part that begins next, and how background traffic yields to urgent operations.

Except in TrafficGate, there are no locks and no clock: time is an argument, and callers that share an object between
threads lock it.
"""

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum

MAX_PASSED = 8
"""Number of times that a waiting part of a lower priority is passed over before it is chosen."""

BACKGROUND_PART_NBYTES = 1 << 20
MAX_BACKGROUND_PARTS = 4
"""Most background parts in flight per connection, which, being small, delay an urgent part only briefly."""

HELD_S = 0.05
"""Longest time that background traffic to a peer is held back for urgent bytes before one part of it begins."""
FRESH_S = 0.1
"""Urgent bytes without progress for this long hold nothing back, since their peer is slow or does not answer."""


class Priority(IntEnum):
    """Priority of an operation; order and notifications hold within one priority."""

    URGENT = 0
    """A user's next token depends on it."""
    NORMAL = 1
    BACKGROUND = 2
    """No request depends on it."""


# Module constants for hot paths; see messenger.operation.Kind.
URGENT, BACKGROUND = Priority.URGENT, Priority.BACKGROUND


class PriorityPicker:
    """Choice of the priority that begins a part next: the highest, unless a lower one was passed over too often."""

    def __init__(self) -> None:
        self._passed = [0] * len(Priority)

    def pick(self, waiting: Sequence[bool]) -> int | None:
        """Return one of the priorities that have a part waiting, counted as served; None if there is none."""
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


class BackgroundHold:
    """State that determines how long background traffic is held back for pending urgent operations, to any peer."""

    def __init__(self) -> None:
        self._pending = 0
        self._progressed_s = 0.0

    def urgent_submitted(self, now_s: float) -> None:
        """Record that an urgent operation was submitted."""
        self._pending += 1
        self._progressed_s = now_s

    def urgent_progressed(self, now_s: float) -> None:
        """Record that urgent bytes were acknowledged."""
        self._progressed_s = now_s

    def urgent_ended(self) -> bool:
        """Record that an urgent operation ended. Returns True if none is left."""
        self._pending -= 1
        return not self._pending

    def allowed_s(self, last_s: float, now_s: float) -> float:
        """Return the time at which background may begin towards a peer; at most `now_s` if it may begin now.

        `last_s` is the time at which the last background part towards this peer began.
        """
        if not self._pending:
            return now_s
        return min(self._progressed_s + FRESH_S, last_s + HELD_S)


class TrafficGate:
    """Gate shared by the traffic of all peers: background traffic yields to urgent operations to any peer.

    Safe to use from any thread; its lock is a leaf. No call blocks: a caller that must wait gets the time at which to
    call again, and its callback runs if the last urgent operation ends earlier.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hold = BackgroundHold()
        self._held: set[Callable[[], None]] = set()

    def urgent_submitted(self, now_s: float) -> None:
        """Record that an urgent operation was submitted."""
        with self._lock:
            self._hold.urgent_submitted(now_s)

    def urgent_progressed(self, now_s: float) -> None:
        """Record that urgent bytes were acknowledged."""
        with self._lock:
            self._hold.urgent_progressed(now_s)

    def urgent_ended(self) -> list[Callable[[], None]]:
        """Record that an urgent operation ended. Returns callbacks to run now, with no lock held."""
        with self._lock:
            if not self._hold.urgent_ended():
                return []
            held, self._held = list(self._held), set()
            return held

    def background_allowed_s(self, last_s: float, now_s: float, callback: Callable[[], None]) -> float:
        """Return the time as `BackgroundHold.allowed_s`; if it is later than `now_s`, keep the callback."""
        with self._lock:
            allowed_s = self._hold.allowed_s(last_s, now_s)
            if allowed_s > now_s:
                self._held.add(callback)
            return allowed_s

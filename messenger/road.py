"""What the traffic to all peers shares: background yields to urgent operations, whoever they go to."""

import threading
from collections.abc import Callable

from messenger.priority import Yielding

__all__ = ["Road"]


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

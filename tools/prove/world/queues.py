"""The simulated `queue`."""

from __future__ import annotations

from collections import deque
from queue import Empty, Full
from typing import Generic, TypeVar

from tools.prove.world.threads import Condition, Lock

__all__ = ["Empty", "Full", "Queue", "SimpleQueue"]

T = TypeVar("T")


class SimpleQueue(Generic[T]):
    """Unbounded queue between simulated threads."""

    def __init__(self, maxsize: int = 0) -> None:
        self._changed = Condition(Lock())
        self._items: deque[T] = deque()

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Append an item."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Remove the first item. Raises Empty."""
        with self._changed:
            if not self._items and not (block and self._changed.wait_for(lambda: self._items, timeout)):
                raise Empty
            return self._items.popleft()

    def put_nowait(self, item: T) -> None:
        """Append an item."""
        self.put(item)

    def get_nowait(self) -> T:
        """Remove the first item. Raises Empty."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Return True if nothing is queued."""
        return not self._items

    def qsize(self) -> int:
        """Return the number of queued items."""
        return len(self._items)


Queue = SimpleQueue

"""A set that is iterated in the order in which its elements were added, whatever their hashes.

The order of a built-in set of objects depends on their addresses, and would make two runs of one seed differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import Any, TypeVar

__all__ = ["OrderedSet"]

T = TypeVar("T")


class OrderedSet(MutableSet[T]):
    """The part of `set` that the roles use, in the order of insertion."""

    __slots__ = ("__weakref__", "_items")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items: dict[T, None] = dict.fromkeys(items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"OrderedSet({list(self._items)})"

    def __or__(self, other: Any) -> OrderedSet[Any]:
        return self.union(other)

    def __and__(self, other: Any) -> OrderedSet[T]:
        return self.intersection(other)

    def __sub__(self, other: Any) -> OrderedSet[T]:
        return self.difference(other)

    def add(self, item: T) -> None:
        """As set.add."""
        self._items[item] = None

    def discard(self, item: T) -> None:
        """As set.discard."""
        self._items.pop(item, None)

    def remove(self, item: T) -> None:
        """As set.remove."""
        del self._items[item]

    def pop(self) -> T:
        """Remove and return the first element."""
        if not self._items:
            raise KeyError("pop from an empty set")
        item = next(iter(self._items))
        del self._items[item]
        return item

    def clear(self) -> None:
        """As set.clear."""
        self._items.clear()

    def copy(self) -> OrderedSet[T]:
        """As set.copy."""
        return OrderedSet(self._items)

    def update(self, *others: Iterable[T]) -> None:
        """As set.update."""
        for other in others:
            self._items.update(dict.fromkeys(other))

    def difference_update(self, *others: Iterable[Any]) -> None:
        """As set.difference_update."""
        for other in others:
            for item in list(other):
                self._items.pop(item, None)

    def intersection_update(self, *others: Iterable[Any]) -> None:
        """As set.intersection_update."""
        self._items = self.intersection(*others)._items

    def union(self, *others: Iterable[Any]) -> OrderedSet[Any]:
        """As set.union."""
        made: OrderedSet[Any] = self.copy()
        made.update(*others)
        return made

    def intersection(self, *others: Iterable[Any]) -> OrderedSet[T]:
        """As set.intersection."""
        found = [frozenset(other) for other in others]
        return OrderedSet(item for item in self._items if all(item in each for each in found))

    def difference(self, *others: Iterable[Any]) -> OrderedSet[T]:
        """As set.difference."""
        made = self.copy()
        made.difference_update(*others)
        return made

    def symmetric_difference(self, other: Iterable[Any]) -> OrderedSet[Any]:
        """As set.symmetric_difference."""
        there = OrderedSet(other)
        return self.difference(there).union(there.difference(self))

    def issubset(self, other: Iterable[Any]) -> bool:
        """As set.issubset."""
        there = frozenset(other)
        return all(item in there for item in self._items)

    def issuperset(self, other: Iterable[Any]) -> bool:
        """As set.issuperset."""
        return all(item in self._items for item in other)

"""Blocks that a worker's own memory holds, in one or more places, and what has changed since it was last reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class HeldChanges(NamedTuple):
    """Blocks, by chain key, that appeared in the worker's memory, and those that are gone."""

    stored: list[bytes]
    removed: list[bytes]


class HeldBlocks:
    """Chain keys with the number of places that hold each: the slots, and an engine's own cache."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._changes: dict[bytes, bool] = {}  # True: held now, but not when it was last reported; False: the reverse

    def __len__(self) -> int:
        return len(self._places)

    def add(self, key: bytes) -> None:
        """Record that one more place holds the block."""
        places = self._places.get(key, 0)
        self._places[key] = places + 1
        if not places:
            self._change(key, is_held=True)

    def discard(self, key: bytes) -> None:
        """Record that one place no longer holds the block. Raises KeyError if none does."""
        places = self._places[key] - 1
        if places:
            self._places[key] = places
            return
        del self._places[key]
        self._change(key, is_held=False)

    def keys(self) -> Iterable[bytes]:
        """Return the blocks held now."""
        return self._places.keys()

    def take_changes(self) -> HeldChanges:
        """Return the changes since the last call, each block at most once, in the order in which they happened."""
        changes, self._changes = self._changes, {}
        return HeldChanges(
            [key for key, is_held in changes.items() if is_held],
            [key for key, is_held in changes.items() if not is_held],
        )

    def _change(self, key: bytes, *, is_held: bool) -> None:
        if key in self._changes:  # it has returned to what was reported
            del self._changes[key]
        else:
            self._changes[key] = is_held

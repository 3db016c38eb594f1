"""Which sequences may take more slots while they run, so that all that have begun can end: the banker's algorithm.

Answers are given the slots that they will probably need, and more when they need more. If all of them did at once, none
might be able to go on; so slots are only given away while some order is left in which each sequence in turn gets the
most it may need, ends, and gives back what it holds (Dijkstra, EWD 623). Whoever holds slots and wants no more ends by
itself, and is not kept account of. Pure: numbers of slots, no contents.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["GrowthBook"]


@dataclass(slots=True)
class _Growing:
    slots: NDArray[np.int64]  # held
    wants: int  # further ones, at the most


class GrowthBook:
    """The sequences that may need more slots than they hold, of a node with `num_slots`."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._growing: dict[Hashable, _Growing] = {}
        self._holders = np.zeros(num_slots, np.int64)  # of each slot, among the growing

    def __len__(self) -> int:
        return len(self._growing)

    def wants(self, name: Hashable) -> int:
        """Slots that it may still need; 0 for whoever has not begun."""
        one = self._growing.get(name)
        return one.wants if one is not None else 0

    def begin(self, name: Hashable, slots: Sequence[int], wants: int) -> bool:
        """A sequence holds `slots`, some perhaps with others, and may need `wants` more before it ends.

        False, and it has not begun, where then not all could end.
        """
        assert name not in self._growing
        held = np.array(slots, np.int64)
        self._growing[name] = _Growing(held, wants)
        self._holders[held] += 1
        if self._is_safe():
            return True
        self.end(name)
        return False

    def may_extend(self, name: Hashable, count: int) -> bool:
        """Whether all can still end after it was given `count` more."""
        one = self._growing[name]
        one.wants -= count
        safe = self._is_safe(granted=(name, count))
        one.wants += count
        return safe

    def extend(self, name: Hashable, slots: Sequence[int]) -> None:
        """It was given more, which nobody else holds, and wants as many fewer."""
        one, more = self._growing[name], np.array(slots, np.int64)
        one.slots = np.concatenate([one.slots, more])
        one.wants -= len(more)
        self._holders[more] += 1

    def end(self, name: Hashable) -> None:
        """It gives back all that it holds. Nothing happens to who has not begun."""
        one = self._growing.pop(name, None)
        if one is not None:
            self._holders[one.slots] -= 1

    def _is_safe(self, granted: tuple[Hashable, int] | None = None) -> bool:
        grown, by = granted if granted is not None else (None, 0)
        # Free, or so once those have ended that do not grow.
        left = self._num_slots - int(np.count_nonzero(self._holders)) - by
        if left < 0:
            return False
        if sum(one.wants for one in self._growing.values()) <= left:
            return True
        # Those with the smallest wants end first: of one kind of resource that is the best order there is.
        for name, one in sorted(self._growing.items(), key=lambda item: item[1].wants):
            if one.wants > left:
                return False
            left += int(np.count_nonzero(self._holders[one.slots] == 1)) + (by if name == grown else 0)
        return True

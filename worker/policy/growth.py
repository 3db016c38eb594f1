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


@dataclass(slots=True)
class _Growing:
    slots: NDArray[np.int64]  # held
    wants: int  # further ones, at the most


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of all the growing, in one order: what is asked before every grant, so that each costs a few array operations."""

    place: dict[Hashable, int]
    wants: NDArray[np.int64]
    gives: NDArray[np.int64]  # slots that come back with its end: those that it alone holds
    free: int  # or so once those have ended that do not grow


class GrowthLedger:
    """The sequences that may need more slots than they hold, of a node with `num_slots`."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._growing: dict[Hashable, _Growing] = {}
        self._holders = np.zeros(num_slots, np.int64)  # of each slot, among the growing
        self._sums: _Sums | None = None  # None: something has changed since

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
        self._sums = None
        sums = self._summed()
        if _is_safe(sums.wants, sums.gives, sums.free):
            return True
        self.end(name)
        return False

    def may_extend(self, name: Hashable, count: int) -> bool:
        """Whether all can still end after it was given `count` more."""
        sums = self._summed()
        granted = np.zeros(len(sums.wants), np.int64)
        granted[sums.place[name]] = count
        return _is_safe(sums.wants - granted, sums.gives + granted, sums.free - count)

    def extend(self, name: Hashable, slots: Sequence[int]) -> None:
        """It was given more, which nobody else holds, and wants as many fewer."""
        one, more = self._growing[name], np.array(slots, np.int64)
        one.slots = np.concatenate([one.slots, more])
        one.wants -= len(more)
        self._holders[more] += 1
        self._sums = None

    def end(self, name: Hashable) -> None:
        """It gives back all that it holds. Nothing happens to who has not begun."""
        one = self._growing.pop(name, None)
        if one is not None:
            self._holders[one.slots] -= 1
            self._sums = None

    def _summed(self) -> _Sums:
        if self._sums is None:
            growing = self._growing.values()
            slots = np.concatenate([one.slots for one in growing])
            owners = np.repeat(np.arange(len(growing)), [len(one.slots) for one in growing])
            self._sums = _Sums(
                place={name: place for place, name in enumerate(self._growing)},
                wants=np.array([one.wants for one in growing], np.int64),
                gives=np.bincount(owners[self._holders[slots] == 1], minlength=len(growing)),
                free=self._num_slots - int(np.count_nonzero(self._holders)),
            )
        return self._sums


def _is_safe(wants: NDArray[np.int64], gives: NDArray[np.int64], left: int) -> bool:
    """Whether all end when `left` slots are free."""
    # Those with the smallest wants end first: of one kind of resource that is the best order there is.
    order = np.argsort(wants, kind="stable")
    come_back = np.cumsum(gives[order])
    come_back[1:] = come_back[:-1]  # before each one's turn
    come_back[:1] = 0
    return left >= 0 and bool((wants[order] <= left + come_back).all())

"""Safe growth of running sequences: the banker's algorithm (Dijkstra, EWD 623).

Answers get the slots that they will probably need, and more on demand. If all needed more at once, none might be able
to continue. Slots are therefore granted only while there is an order in which each sequence in turn gets the most it
may need, ends and returns its slots. Sequences that need no more slots end by themselves and are not tracked. Pure:
slot numbers, no contents.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class _Growing:
    slots: NDArray[np.int64]  # held
    wants: int  # at most this many more


@dataclass(frozen=True, slots=True)
class _Sums:
    """Totals over all growing sequences in one order, cached so that each grant costs a few array operations."""

    place: dict[Hashable, int]
    wants: NDArray[np.int64]
    gives: NDArray[np.int64]  # slots that only this sequence holds, freed when it ends
    free: int  # including slots of sequences that do not grow


class GrowthLedger:
    """Sequences that may need more slots than they hold, on a node with `num_slots`."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._growing: dict[Hashable, _Growing] = {}
        self._holders = np.zeros(num_slots, np.int64)  # number of growing holders of each slot
        self._sums: _Sums | None = None  # None: outdated

    def __len__(self) -> int:
        return len(self._growing)

    def wants(self, name: Hashable) -> int:
        """Return the number of slots that it may still need; 0 if it has not begun."""
        one = self._growing.get(name)
        return one.wants if one is not None else 0

    def begin(self, name: Hashable, slots: Sequence[int], wants: int) -> bool:
        """Register a sequence that holds `slots`, some possibly shared, and may need `wants` more before it ends.

        Returns False, without registering it, if some sequences could then not end.
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
        """Return True if all sequences can still end after this one gets `count` more slots."""
        sums = self._summed()
        granted = np.zeros(len(sums.wants), np.int64)
        granted[sums.place[name]] = count
        return _is_safe(sums.wants - granted, sums.gives + granted, sums.free - count)

    def extend(self, name: Hashable, slots: Sequence[int]) -> None:
        """Record further slots, which no other sequence holds; its need shrinks by as many."""
        one, more = self._growing[name], np.array(slots, np.int64)
        one.slots = np.concatenate([one.slots, more])
        one.wants -= len(more)
        self._holders[more] += 1
        self._sums = None

    def end(self, name: Hashable) -> None:
        """Remove a sequence that returns all of its slots. Does nothing if it has not begun."""
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
    """Return True if all sequences can end when `left` slots are free."""
    # Smallest needs end first: with one kind of resource this order is optimal.
    order = np.argsort(wants, kind="stable")
    come_back = np.cumsum(gives[order])
    come_back[1:] = come_back[:-1]  # available before each one
    come_back[:1] = 0
    return left >= 0 and bool((wants[order] <= left + come_back).all())

"""How much slower each node is than its model's costs say: one factor per node for prefill, one for decode.

A factor is relative to the model's other nodes: what all of them do is the model's cost (`recentre`). So a node that
slows down gets a factor, and the costs that all share are not spoiled by it.
"""

from math import exp, log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from conductor.policy.requests import NONE
from conductor.policy.watch import Watch

__all__ = ["DECODE", "PREFILL", "NodePaces"]

PREFILL: Final = 0  # rows of `slowdown`
DECODE: Final = 1

_STREAKS: Final = (10, 20)  # measurements that make a change: decode steps come by the dozen per second
_DRIFT: Final = 0.05  # of a usual error, by which a factor follows it
_DEAD: Final = log(1.1)  # nodes within 10 % of each other count as equal: noise must not choose between them
_MOST: Final = log(16.0)  # nobody is believed to be further off, so that a liar draws or drives away no more than that
_LEAST_SHIFT: Final = 0.02
_ENOUGH: Final = 8  # measurements before a node says something about the others


class NodePaces:
    """By slot of the node. The factors are one array that compiled loops read."""

    def __init__(self) -> None:
        self.slowdown: NDArray[np.float64] = np.ones((2, 0))  # times the model's cost, by PREFILL and DECODE
        self._levels: NDArray[np.float64] = np.zeros((2, 0))  # their logarithms, as they are learned
        self._nums: NDArray[np.int64] = np.zeros((2, 0), np.int64)
        self._watches: dict[tuple[int, int], Watch] = {}

    def make_room(self, num_slots: int) -> None:
        """For nodes with slots below `num_slots`; new ones are as quick as the others."""
        missing = num_slots - self._nums.shape[1]
        if missing > 0:
            self.slowdown = np.concatenate([self.slowdown, np.ones((2, missing))], axis=1)
            self._levels = np.concatenate([self._levels, np.zeros((2, missing))], axis=1)
            self._nums = np.concatenate([self._nums, np.zeros((2, missing), np.int64)], axis=1)

    def forget(self, slot: int) -> None:
        """The node has left; its slot may be given to another one."""
        if 0 <= slot < self._nums.shape[1]:
            self.slowdown[:, slot], self._levels[:, slot], self._nums[:, slot] = 1.0, 0.0, 0
            for kind in (PREFILL, DECODE):
                self._watches.pop((kind, slot), None)

    def of(self, kind: int, slot: int) -> float:
        """The node's factor; 1 without a node."""
        return float(self.slowdown[kind, slot]) if slot != NONE else 1.0

    def note(self, kind: int, slot: int, log_error: float) -> tuple[float | None, bool]:
        """The node's work took exp(`log_error`) times what its model's costs say.

        Returns the same with the node's own part taken out and outliers clipped, which the costs may learn from (None:
        they may not), and whether it was one.
        """
        watch = self._watches.get((kind, slot))
        if watch is None:
            watch = self._watches[kind, slot] = Watch(_STREAKS[kind])
        level = float(self._levels[kind, slot])
        before = watch.num_outliers
        usual, change = watch.note(log_error - level)
        self._nums[kind, slot] += 1
        self._set(kind, slot, level + change + _DRIFT * (usual or 0.0))
        is_believed = abs(self._levels[kind, slot]) < _MOST
        return usual if is_believed else None, watch.num_outliers > before

    def recentre(self, kind: int, slots: NDArray[np.int64]) -> float:
        """Make the quicker half's slowest of a model's nodes the measure; returns the logarithm of what the model's
        cost is to be multiplied by. Of two nodes that differ the quicker one is the measure, and a lone one is it."""
        known = slots[self._nums[kind, slots] >= _ENOUGH]
        if not len(known):
            return 0.0
        middle = (len(known) - 1) // 2
        shift = float(np.partition(self._levels[kind, known], middle)[middle])
        if abs(shift) < _LEAST_SHIFT:
            return 0.0
        levels = np.clip(self._levels[kind, known] - shift, -_MOST, _MOST)
        self._levels[kind, known] = levels
        self.slowdown[kind, known] = np.where(np.abs(levels) < _DEAD, 1.0, np.exp(levels))
        return shift

    def _set(self, kind: int, slot: int, level: float) -> None:
        level = min(max(level, -_MOST), _MOST)
        self._levels[kind, slot] = level
        self.slowdown[kind, slot] = 1.0 if abs(level) < _DEAD else exp(level)

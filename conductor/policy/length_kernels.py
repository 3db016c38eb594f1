"""Compiled loops of the length model: counting ends, curves from counts, and looking a curve up. They only compute.

A curve tells what share of answers go on after so many tokens. It is kept at points, four to an octave, and is straight
between them: exact up to 8 tokens, a few per cent off beyond. Cell `i` is what lies from point `i` to the next.
"""

import functools
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import types

from conductor.policy.compiling import decision_kernel

__all__ = ["CELLS", "ENDED", "GOES_ON", "LEVELS", "LengthKernels", "cell_of", "length_kernels", "survival"]

CELLS: Final = 80  # of a curve: answers of 2**20 tokens and more are not told apart
LEVELS: Final = 4  # groups that an answer belongs to, each within the one before
ENDED, GOES_ON = 0, 1  # counted apart: answers that ended, and those of which no more was seen
_SHIFT: Final = 50  # bits of a float64 below the two that tell the quarter of an octave
_BIAS: Final = 1023 << 2
_FRACTION: Final = (1 << _SHIFT) - 1
_TO_UNIT: Final = 2.0**-_SHIFT
_SOME: Final = 8.0  # answers that what is known of the wider group counts for
_AT_FIRST: Final = 2.0  # the same at the widest, where nothing is known: nothing ends before its limit


def cell_of(tokens: Any) -> Any:
    """The cell that an answer of `tokens` >= 1 ends in."""
    return min(CELLS - 1, (np.float64(tokens).view(np.int64) >> _SHIFT) - _BIAS)


def survival(curves: Any, curve: Any, tokens: Any) -> Any:
    """The share of answers that have more than `tokens`."""
    bits = np.float64(tokens + 1.0).view(np.int64)
    cell = (bits >> _SHIFT) - _BIAS
    if cell >= CELLS:
        return curves[curve, CELLS]
    here = curves[curve, cell]
    return here + (curves[curve, cell + 1] - here) * ((bits & _FRACTION) * _TO_UNIT)


_cell_of: Any = numba.njit(cell_of)


def learn(
    counts: Any, weights: Any, at_ns: Any, groups: Any, now_ns: Any, half_ns: Any, kept: Any, tokens: Any, kind: Any
) -> None:
    """Count an answer of `tokens` in `counts` [groups, 2, CELLS] of all of its `groups` (-1: none).

    What was counted before loses half of its weight in `half_ns`, down to `kept` answers, and no more.
    """
    cell = _cell_of(tokens)
    for level in range(len(groups)):
        group = groups[level]
        if group < 0:
            continue
        passed = now_ns - at_ns[group]
        if passed > half_ns // 64:
            weight = weights[group]
            factor = max(2.0 ** -(passed / half_ns), min(1.0, kept / max(weight, 1e-300)))
            weights[group] = weight * factor
            for i in range(CELLS):
                counts[group, 0, i] *= factor
                counts[group, 1, i] *= factor
            at_ns[group] = now_ns
        counts[group, kind, cell] += 1.0
        weights[group] += 1.0


def draw(counts: Any, groups: Any, hazards: Any, curve: Any) -> None:
    """Into `curve` [CELLS + 1]: what the counts of `groups`, the widest first, say together. `hazards` is room.

    Of the answers that reached a cell, the share that ended there (Kaplan and Meier), with the wider group's share as
    if it had been seen in so many answers.
    """
    hazards[:] = 0.0
    for level in range(len(groups)):
        group = groups[level]
        if group < 0:
            continue
        prior = _SOME if level else _AT_FIRST
        reached = prior
        for i in range(CELLS - 1, -1, -1):
            ended = counts[group, 0, i]
            reached += ended
            hazards[i] = (ended + prior * hazards[i]) / reached
            reached += counts[group, 1, i]
    left = 1.0
    for i in range(CELLS):
        curve[i] = left
        left *= 1.0 - min(1.0, hazards[i])
    curve[CELLS] = left


class LengthKernels(NamedTuple):
    """See the functions of the same names."""

    learn: Any
    draw: Any


@functools.cache
def length_kernels() -> LengthKernels:
    """Both, compiled or loaded at the first call."""
    n, f = types.int64, types.float64
    counts, floats, ints = types.Array(f, 3, "C"), types.Array(f, 1, "C"), types.Array(n, 1, "C")
    return LengthKernels(
        decision_kernel(learn, types.void(counts, floats, ints, ints, n, n, f, n, n)),
        decision_kernel(draw, types.void(counts, ints, floats, floats)),
    )

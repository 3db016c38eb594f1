"""Split of a batch's bytes over rails so that all of them finish at the same time."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from messenger.slices import LOCAL, NBYTES, REMOTE, Rows

CUT_NBYTES: Final = 4096
"""Slices are cut at multiples of this only."""


def shares(nbytes: int, backlogs: Sequence[int], speeds: Sequence[float], least_nbytes: int) -> list[int]:
    """Return the bytes for each rail, `nbytes` in total, so that all rails finish at the same time.

    `backlogs` are in bytes, `speeds` in bytes per second. A rail whose share would be below `least_nbytes` gets none. A
    small batch goes to the one rail that would finish it first; ties go to the lowest index.
    """
    chosen = sorted(range(len(speeds)), key=lambda rail: ((backlogs[rail] + nbytes) / speeds[rail], rail))
    chosen = chosen[: max(1, nbytes // least_nbytes)]
    if len(chosen) == 1:
        return [nbytes if rail == chosen[0] else 0 for rail in range(len(speeds))]
    while True:
        result = _levelled(nbytes, backlogs, speeds, chosen)
        if len(chosen) == 1 or all(result[rail] >= least_nbytes for rail in chosen):
            return result
        kept = [rail for rail in chosen if result[rail] >= least_nbytes]
        chosen = kept if kept and len(kept) < len(chosen) else chosen[:-1]


def take(rows: Rows, nbytes: int, max_rows: int) -> tuple[Rows, Rows]:
    """Split rows int64 [n, 3] into (the first ones, the rest).

    The first ones are at most `max_rows` rows of at most `nbytes` >= CUT_NBYTES in total, and may be less than
    CUT_NBYTES short of that.
    """
    ends = np.cumsum(rows[:, NBYTES])
    whole = int(np.searchsorted(ends, nbytes, side="right"))
    if whole >= min(max_rows, len(rows)):
        return rows[:max_rows], rows[max_rows:]
    cut = (nbytes - (int(ends[whole - 1]) if whole else 0)) // CUT_NBYTES * CUT_NBYTES
    if cut == 0 and whole:
        return rows[:whole], rows[whole:]
    cut = max(cut, CUT_NBYTES)
    first, rest = rows[: whole + 1].copy(), rows[whole:].copy()
    first[-1, NBYTES] = cut
    rest[0, LOCAL] += cut
    rest[0, REMOTE] += cut
    rest[0, NBYTES] -= cut
    return first, rest


def _levelled(nbytes: int, backlogs: Sequence[int], speeds: Sequence[float], rails: Sequence[int]) -> list[int]:
    """Fill the rails up to one common finishing time; those whose backlog exceeds it get nothing."""
    result = [0] * len(speeds)
    filling = sorted(rails, key=lambda rail: (backlogs[rail] / speeds[rail], rail))
    while True:
        speed = sum(speeds[rail] for rail in filling)
        end_s = (nbytes + sum(backlogs[rail] for rail in filling)) / speed
        if len(filling) == 1 or end_s * speeds[filling[-1]] >= backlogs[filling[-1]]:
            break
        filling.pop()
    left = nbytes
    for rail in filling[1:]:
        result[rail] = min(left, max(0, int(end_s * speeds[rail]) - backlogs[rail]))
        left -= result[rail]
    result[filling[0]] = left
    return result

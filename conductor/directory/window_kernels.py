"""Compiled loop over a directory's table: how far a prefix can be reused where some layers have windows."""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from conductor.directory.kernels import SEVERAL, next_slot, shape, table_at
from jit.compiling import compiled


@numba.njit
def _count(depth: Any, need: Any, limit: Any, state: Any) -> Any:
    """Record that a node holds the key at `depth`. `state`: its last key, the length of the run that this ends, and
    the number of leading blocks that can be reused."""
    if depth >= limit:
        return
    state[1] = state[1] + 1 if state[0] == depth - 1 else 1
    state[0] = depth
    if state[1] >= min(need, depth + 1):
        state[2] = depth + 1


def match_windows(addresses: Any, keys: Any, fold: Any, seed: Any, places: Any, need: Any, held: Any) -> Any:
    """Shorten each node's run in `held` [2, ...], as `match` wrote it, to where the `need` keys before its end are
    held.

    Blocks on SSD only are assumed to be the last of a run. Returns the longest run.
    """
    t = table_at(addresses)
    state = np.zeros((held.shape[1], 3), np.int64)
    state[:, 0] = -2
    slot = np.int64(len(t.held))
    for depth in range(held[0].max()):
        slot = next_slot(t, slot, keys[depth] ^ fold, seed)
        if slot < 0:
            slot = np.int64(len(t.held))
            continue
        several = t.held[slot]
        if not several & SEVERAL:
            place = places[np.int64(several >> np.uint32(1))]
            if place >= 0:
                _count(depth, need, held[0, place], state[place])
            continue
        row = np.int64(several & ~SEVERAL) * 4
        dense, _, count, row_width = shape(t, row)
        for j in range(row_width * 32 if dense else count):
            if dense and not t.rows[row + 2 + (j >> 5)] >> np.uint32(j & 31) & np.uint32(1):
                continue
            number = np.int64(j) if dense else np.int64(t.rows[row + 1 + j] >> np.uint32(1))
            place = places[number]
            if place >= 0:
                _count(depth, need, held[0, place], state[place])
    for place in range(held.shape[1]):
        lost = held[0, place] - state[place, 2]
        held[0, place] = state[place, 2]
        held[1, place] = max(0, held[1, place] - lost)
    return held[0].max()


@functools.cache
def window_kernel() -> Any:
    """Return the kernel, which is compiled or loaded at the first call."""
    i64, wide = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
    keys = types.Array(types.uint64, 1, "C", readonly=True)
    n, fold, seed = types.int64, types.uint64, types.uint64
    # Keeps the GIL, since a decision waits for the result.
    return compiled(match_windows, n(i64, keys, fold, seed, i64, n, wide), nogil=False)

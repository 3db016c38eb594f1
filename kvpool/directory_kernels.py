"""The compiled loops of `kvpool.directory_table`: open addressing, linear probing. Nothing here checks its arguments.

A table is `keys` uint64 [capacity], `used` uint8 [capacity], `masks` uint64 [capacity, words]; capacity is a power of
two and never full. A used place whose mask is zero is dead: it still carries its key, so that probing goes on past it.
"""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from kvpool.compiling import compiled

__all__ = ["directory_kernels"]

_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)
_S32 = np.uint64(32)


@functools.cache
def directory_kernels() -> tuple[Any, Any, Any, Any]:
    """(`set_bit`, `clear_bit`, `match`, `count`), compiled or loaded at the first call."""
    keys, used = types.Array(types.uint64, 1, "C"), types.Array(types.uint8, 1, "C")
    masks, queries = types.Array(types.uint64, 2, "C"), types.Array(types.uint64, 1, "C", readonly=True)
    counts = types.UniTuple(types.int64, 3)  # type: ignore[no-untyped-call]
    table = (keys, used, masks, queries)

    return (
        compiled(_set_bit, counts(*table, types.int64, types.uint64)),
        compiled(_clear_bit, counts(*table, types.int64, types.uint64)),
        compiled(_match, types.void(*table, types.Array(types.int64, 1, "C"))),
        compiled(_count, types.int64(*table, types.int64, types.uint64)),
    )


def _find_place(keys: Any, used: Any, key: Any) -> Any:
    """Where `key` is, or the free place where it would go."""
    last = np.uint64(len(keys) - 1)
    at = ((key * _FIBONACCI) >> _S32) & last
    while used[at] and keys[at] != key:
        at = (at + np.uint64(1)) & last
    return at


_find = numba.njit(inline="always")(_find_place)


def _set_bit(keys: Any, used: Any, masks: Any, queries: Any, word: Any, bit: Any) -> Any:
    """Returns (places newly used, keys newly alive, bits newly set)."""
    new_used, new_alive, new_bits = 0, 0, 0
    for i in range(len(queries)):
        at = _find(keys, used, queries[i])
        if not used[at]:
            used[at] = 1
            keys[at] = queries[i]
            new_used += 1
        if masks[at, word] & bit:
            continue
        alive = False
        for w in range(masks.shape[1]):
            alive |= masks[at, w] != 0
        new_alive += not alive
        new_bits += 1
        masks[at, word] |= bit
    return new_used, new_alive, new_bits


def _clear_bit(keys: Any, used: Any, masks: Any, queries: Any, word: Any, bit: Any) -> Any:
    """Returns (0, keys newly dead, bits newly cleared)."""
    new_dead, cleared = 0, 0
    for i in range(len(queries)):
        at = _find(keys, used, queries[i])
        if not used[at] or not masks[at, word] & bit:
            continue
        masks[at, word] &= ~bit
        cleared += 1
        alive = False
        for w in range(masks.shape[1]):
            alive |= masks[at, w] != 0
        new_dead += not alive
    return 0, new_dead, cleared


def _count(keys: Any, used: Any, masks: Any, queries: Any, word: Any, bit: Any) -> Any:
    """How many queries have the bit set."""
    count = 0
    for i in range(len(queries)):
        at = _find(keys, used, queries[i])
        count += used[at] and masks[at, word] & bit != 0
    return count


def _match(keys: Any, used: Any, masks: Any, queries: Any, lengths: Any) -> None:
    """For each bit number b < len(lengths): how many leading queries have it set. `lengths` starts as zeros."""
    for w in range(masks.shape[1]):
        alive = ~np.uint64(0)
        depth = 0
        while alive:
            if depth == len(queries):
                kept = np.uint64(0)
            else:
                at = _find(keys, used, queries[depth])
                kept = alive & masks[at, w] if used[at] else np.uint64(0)
            lost = alive & ~kept
            b = w * 64
            while lost and depth:
                if lost & np.uint64(1) and b < len(lengths):
                    lengths[b] = depth
                lost >>= np.uint64(1)
                b += 1
            alive = kept
            depth += 1

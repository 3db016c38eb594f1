"""The compiled loops that read a directory's table (`kvpool.directory_layout`). Nothing here checks its arguments."""

from typing import Any

import numba
import numpy as np

from kvpool.directory_layout import SEGMENT, SHIFT

__all__ = ["SEVERAL", "extract", "find", "hash_of", "key_at", "match", "shape"]

SEVERAL = np.uint32(1 << 31)
_AHEAD = 32  # keys read ahead at most
_LAST = np.uint64(SEGMENT - 1)
_U1, _U32 = np.uint64(1), np.uint64(32)
_M1, _M2, _S31 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(31)


@numba.njit(inline="always")
def hash_of(key: Any, seed: Any) -> Any:
    h = (key ^ seed) * _M1
    h = (h ^ (h >> _U32)) * _M2
    return h ^ (h >> _S31)


@numba.njit(inline="always")
def key_at(places: Any, at: Any) -> Any:
    return np.uint64(places[at]) | np.uint64(places[at + 1]) << _U32


@numba.njit(inline="always")
def _home(t: Any, key: Any, seed: Any) -> Any:
    """The word of the place where a search for `key` begins."""
    h = hash_of(key, seed)
    segment = np.int64(t.top[np.int64(h >> np.uint64(t.meta[SHIFT]))])
    return (segment * SEGMENT + np.int64(h & _LAST)) * 3


@numba.njit(inline="always")
def find(t: Any, key: Any, seed: Any) -> Any:
    """(segment, word of the place where `key` is or would go)."""
    h = hash_of(key, seed)
    segment = np.int64(t.top[np.int64(h >> np.uint64(t.meta[SHIFT]))])
    place = h & _LAST
    while True:
        at = (segment * SEGMENT + np.int64(place)) * 3
        if t.places[at + 2] == 0 or key_at(t.places, at) == key:
            return segment, at
        place = (place + _U1) & _LAST


@numba.njit(inline="always")
def shape(t: Any, at: Any) -> Any:
    """(is dense, class, number of replicas, words in one bitmap) of the row at `at`."""
    head = t.rows[at]
    row_class = np.int64(head >> np.uint32(24)) & 127
    return head >> np.uint32(31) != 0, row_class, np.int64(head & np.uint32(0xFFFFFF)), ((4 << row_class) - 2) // 2


def match(t: Any, keys: Any, fold: Any, seed: Any, alive: Any, state: Any, out: Any) -> Any:
    """Fill `out` with (number, leading keys held, of these on SSD only); returns how many rows.

    `alive`: room for a bitmap over numbers. `state` [numbers, 2]: depth and blocks on SSD, zeros before and after.
    """
    found, depth, n = 0, 0, len(keys)
    width = 0
    while depth < n:  # the part that very many nodes hold: whole bitmaps at a time
        _, at = find(t, keys[depth] ^ fold, seed)
        held = t.places[at + 2]
        if not held & SEVERAL:
            break
        row = np.int64(held & ~SEVERAL) * 4
        dense, _, _, row_width = shape(t, row)
        if not dense:
            break
        if depth == 0:
            width = row_width
            alive[:width] = ~np.uint32(0)
        left = np.uint32(0)
        for w in range(width):
            here = t.rows[row + 2 + w] if w < row_width else np.uint32(0)
            lost, stays = alive[w] & ~here, alive[w] & here
            alive[w] = stays
            left |= stays
            for b in range(32 if (lost and depth) or (stays and not depth) else 0):
                if depth and lost >> np.uint32(b) & np.uint32(1):
                    state[w * 32 + b, 0] = depth
                elif not depth and stays >> np.uint32(b) & np.uint32(1):
                    out[found, 0] = w * 32 + b
                    found += 1
            on_ssd = t.rows[row + 2 + row_width + w] & stays if w < row_width else np.uint32(0)
            for b in range(32 if on_ssd else 0):
                if on_ssd >> np.uint32(b) & np.uint32(1):
                    state[w * 32 + b, 1] += 1
        if not left:
            break
        depth += 1
    for w in range(width):
        for b in range(32 if alive[w] else 0):
            if alive[w] >> np.uint32(b) & np.uint32(1):
                state[w * 32 + b, 0] = depth
    going, touched, ahead, sink = True, depth, 2, np.uint32(0)
    while going and depth < n:  # the rest: a node goes on if it came this far
        if depth == touched:
            # Places lie all over memory: waiting for several at a time is as quick as for one.
            touched = min(n, depth + ahead)
            ahead = min(2 * ahead, _AHEAD)
            for i in range(depth, touched):
                sink ^= t.places[_home(t, keys[i] ^ fold, seed)]
        _, at = find(t, keys[depth] ^ fold, seed)
        held = t.places[at + 2]
        going = False
        if held == 0:
            break
        if not held & SEVERAL:
            first, last, row, row_width = 0, 1, np.int64(-1), 0
        else:
            row = np.int64(held & ~SEVERAL) * 4
            dense, _, count, row_width = shape(t, row)
            first, last = (-row_width * 32, 0) if dense else (1, 1 + count)
        for j in range(first, last):
            if row < 0:
                code = held
            elif first > 0:
                code = t.rows[row + j]
            else:
                number = j + row_width * 32
                w, bit = number >> 5, np.uint32(number & 31)
                if not t.rows[row + 2 + w] >> bit & np.uint32(1):
                    continue
                code = np.uint32(number * 2) | (t.rows[row + 2 + row_width + w] >> bit & np.uint32(1))
            number = np.int64(code >> np.uint32(1))
            if state[number, 0] == depth:
                if depth == 0:
                    out[found, 0] = number
                    found += 1
                state[number, 0] = depth + 1
                state[number, 1] += np.int64(code & np.uint32(1))
                going = True
        depth += 1
    alive[len(alive) - 1] = sink  # so that reading ahead is not taken for useless
    for j in range(found):
        number = out[j, 0]
        out[j, 1], out[j, 2] = state[number, 0], state[number, 1]
        state[number, 0], state[number, 1] = 0, 0
    return found


def extract(t: Any, segment: Any, end: Any, wanted: Any, keys: Any, codes: Any) -> Any:
    """Copy all replicas of the wanted numbers in these segments. Returns how many there are, though they do not fit."""
    found = 0
    for at in range(segment * SEGMENT * 3, end * SEGMENT * 3, 3):
        held = t.places[at + 2]
        if held == 0:
            continue
        row, first, last, width, dense = np.int64(0), 0, 1, 0, False
        if held & SEVERAL:
            row = np.int64(held & ~SEVERAL) * 4
            dense, _, last, width = shape(t, row)
            if dense:
                last = width * 32
        for j in range(first, last):
            code = held
            if dense:
                bit = np.uint32(j & 31)
                if not t.rows[row + 2 + (j >> 5)] >> bit & np.uint32(1):
                    continue
                code = np.uint32(j * 2) | (t.rows[row + 2 + width + (j >> 5)] >> bit & np.uint32(1))
            elif held & SEVERAL:
                code = t.rows[row + 1 + j]
            if wanted[code >> np.uint32(1)]:
                if found < len(keys):
                    keys[found], codes[found] = key_at(t.places, at), code
                found += 1
    return found

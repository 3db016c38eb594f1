"""The compiled loops that read a directory's table (`layout.py`). Nothing here checks its arguments."""

from typing import Any

import numba
import numpy as np
from numba.np.numpy_support import carray

from conductor.directory.layout import SEGMENT, SHIFT, Table
from messenger.native.libc import pointer_i64, pointer_u64

__all__ = ["SEVERAL", "extract", "find", "hash_of", "match", "next_slot", "shape", "table_at"]

SEVERAL = np.uint32(1 << 31)
_LAST = np.uint64(SEGMENT - 1)
_U1, _U32 = np.uint64(1), np.uint64(32)
_M1, _M2, _S31 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(31)


@numba.njit
def _words(addresses: Any, index: Any) -> Any:
    return carray(pointer_i64(addresses[2 * index]), addresses[2 * index + 1])


@numba.njit
def _pairs(addresses: Any, index: Any) -> Any:
    return carray(pointer_i64(addresses[2 * index]), (addresses[2 * index + 1] // 2, 2))


@numba.njit
def _keys(addresses: Any, index: Any) -> Any:
    return carray(pointer_u64(addresses[2 * index]), addresses[2 * index + 1])


@numba.njit
def table_at(addresses: Any) -> Any:
    """The Table whose arrays are there (`directory_layout.addresses_of`)."""
    return Table(
        _words(addresses, 0).view(np.uint32),
        _words(addresses, 1).view(np.int32),
        _words(addresses, 2).view(np.int32),
        _words(addresses, 3).view(np.int32),
        _keys(addresses, 4),
        _words(addresses, 5).view(np.uint32),
        _words(addresses, 6).view(np.uint32),
        _words(addresses, 7),
        _pairs(addresses, 8),
        _keys(addresses, 9),
        _words(addresses, 10).view(np.uint32),
        _pairs(addresses, 11),
        _words(addresses, 12),
    )


@numba.njit(inline="always")
def hash_of(key: Any, seed: Any) -> Any:
    h = (key ^ seed) * _M1
    h = (h ^ (h >> _U32)) * _M2
    return h ^ (h >> _S31)


@numba.njit
def find(t: Any, key: Any, seed: Any) -> Any:
    """(segment, word of the place where `key` is or would go). 0 in the word after it: it is not there."""
    h = hash_of(key, seed)
    segment = np.int64(t.top[np.int64(h >> np.uint64(t.meta[SHIFT]))])
    fingerprint = np.uint32(h >> _U32)
    place = np.uint64(fingerprint) & _LAST
    while True:
        at = (segment * SEGMENT + np.int64(place)) * 2
        slot = np.int64(t.places[at + 1]) - 1
        if slot < 0 or (t.places[at] == fingerprint and t.keys[slot] == key):
            return segment, at
        place = (place + _U1) & _LAST


@numba.njit(inline="always")
def next_slot(t: Any, slot: Any, key: Any, seed: Any) -> Any:
    """The slot of `key`, which is probably the one after `slot`; -1: nobody holds it."""
    slot += 1
    if slot < len(t.held) and t.keys[slot] == key and t.held[slot] != 0:
        return slot
    _, at = find(t, key, seed)
    return np.int64(t.places[at + 1]) - 1


@numba.njit(inline="always")
def shape(t: Any, at: Any) -> Any:
    """(is dense, class, number of replicas, words in one bitmap) of the row at `at`."""
    head = t.rows[at]
    row_class = np.int64(head >> np.uint32(24)) & 127
    return head >> np.uint32(31) != 0, row_class, np.int64(head & np.uint32(0xFFFFFF)), ((4 << row_class) - 2) // 2


def match(addresses: Any, keys: Any, fold: Any, seed: Any, places: Any, held: Any) -> Any:
    """How many leading keys each node holds, and of these on SSD only, into `held` [2, ...] at `places` [numbers].

    A place of -1 leaves the node out. Returns how many the others hold at most.
    """
    t = table_at(addresses)
    alive, state, out = t.alive, t.state, t.found
    found, depth, n = 0, 0, len(keys)
    width, slot = 0, np.int64(len(t.held))
    while depth < n:  # the part that very many nodes hold: whole bitmaps at a time
        here_slot = next_slot(t, slot, keys[depth] ^ fold, seed)
        several = t.held[here_slot] if here_slot >= 0 else np.uint32(0)
        if not several & SEVERAL:
            break
        row = np.int64(several & ~SEVERAL) * 4
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
                    out[found] = w * 32 + b
                    found += 1
            on_ssd = t.rows[row + 2 + row_width + w] & stays if w < row_width else np.uint32(0)
            for b in range(32 if on_ssd else 0):
                if on_ssd >> np.uint32(b) & np.uint32(1):
                    state[w * 32 + b, 1] += 1
        if not left:
            break
        slot = here_slot
        depth += 1
    for w in range(width):
        for b in range(32 if alive[w] else 0):
            if alive[w] >> np.uint32(b) & np.uint32(1):
                state[w * 32 + b, 0] = depth
    going = True
    while going and depth < n:  # the rest: a node goes on if it came this far
        slot = next_slot(t, slot, keys[depth] ^ fold, seed)
        if slot < 0:
            break
        several = t.held[slot]
        if not several & SEVERAL:
            number = np.int64(several >> np.uint32(1))
            if state[number, 0] != depth:
                break
            if depth == 0:
                out[0], found = number, 1
            run, most = 1, min(n - depth, len(t.held) - slot)
            while run < most and t.held[slot + run] == several and t.keys[slot + run] == keys[depth + run] ^ fold:
                run += 1
            depth += run
            slot += run - 1
            state[number, 0] = depth
            state[number, 1] += run * np.int64(several & np.uint32(1))
            continue
        row = np.int64(several & ~SEVERAL) * 4
        dense, _, count, row_width = shape(t, row)
        going = False
        for j in range(row_width * 32 if dense else count):
            if dense:
                w, bit = j >> 5, np.uint32(j & 31)
                if not t.rows[row + 2 + w] >> bit & np.uint32(1):
                    continue
                code = np.uint32(j * 2) | (t.rows[row + 2 + row_width + w] >> bit & np.uint32(1))
            else:
                code = t.rows[row + 1 + j]
            number = np.int64(code >> np.uint32(1))
            if state[number, 0] == depth:
                if depth == 0:
                    out[found] = number
                    found += 1
                state[number, 0] = depth + 1
                state[number, 1] += np.int64(code & np.uint32(1))
                going = True
        depth += 1
    longest = np.int64(0)
    for j in range(found):
        number = out[j]
        place = places[number]
        if place >= 0:
            held[0, place], held[1, place] = state[number, 0], state[number, 1]
            longest = max(longest, state[number, 0])
        state[number, 0], state[number, 1] = 0, 0
    return longest


def extract(addresses: Any, slot: Any, end: Any, wanted: Any, keys: Any, codes: Any) -> Any:
    """Copy all replicas of the wanted numbers in these slots. Returns how many there are, though they do not fit."""
    t, found = table_at(addresses), 0
    for at in range(slot, end):
        several = t.held[at]
        if several == 0:
            continue
        row, last, width, dense = np.int64(0), 1, 0, False
        if several & SEVERAL:
            row = np.int64(several & ~SEVERAL) * 4
            dense, _, last, width = shape(t, row)
            if dense:
                last = width * 32
        for j in range(last):
            code = several
            if dense:
                bit = np.uint32(j & 31)
                if not t.rows[row + 2 + (j >> 5)] >> bit & np.uint32(1):
                    continue
                code = np.uint32(j * 2) | (t.rows[row + 2 + width + (j >> 5)] >> bit & np.uint32(1))
            elif several & SEVERAL:
                code = t.rows[row + 1 + j]
            if wanted[code >> np.uint32(1)]:
                if found < len(keys):
                    keys[found], codes[found] = t.keys[at], code
                found += 1
    return found

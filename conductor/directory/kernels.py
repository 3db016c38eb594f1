"""Compiled loops over a directory's table (`layout.py`): lookups, then changes. Arguments are not checked."""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numba.np.numpy_support import carray

from conductor.directory.layout import (
    CURSOR,
    DENSE,
    END,
    FREE,
    LIVE,
    MAX_FILL,
    NEED,
    NEED_ROWS,
    NEED_SLOTS,
    SEGMENT,
    SHIFT,
    USED,
    Table,
)
from jit.compiling import compiled
from messenger.native.libc import pointer_i64, pointer_u64

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
    """Return the Table whose arrays are at these addresses (`layout.addresses_of`)."""
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
    """Return (segment, index of the place of `key` or for it); the word after it is 0 if the key is absent."""
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
    """Return the slot of `key`, which is probably the one after `slot`; -1 if no node holds it."""
    slot += 1
    if slot < len(t.held) and t.keys[slot] == key and t.held[slot] != 0:
        return slot
    _, at = find(t, key, seed)
    return np.int64(t.places[at + 1]) - 1


@numba.njit(inline="always")
def shape(t: Any, at: Any) -> Any:
    """Return (is dense, class, number of replicas, words per bitmap) of the row at `at`."""
    head = t.rows[at]
    row_class = np.int64(head >> np.uint32(24)) & 127
    return head >> np.uint32(31) != 0, row_class, np.int64(head & np.uint32(0xFFFFFF)), ((4 << row_class) - 2) // 2


def match(addresses: Any, keys: Any, fold: Any, seed: Any, places: Any, held: Any) -> Any:
    """Write the number of leading keys that each node holds, and of these on SSD only, to `held` [2, ...].

    `places` [numbers] maps node numbers to indices in `held`; nodes with -1 are left out. Returns the longest match.
    """
    t = table_at(addresses)
    alive, state, out = t.alive, t.state, t.found
    found, depth, n = 0, 0, len(keys)
    width, slot = 0, np.int64(len(t.held))
    while depth < n:  # keys held by very many nodes: process whole bitmaps
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
    while going and depth < n:  # other keys: a node continues if it holds all keys so far
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
    """Copy all replicas of the wanted numbers in these slots. Returns their count, even if `keys` is too small."""
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


_MAX_LIST_CLASS = 4
_FEW = 31  # a dense row with at most this many replicas becomes a list again
_HOLES = 8  # free slots are reused if more than one slot in this many is free
_U1, _U32 = np.uint64(1), np.uint64(32)
_M1, _M2, _GAMMA = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB), np.uint64(0x9E3779B97F4A7C15)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


@numba.njit
def _term(key: Any, code: Any) -> Any:
    """Return a block's term in its node's contents checksum: splitmix64 of its key and tier."""
    x = key + _GAMMA * np.uint64(np.uint64(code & np.uint32(1)) + _U1)
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@numba.njit
def _count(t: Any, key: Any, code: Any, by: Any) -> Any:
    number = np.int64(code >> np.uint32(1))
    t.counts[number, np.int64(code & np.uint32(1))] += by
    if by > 0:
        t.sums[number] += _term(key, code)
    else:
        t.sums[number] -= _term(key, code)


@numba.njit
def _take_row(t: Any, row_class: Any) -> Any:
    head = t.meta[FREE + row_class]
    if head >= 0:
        t.meta[FREE + row_class] = np.int64(t.rows[head * 4]) - 1
        return head * 4
    at = t.meta[USED]
    t.meta[USED] += 4 << row_class
    return at


@numba.njit
def _free_row(t: Any, at: Any) -> Any:
    row_class = np.int64(t.rows[at] >> np.uint32(24)) & 127
    t.rows[at] = np.uint32(t.meta[FREE + row_class] + 1)
    t.meta[FREE + row_class] = at // 4


@numba.njit
def _needs_rows(t: Any) -> Any:
    """Return True if the next change could run out of rows; the caller must then grow them."""
    if t.meta[USED] + 2 * (4 << t.meta[DENSE]) <= len(t.rows):
        return False
    t.meta[NEED] = NEED_ROWS
    return True


@numba.njit
def _new_list(t: Any, row_class: Any) -> Any:
    at = _take_row(t, row_class)
    t.rows[at] = np.uint32(row_class << 24)
    return at


@numba.njit
def _new_dense(t: Any) -> Any:
    row_class = t.meta[DENSE]
    at = _take_row(t, row_class)
    t.rows[at : at + (4 << row_class)] = 0
    t.rows[at] = SEVERAL | np.uint32(row_class << 24)
    return at


@numba.njit
def _append(t: Any, at: Any, code: Any) -> Any:
    """Append a replica to a row that has room for it."""
    dense, _, count, width = shape(t, at)
    if dense:
        number = np.int64(code >> np.uint32(1))
        bit = np.uint32(1) << np.uint32(number & 31)
        t.rows[at + 2 + (number >> 5)] |= bit
        if code & np.uint32(1):
            t.rows[at + 2 + width + (number >> 5)] |= bit
    else:
        t.rows[at + 1 + count] = code
    t.rows[at] += np.uint32(1)


@numba.njit
def _moved_to(t: Any, source: Any, target: Any) -> Any:
    """Move all replicas of row `source` to row `target` and free `source`."""
    dense, _, count, width = shape(t, source)
    if dense:
        for w in range(width):
            held, on_ssd = t.rows[source + 2 + w], t.rows[source + 2 + width + w]
            for b in range(32):
                if held >> np.uint32(b) & np.uint32(1):
                    _append(t, target, np.uint32((w * 32 + b) * 2) | (on_ssd >> np.uint32(b) & np.uint32(1)))
    else:
        for j in range(count):
            _append(t, target, t.rows[source + 1 + j])
    _free_row(t, source)
    return target


@numba.njit
def _with(t: Any, several: Any, code: Any) -> Any:
    """Add a replica to a row or change its tier. Returns (new value of the slot, former code of the replica or 0)."""
    at = np.int64(several & ~SEVERAL) * 4
    number = np.int64(code >> np.uint32(1))
    dense, row_class, count, width = shape(t, at)
    if dense and number < width * 32:
        w, bit = number >> 5, np.uint32(1) << np.uint32(number & 31)
        if t.rows[at + 2 + w] & bit:
            old = np.uint32(number * 2)
            if t.rows[at + 2 + width + w] & bit:
                old |= np.uint32(1)
            if old != code:
                t.rows[at + 2 + width + w] ^= bit
            return several, old
    elif not dense:
        for j in range(count):
            old = t.rows[at + 1 + j]
            if np.int64(old >> np.uint32(1)) == number:
                t.rows[at + 1 + j] = code
                return several, old
    if dense and number >= width * 32:
        at = _moved_to(t, at, _new_dense(t))
    elif not dense and count == (4 << row_class) - 1:
        at = _moved_to(t, at, _new_list(t, row_class + 1) if row_class < _MAX_LIST_CLASS else _new_dense(t))
    _append(t, at, code)
    return SEVERAL | np.uint32(at // 4), np.uint32(0)


@numba.njit
def _without(t: Any, several: Any, number: Any) -> Any:
    """Remove a node's replica from a row. Returns (new value of the slot, former code of the replica or 0)."""
    at = np.int64(several & ~SEVERAL) * 4
    dense, row_class, count, width = shape(t, at)
    old = np.uint32(0)
    if dense:
        w, bit = number >> 5, np.uint32(1) << np.uint32(number & 31)
        if number < width * 32 and t.rows[at + 2 + w] & bit:
            old = np.uint32(number * 2)
            if t.rows[at + 2 + width + w] & bit:
                old |= np.uint32(1)
            t.rows[at + 2 + w] &= ~bit
            t.rows[at + 2 + width + w] &= ~bit
    else:
        for j in range(count):
            if np.int64(t.rows[at + 1 + j] >> np.uint32(1)) == number:
                old = t.rows[at + 1 + j]
                t.rows[at + 1 + j] = t.rows[at + count]
                break
    if old == 0:
        return several, old
    t.rows[at] -= np.uint32(1)
    count -= 1
    if dense:
        if count <= _FEW:
            at = _moved_to(t, at, _new_list(t, _MAX_LIST_CLASS))
    elif count == 1:
        last = t.rows[at + 1]
        _free_row(t, at)
        return last, old
    elif row_class and count <= (2 << row_class) // 2:
        at = _moved_to(t, at, _new_list(t, row_class - 1))
    return SEVERAL | np.uint32(at // 4), old


@numba.njit
def _new_slot(t: Any) -> Any:
    """Allocate a slot by next-fit; -1 if the caller must grow the slots. Holes are reused once there are many."""
    slot, end = t.meta[CURSOR], t.meta[END]
    while slot < end and t.held[slot]:
        slot += 1
    if slot == end and (end - t.meta[LIVE]) * _HOLES > end:
        slot = 0
        while t.held[slot]:
            slot += 1
    if slot == end:
        if end == len(t.held):
            t.meta[CURSOR] = end
            t.meta[NEED] = NEED_SLOTS
            return np.int64(-1)
        t.meta[END] = end + 1
    t.meta[CURSOR] = slot + 1
    return np.int64(slot)


@numba.njit
def _delete(t: Any, segment: Any, at: Any) -> Any:
    """Free a place and its slot, shifting back entries that would not be found after the hole."""
    t.held[np.int64(t.places[at + 1]) - 1] = 0
    t.meta[LIVE] -= 1
    base = segment * SEGMENT
    hole = at // 2 - base
    last = SEGMENT - 1
    j = hole
    while True:
        j = (j + 1) & last
        there = (base + j) * 2
        if t.places[there + 1] == 0:
            break
        home = np.int64(t.places[there]) & last
        if ((j - home) & last) >= ((j - hole) & last):
            to = (base + hole) * 2
            t.places[to], t.places[to + 1] = t.places[there], t.places[there + 1]
            hole = j
    t.places[(base + hole) * 2 + 1] = 0
    t.fill[segment] -= 1


def store(addresses: Any, keys: Any, codes: Any, fold: Any, seed: Any, start: Any) -> Any:
    """Add replicas, or change their tier. Returns the number done; if not all, meta[NEED] has the reason."""
    t = table_at(addresses)
    slot = np.int64(len(t.held))
    for i in range(start, len(keys)):
        key, code = keys[i] ^ fold, codes[i]
        if _needs_rows(t):
            return i
        slot += 1
        if not (slot < len(t.held) and t.keys[slot] == key and t.held[slot] != 0):
            segment, at = find(t, key, seed)
            slot = np.int64(t.places[at + 1]) - 1
            if slot < 0:
                if t.fill[segment] >= MAX_FILL:
                    t.meta[NEED] = segment
                    return i
                slot = _new_slot(t)
                if slot < 0:
                    return i
                t.places[at], t.places[at + 1] = np.uint32(hash_of(key, seed) >> _U32), np.uint32(slot + 1)
                t.fill[segment] += 1
                t.meta[LIVE] += 1
                t.keys[slot], t.held[slot] = key, code
                _count(t, key, code, 1)
                continue
        held = t.held[slot]
        if held == code:
            continue
        old = np.uint32(0)
        if held & SEVERAL:
            t.held[slot], old = _with(t, held, code)
        elif held >> np.uint32(1) == code >> np.uint32(1):
            t.held[slot], old = code, held
        else:
            row = _new_list(t, 0)
            _append(t, row, held)
            _append(t, row, code)
            t.held[slot] = SEVERAL | np.uint32(row // 4)
        if old != code:
            if old:
                _count(t, key, old, -1)
            _count(t, key, code, 1)
    return len(keys)


def remove(addresses: Any, keys: Any, number: Any, fold: Any, seed: Any, start: Any) -> Any:
    """Remove node `number` as holder of the keys. Returns like `store`."""
    t = table_at(addresses)
    for i in range(start, len(keys)):
        key = keys[i] ^ fold
        if _needs_rows(t):
            return i
        segment, at = find(t, key, seed)
        slot = np.int64(t.places[at + 1]) - 1
        if slot < 0:
            continue
        held = t.held[slot]
        old = np.uint32(0)
        if held & SEVERAL:
            t.held[slot], old = _without(t, held, number)
        elif np.int64(held >> np.uint32(1)) == number:
            old = held
            _delete(t, segment, at)
        if old:
            _count(t, key, old, -1)
    return len(keys)


def split(addresses: Any, segment: Any, new: Any, scratch: Any) -> Any:
    """Move the keys whose next hash bit is set to the empty segment `new`. `scratch` has the size of a segment."""
    t = table_at(addresses)
    begin, end = segment * SEGMENT * 2, (segment + 1) * SEGMENT * 2
    scratch[:] = t.places[begin:end]
    t.places[begin:end] = 0
    t.fill[segment] = 0
    depth = t.depth[segment] + 1
    t.depth[segment], t.depth[new] = depth, depth
    last = SEGMENT - 1
    first = np.int64(-1)
    for i in range(SEGMENT):
        if scratch[i * 2 + 1]:
            fingerprint = np.int64(scratch[i * 2])
            first = fingerprint >> (t.meta[SHIFT] - 32)
            to = new if fingerprint >> (32 - depth) & 1 else segment
            place = fingerprint & last
            while t.places[(to * SEGMENT + place) * 2 + 1]:
                place = (place + 1) & last
            at = (to * SEGMENT + place) * 2
            t.places[at], t.places[at + 1] = scratch[i * 2], scratch[i * 2 + 1]
            t.fill[to] += 1
    half = 1 << (64 - t.meta[SHIFT] - depth)
    first -= first % (2 * half)
    t.top[first + half : first + 2 * half] = new


@numba.njit
def _first_of(t: Any, several: Any, wanted: Any) -> Any:
    """Return a wanted node number of the row, or -1."""
    at = np.int64(several & ~SEVERAL) * 4
    dense, _, count, width = shape(t, at)
    if not dense:
        for j in range(count):
            number = np.int64(t.rows[at + 1 + j] >> np.uint32(1))
            if wanted[number]:
                return number
        return np.int64(-1)
    for w in range(width):
        held = t.rows[at + 2 + w]
        for b in range(32 if held else 0):
            if held >> np.uint32(b) & np.uint32(1) and wanted[w * 32 + b]:
                return np.int64(w * 32 + b)
    return np.int64(-1)


def purge(addresses: Any, slot: Any, end: Any, dying: Any, seed: Any) -> Any:
    """Remove all replicas of the dying numbers from slots [slot, end). Returns the first slot not done."""
    t = table_at(addresses)
    while slot < end:
        held = t.held[slot]
        while held & SEVERAL:
            number = _first_of(t, held, dying)
            if number < 0:
                break
            if _needs_rows(t):
                return slot
            held, old = _without(t, held, number)
            t.held[slot] = held
            _count(t, t.keys[slot], old, -1)
        if held and not held & SEVERAL and dying[held >> np.uint32(1)]:
            _count(t, t.keys[slot], held, -1)
            segment, at = find(t, t.keys[slot], seed)
            _delete(t, segment, at)
        slot += 1
    return slot


class DirectoryKernels(NamedTuple):
    """Compiled kernels; their first argument is the addresses of a table's arrays."""

    store: Any
    remove: Any
    match: Any
    split: Any
    purge: Any
    extract: Any


@functools.cache
def directory_kernels() -> DirectoryKernels:
    """Return all kernels, which are compiled or loaded at the first call."""
    u32, u64, i64 = (types.Array(kind, 1, "C") for kind in (types.uint32, types.uint64, types.int64))
    wide, flags = types.Array(types.int64, 2, "C"), types.Array(types.uint8, 1, "C")
    keys = types.Array(types.uint64, 1, "C", readonly=True)
    n, fold, seed = types.int64, types.uint64, types.uint64
    return DirectoryKernels(
        compiled(store, n(i64, keys, u32, fold, seed, n)),
        compiled(remove, n(i64, keys, n, fold, seed, n)),
        # Keeps the GIL, since a decision waits for the result.
        compiled(match, n(i64, keys, fold, seed, i64, wide), nogil=False),
        compiled(split, types.void(i64, n, n, u32)),
        compiled(purge, n(i64, n, n, flags, seed)),
        compiled(extract, n(i64, n, n, flags, u64, u32)),
    )

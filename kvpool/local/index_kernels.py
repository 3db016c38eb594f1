"""Compiled loops over the shared index: the pool node's writes, and its readers' look-ups and gets.

Readers run while the pool node writes, or after it died in the middle of a write. They treat an inconsistent read as a
miss and check every field of an entry before they use it. `kvpool.local.index_layout` describes the synchronisation.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from jit.compiling import compiled
from kvpool.local.copy_kernels import LAYOUT, OFFSETS, SOURCE, TARGET, memcpy, move_group, rows_in_words, within
from kvpool.local.index_layout import (
    AT_BUCKETS_VERSION,
    AT_STATE,
    CORRUPT,
    ENTRY_KEY,
    ENTRY_OFFSETS,
    ENTRY_SHAPE,
    ENTRY_VERSION,
    FOUND,
    HEADER_WORDS,
    LIVE,
    MISSING,
    SHAPE_GROUPS_SHIFT,
    SHAPE_TOKENS_SHIFT,
    STALE,
)
from messenger.native.atomics import fence_acquire, fence_release, load_acquire, store_release

_TRIES = 256  # of a look-up that concurrent writes disturb; then a miss, for example if the writer died
_HIGH = np.uint64(32)
_LOW_MASK = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


def _find_entry(words: Any, shape: Any, name: Any, key: Any) -> Any:
    """Return (start of the block's entry, its version), or (-1, 0) if it is missing or could not be read consistently.

    `shape` is int64 (buckets, entries, entry_words), validated when the index was mapped; `name` is the namespace.
    """
    buckets, entries, entry_words = shape[0], shape[1], shape[2]
    key_hash = name[0] ^ key[0]
    mask = buckets - 1
    for _ in range(_TRIES):
        before = load_acquire(words, AT_BUCKETS_VERSION)
        torn = before & _ONE != np.uint64(0)  # buckets are being moved: a hit is valid, a miss is not
        position = np.int64(key_hash & np.uint64(mask))
        for _ in range(buckets):
            word = load_acquire(words, HEADER_WORDS + position)
            if word == np.uint64(0):
                break
            entry = np.int64(word & _LOW_MASK) - 1
            if word >> _HIGH == key_hash >> _HIGH and 0 <= entry < entries:
                at = HEADER_WORDS + buckets + entry * entry_words
                version = load_acquire(words, at + ENTRY_VERSION)
                same = words[at + ENTRY_KEY] == name[0] and words[at + ENTRY_KEY + 1] == name[1]
                same = same and words[at + ENTRY_KEY + 2] == key[0] and words[at + ENTRY_KEY + 3] == key[1]
                fence_acquire()
                if version & _ONE or load_acquire(words, at + ENTRY_VERSION) != version:
                    torn = True
                elif same:
                    return at, version
            position = (position + 1) & mask
        fence_acquire()
        if not torn and load_acquire(words, AT_BUCKETS_VERSION) == before:
            break
    return np.int64(-1), np.uint64(0)


_find = numba.njit(_find_entry)


def _write(words: Any, buckets: Any, entry_words: Any, entry: Any, record: Any) -> None:
    """Write a free entry, and point the first empty bucket from its hash on to it. `record` starts with the key."""
    at = HEADER_WORDS + buckets + entry * entry_words
    version = words[at + ENTRY_VERSION]
    store_release(words, at + ENTRY_VERSION, version + _ONE)
    fence_release()
    for k in range(len(record)):
        words[at + ENTRY_KEY + k] = record[k]
    store_release(words, at + ENTRY_VERSION, version + np.uint64(2))
    key_hash = record[0] ^ record[2]
    position = np.int64(key_hash & np.uint64(buckets - 1))
    while words[HEADER_WORDS + position] != np.uint64(0):
        position = (position + 1) & (buckets - 1)
    store_release(words, HEADER_WORDS + position, (key_hash >> _HIGH) << _HIGH | np.uint64(entry + 1))


def _erase(words: Any, buckets: Any, entry_words: Any, entry: Any) -> None:
    """Void an entry, then move later buckets into the gap, so that linear probing still finds them."""
    at = HEADER_WORDS + buckets + entry * entry_words
    version = words[at + ENTRY_VERSION]
    store_release(words, at + ENTRY_VERSION, version + _ONE)
    fence_release()
    key_hash = words[at + ENTRY_KEY] ^ words[at + ENTRY_KEY + 2]
    for k in range(4):
        words[at + ENTRY_KEY + k] = np.uint64(0)
    store_release(words, at + ENTRY_VERSION, version + np.uint64(2))

    mask = buckets - 1
    hole = np.int64(key_hash & np.uint64(mask))
    while np.int64(words[HEADER_WORDS + hole] & _LOW_MASK) != entry + 1:
        hole = (hole + 1) & mask
    moves = words[AT_BUCKETS_VERSION]
    store_release(words, AT_BUCKETS_VERSION, moves + _ONE)
    fence_release()
    position = hole
    while True:
        position = (position + 1) & mask
        word = words[HEADER_WORDS + position]
        if word == np.uint64(0):
            break
        other = HEADER_WORDS + buckets + (np.int64(word & _LOW_MASK) - 1) * entry_words
        home = np.int64((words[other + ENTRY_KEY] ^ words[other + ENTRY_KEY + 2]) & np.uint64(mask))
        if (position - home) & mask >= (position - hole) & mask:
            store_release(words, HEADER_WORDS + hole, word)
            hole = position
    store_release(words, HEADER_WORDS + hole, np.uint64(0))
    store_release(words, AT_BUCKETS_VERSION, moves + np.uint64(2))


def _state(words: Any, otherwise: Any) -> Any:
    """Return STALE if the index was replaced or closed, and `otherwise` if it is live."""
    if load_acquire(words, AT_STATE) != np.uint64(LIVE):
        return np.int64(STALE)
    return np.int64(otherwise)


_if_live = numba.njit(_state)


def _match(words: Any, shape: Any, name: Any, chain: Any) -> Any:
    """Return (number of leading blocks of `chain` [n, 2] found, reason for ending there)."""
    for i in range(len(chain)):
        at, _ = _find(words, shape, name, chain[i])
        if at < 0:
            return np.int64(i), _if_live(words, MISSING)
    return np.int64(len(chain)), _if_live(words, FOUND)


def _get(
    index: Any, name: Any, chain: Any, layout: Any, source: Any, destination: Any, first_block: Any, verify: Any
) -> Any:
    """Copy blocks of `chain` from `first_block` on. Returns (number of leading blocks copied, reason for ending).

    `index` is (words, shape); `source` is (bytes, words) of the arena; `destination` is ((bytes, words), byte offsets
    int64 [groups, n]). Returns (-1, _), having copied nothing, if a slot of the destination is out of bounds.
    """
    words, shape = index
    target, targets = destination
    arena, landing = source[0], target[0]
    if not within(len(landing), targets, layout):
        return np.int64(-1), np.int64(MISSING)
    rows = rows_in_words(source, target, layout)
    groups = len(layout)
    layers = 0
    for g in range(groups):
        layers += layout[g].num_layers
    digests = np.empty(layers, np.uint64)
    for i in range(first_block, len(chain)):
        at, version = _find(words, shape, name, chain[i])
        if at < 0:
            return np.int64(i), _if_live(words, MISSING)
        facts = np.int64(words[at + ENTRY_SHAPE])
        if facts & ((1 << SHAPE_TOKENS_SHIFT) - 1) != groups << SHAPE_GROUPS_SHIFT | layers:
            return np.int64(i), _if_live(words, MISSING)
        tokens = facts >> SHAPE_TOKENS_SHIFT
        if tokens == 0:
            tokens = layout[0].block_tokens
        right = tokens <= layout[0].block_tokens
        first = 0
        for g in range(groups):
            end = first + layout[g].num_layers
            nbytes = layout[g].num_layers * layout[g].layer_nbytes
            start, to = np.int64(words[at + ENTRY_OFFSETS + g]), targets[g, i]
            if not right or start < 0 or start > len(arena) - nbytes:
                right = False
                break
            if verify:
                in_words = rows and start % 4 == 0 and to % 4 == 0
                move_group(source, start, target, to, layout[g], tokens, in_words, digests[first:end])
                for layer in range(first, end):
                    right = right and digests[layer] == words[at + ENTRY_OFFSETS + groups + layer]
            else:
                memcpy(
                    np.uint64(landing.ctypes.data) + np.uint64(to),
                    np.uint64(arena.ctypes.data) + np.uint64(start),
                    np.uint64(nbytes),
                )
            first = end
        # Slots are reused only after their entry was voided, so an unchanged version proves that the bytes were valid.
        fence_acquire()
        still = load_acquire(words, at + ENTRY_VERSION) == version
        why = _if_live(words, FOUND if still else MISSING)
        if why != FOUND:
            return np.int64(i), why
        if not right:
            return np.int64(i), np.int64(CORRUPT)
    return np.int64(len(chain)), np.int64(FOUND)


class IndexKernels(NamedTuple):
    """Compiled loops over the index; all release the GIL.

    `write(words, buckets, entry_words, entry, record)` and `erase(words, buckets, entry_words, entry)` are for the one
    writer; `match(words, shape, name, chain)` and `get(...)` as `_match` and `_get`.
    """

    write: Any
    erase: Any
    match: Any
    get: Any


@functools.cache
def index_kernels() -> IndexKernels:
    """Return the kernels, compiled or loaded from the cache at the first call."""
    words, read_words = types.Array(types.uint64, 1, "C"), types.Array(types.uint64, 1, "C", readonly=True)
    shape = types.Array(types.int64, 1, "C", readonly=True)
    chain = types.Array(types.uint64, 2, "C", readonly=True)
    one = types.int64
    answer = types.UniTuple(one, 2)  # type: ignore[no-untyped-call]
    index = types.Tuple((read_words, shape))  # type: ignore[no-untyped-call]
    destination = types.Tuple((TARGET, OFFSETS))  # type: ignore[no-untyped-call]
    return IndexKernels(
        compiled(_write, types.void(words, one, one, one, read_words)),
        compiled(_erase, types.void(words, one, one, one)),
        compiled(_match, answer(read_words, shape, read_words, chain)),
        compiled(_get, answer(index, read_words, chain, LAYOUT, SOURCE, destination, one, types.boolean)),
    )

"""Compiled loops over the shared index: the pool node's writes, and its readers' look-ups and gets.

Readers run while the pool node writes, or after it died in the middle of a write. They treat an inconsistent read as a
miss and check every field of an entry before they use it. `kvpool.local.index_layout` describes the synchronisation.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from jit.compiling import compiled, compiled_with_gil
from kvpool.local.copy_kernels import LAYOUT, OFFSETS, SOURCE, TARGET, copy_pieces
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


def _write_all(words: Any, buckets: Any, entry_words: Any, entries: Any, records: Any) -> None:
    """Write the `records` [n, words], which start with the key, to free `entries` [n]."""
    for i in range(len(entries)):
        write_entry(words, buckets, entry_words, entries[i], records[i])


def _erase_all(words: Any, buckets: Any, entry_words: Any, entries: Any) -> None:
    for entry in entries:
        erase_entry(words, buckets, entry_words, entry)


def _write(words: Any, buckets: Any, entry_words: Any, entry: Any, record: Any) -> None:
    """Write a free entry, and point the first empty bucket from its hash on to it."""
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


write_entry, erase_entry = numba.njit(_write), numba.njit(_erase)


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


def _confirm(words: Any, places: Any, start: Any, stop: Any) -> Any:
    """Return (end of the blocks from `start` to `stop` whose entries have not changed since, reason for ending).

    Slots are reused only after their entry was voided, so an unchanged version proves that the bytes copied since were
    the block's.
    """
    fence_acquire()
    for i in range(start, stop):
        still = load_acquire(words, np.int64(places[i, 0]) + ENTRY_VERSION) == places[i, 1]
        why = _if_live(words, FOUND if still else MISSING)
        if why != FOUND:
            return np.int64(i), why
    return np.int64(stop), np.int64(FOUND)


confirm_entries = numba.njit(_confirm)


def _locate(
    index: Any, name: Any, chain: Any, layout: Any, arena_nbytes: Any, first_block: Any, places: Any, found: Any
) -> Any:
    """Look up blocks of `chain` [n, 2] from `first_block` on. Returns (end of the run found, reason for ending there).

    `index` is (words, shape). Of each block found, writes its entry's start and version to `places` uint64 [n, 2], and
    to `found` its offsets in the arena int64 [groups, n], tokens uint32 [n] (0: all) and digests uint64 [n, layers].
    """
    words, shape = index
    offsets, num_tokens, digests = found
    groups, layers = len(layout), digests.shape[1]
    for i in range(first_block, len(chain)):
        at, version = _find(words, shape, name, chain[i])
        if at < 0:
            return np.int64(i), _if_live(words, MISSING)
        facts = np.int64(words[at + ENTRY_SHAPE])
        if facts & ((1 << SHAPE_TOKENS_SHIFT) - 1) != groups << SHAPE_GROUPS_SHIFT | layers:
            return np.int64(i), _if_live(words, MISSING)
        places[i, 0], places[i, 1] = np.uint64(at), version
        tokens = facts >> SHAPE_TOKENS_SHIFT
        right = tokens <= layout[0].block_tokens
        for g in range(groups):
            start = np.int64(words[at + ENTRY_OFFSETS + g])
            right = right and 0 <= start <= arena_nbytes - layout[g].num_layers * layout[g].layer_nbytes
            offsets[g, i] = start
        for layer in range(layers):
            digests[i, layer] = words[at + ENTRY_OFFSETS + groups + layer]
        num_tokens[i] = tokens
        if not right:
            # Either the entry is corrupt, or it was written meanwhile.
            done, why = confirm_entries(words, places, i, i + 1)
            return np.int64(i), np.int64(CORRUPT) if done > i else why
    return np.int64(len(chain)), np.int64(FOUND)


locate_blocks = numba.njit(_locate)


def _get(
    index: Any, name: Any, chain: Any, layout: Any, source: Any, destination: Any, first_block: Any, verify: Any
) -> Any:
    """Look up, copy and check blocks of `chain` from `first_block` on. Returns (end of those valid, reason for ending).

    `source` is (bytes, words) of the arena; `destination` is ((bytes, words), byte offsets int64 [groups, n]). Returns
    (-1, OUT_OF_BOUNDS), having copied nothing, if a slot of the destination is out of bounds.
    """
    words, target, targets = index[0], destination[0], destination[1]
    n, layers = len(chain), 0
    for g in range(len(layout)):
        layers += layout[g].num_layers
    places, num_tokens = np.empty((n, 2), np.uint64), np.empty(n, np.uint32)
    offsets, expected = np.empty((len(layout), n), np.int64), np.empty((n, layers), np.uint64)
    found = (offsets, num_tokens, expected)
    end, why = locate_blocks(index, name, chain, layout, len(source[0]), first_block, places, found)
    if end == first_block:
        return end, why
    digests = np.empty((end - first_block if verify else 0, layers), np.uint64)
    starts, ends = offsets[:, first_block:end].copy(), targets[:, first_block:end].copy()
    tokens = num_tokens[first_block:end]
    failed = copy_pieces(source, starts, target, ends, layout, tokens, digests, np.zeros(1, np.int64))
    if failed:
        return np.int64(-1), failed
    still, changed = confirm_entries(words, places, first_block, end)
    if verify:
        for i in range(first_block, still):
            for layer in range(layers):
                if digests[i - first_block, layer] != expected[i, layer]:
                    return i, np.int64(CORRUPT)
    if still < end:
        return still, changed
    return end, why


class IndexKernels(NamedTuple):
    """Compiled loops over the index. All but `match` and `get` keep the GIL: they take about a microsecond.

    `write(words, buckets, entry_words, entries, records)` and `erase(words, buckets, entry_words, entries)` are for the
    one writer, with entries int64 [n] and records uint64 [n, words]; `match(words, shape, name, chain)`,
    `get(...)`, `locate(...)` and `confirm(words, places, start, stop)` as `_match`, `_get`, `_locate` and `_confirm`.
    """

    write: Any
    erase: Any
    match: Any
    get: Any
    locate: Any
    confirm: Any


@functools.cache
def index_kernels() -> IndexKernels:
    """Return the kernels, compiled or loaded from the cache at the first call."""
    words, read_words = types.Array(types.uint64, 1, "C"), types.Array(types.uint64, 1, "C", readonly=True)
    shape = types.Array(types.int64, 1, "C", readonly=True)
    chain = types.Array(types.uint64, 2, "C", readonly=True)
    one, entries = types.int64, types.Array(types.int64, 1, "C", readonly=True)
    answer = types.UniTuple(one, 2)  # type: ignore[no-untyped-call]
    index = types.Tuple((read_words, shape))  # type: ignore[no-untyped-call]
    destination = types.Tuple((TARGET, OFFSETS))  # type: ignore[no-untyped-call]
    places, offsets = types.Array(types.uint64, 2, "C"), types.Array(types.int64, 2, "C")
    found = types.Tuple((offsets, types.Array(types.uint32, 1, "C"), places))  # type: ignore[no-untyped-call]
    return IndexKernels(
        compiled_with_gil(_write_all, types.void(words, one, one, entries, chain)),
        compiled_with_gil(_erase_all, types.void(words, one, one, entries)),
        compiled(_match, answer(read_words, shape, read_words, chain)),
        compiled(_get, answer(index, read_words, chain, LAYOUT, SOURCE, destination, one, types.boolean)),
        compiled_with_gil(_locate, answer(index, read_words, chain, LAYOUT, one, one, places, found)),
        compiled_with_gil(_confirm, answer(read_words, places, one, one)),
    )

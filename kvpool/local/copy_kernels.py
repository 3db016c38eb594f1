"""Compiled loops that copy blocks between mappings and compute their digests in the same pass over the bytes.

`kvpool.digest` defines the digests. The inner loops check no bounds; their callers do. `layout` is
`SpecLayout.groups`, GROUP_LAYOUT [groups].
"""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from jit.atomic_counter import take_next
from jit.compiling import compiled
from jit.digest_mix import mix
from kvpool.digest_kernels import digest_bytes, digest_words
from kvpool.spec import GROUP_LAYOUT, TOKEN_RANGE

DONE, OUT_OF_BOUNDS, TOO_MANY_TOKENS = 0, 1, 2

_READ_BYTES, _WRITE_BYTES = types.Array(types.uint8, 1, "C", readonly=True), types.Array(types.uint8, 1, "C")
_READ_WORDS, _WRITE_WORDS = types.Array(types.uint32, 1, "C", readonly=True), types.Array(types.uint32, 1, "C")
OFFSETS = types.Array(types.int64, 2, "C", readonly=True)
LAYOUT = types.Array(numba.from_dtype(GROUP_LAYOUT), 1, "C")
SOURCE = types.Tuple((_READ_BYTES, _READ_WORDS))  # type: ignore[no-untyped-call]
TARGET = types.Tuple((_WRITE_BYTES, _WRITE_WORDS))  # type: ignore[no-untyped-call]

memcpy: Any = types.ExternalFunction("memcpy", types.uint64(types.uint64, types.uint64, types.uint64))


def _move_words_of(source: Any, start: Any, target: Any, to: Any, count: Any, first: Any) -> Any:
    """Copy `count` words. Returns the sum of their mixes; `first` is the index of the first word in its layer."""
    total = np.uint64(0)
    row, out = source[start : start + count], target[to : to + count]
    for k in range(len(row)):
        word = row[k]
        out[k] = word
        total += mix(word, first + k)
    return total


def _move_row_of(source: Any, start: Any, target: Any, to: Any, count: Any, first: Any) -> Any:
    """Copy a token row of `count` bytes, as `_move_words`. The last word is padded with zeros for its mix."""
    total = np.uint64(0)
    for w in range((count + 3) // 4):
        word = np.uint64(0)
        for b in range(min(4, count - 4 * w)):
            byte = source[start + 4 * w + b]
            target[to + 4 * w + b] = byte
            word |= np.uint64(byte) << np.uint64(8 * b)
        total += mix(word, first + w)
    return total


_move_words = numba.njit(_move_words_of)
_move_row = numba.njit(_move_row_of)


def _move_layers(
    source: Any, target: Any, slots: Any, group: Any, tokens: Any, in_words: Any, layers: Any, digests: Any
) -> None:
    """Copy the first `tokens` tokens of layers of one slot, and set their `digests`.

    `source` and `target` are (bytes, words), `slots` is (first byte in the source, first byte in the target), `group`
    is a GROUP_LAYOUT, `layers` is (first, last + 1), `digests` is uint64 [layers]. `in_words` is True if both first
    bytes and the row length are multiples of 4.
    """
    start, to = slots
    block_tokens, row_nbytes = group.block_tokens, group.row_nbytes
    whole = tokens == block_tokens
    runs = 1 if whole else group.num_runs
    run_tokens = group.num_runs * block_tokens if whole else tokens
    row_words = (row_nbytes + 3) // 4
    for layer in range(layers[0], layers[1]):
        shift = layer * group.layer_nbytes
        total = np.uint64(0)
        for run in range(runs):
            if in_words:
                first = run * block_tokens * row_words
                total += _move_words(
                    source[1], (start + shift) // 4 + first, target[1], (to + shift) // 4 + first,
                    run_tokens * row_words, first,
                )  # fmt: skip
            else:
                for token in range(run_tokens):
                    row = run * block_tokens + token
                    near = shift + row * row_nbytes
                    total += _move_row(source[0], start + near, target[0], to + near, row_nbytes, row * row_words)
        digests[layer - layers[0]] = total


move_layers = numba.njit(_move_layers)


def _within(nbytes: Any, offsets: Any, layout: Any) -> bool:
    """Return True if all slots at `offsets` [groups, n] lie within memory of `nbytes` bytes."""
    for g in range(len(offsets)):
        last = nbytes - layout[g].num_layers * layout[g].layer_nbytes
        for i in range(offsets.shape[1]):
            if offsets[g, i] < 0 or offsets[g, i] > last:
                return False
    return True


def _rows_in_words(source: Any, target: Any, layout: Any) -> bool:
    """Return True if both memories start at multiples of 4 and all row lengths are multiples of 4."""
    whole = len(source[1]) == len(source[0]) // 4 and len(target[1]) == len(target[0]) // 4
    for g in range(len(layout)):
        whole = whole and layout[g].row_nbytes % 4 == 0
    return whole


within = numba.njit(_within)
rows_in_words = numba.njit(_rows_in_words)


_PIECE_NBYTES = 1 << 18  # copied by one thread: short, since others may have to wait for the last one
_PLAIN_NBYTES = 1 << 22  # without digests: memcpy is slower for lengths below the size of a core's cache


@numba.njit
def layers_per_piece(group: Any, nbytes: Any) -> Any:
    return max(np.int64(1), nbytes // max(np.int64(1), group.layer_nbytes))


@numba.njit
def num_pieces(group: Any, nbytes: Any) -> Any:
    return -(-group.num_layers // layers_per_piece(group, nbytes))


def _copy_pieces(
    source: Any, starts: Any, target: Any, targets: Any, layout: Any, num_tokens: Any, digests: Any, cursor: Any
) -> Any:
    if not (within(len(source[0]), starts, layout) and within(len(target[0]), targets, layout)):
        return np.int64(OUT_OF_BOUNDS)
    block_tokens = layout[0].block_tokens
    for i in range(len(num_tokens)):
        if num_tokens[i] > block_tokens:
            return np.int64(TOO_MANY_TOKENS)
    words = rows_in_words(source, target, layout)
    most = np.int64(_PIECE_NBYTES if len(digests) else _PLAIN_NBYTES)
    per_block = np.int64(0)
    for g in range(len(layout)):
        per_block += num_pieces(layout[g], most)
    while True:
        piece = take_next(cursor)
        i, piece = piece // per_block, piece % per_block
        if i >= len(num_tokens):
            return np.int64(DONE)
        g = at = 0
        while piece >= num_pieces(layout[g], most):
            piece -= num_pieces(layout[g], most)
            at += layout[g].num_layers
            g += 1
        first = piece * layers_per_piece(layout[g], most)
        last = min(layout[g].num_layers, first + layers_per_piece(layout[g], most))
        start, to = starts[g, i], targets[g, i]
        if len(digests):
            tokens = np.int64(num_tokens[i]) if num_tokens[i] else block_tokens
            in_words = words and start % 4 == 0 and to % 4 == 0
            out = digests[i, at + first : at + last]
            move_layers(source, target, (start, to), layout[g], tokens, in_words, (first, last), out)
        else:
            memcpy(
                np.uint64(target[0].ctypes.data) + np.uint64(to + first * layout[g].layer_nbytes),
                np.uint64(source[0].ctypes.data) + np.uint64(start + first * layout[g].layer_nbytes),
                np.uint64((last - first) * layout[g].layer_nbytes),
            )


copy_pieces = numba.njit(_copy_pieces)


def _digest_blocks(source: Any, starts: Any, layout: Any, num_tokens: Any, digests: Any) -> Any:
    if not within(len(source[0]), starts, layout):
        return np.int64(OUT_OF_BOUNDS)
    block_tokens = layout[0].block_tokens
    for i in range(len(num_tokens)):
        if num_tokens[i] > block_tokens:
            return np.int64(TOO_MANY_TOKENS)
    words = rows_in_words(source, source, layout)
    tokens = np.zeros(1, TOKEN_RANGE)
    for i in range(len(num_tokens)):
        tokens[0].stop = np.int64(num_tokens[i]) if num_tokens[i] else block_tokens
        at = 0
        for g in range(len(layout)):
            group = layout[g]
            end = at + group.num_layers
            unit = 4 if words and starts[g, i] % 4 == 0 else 1
            layers = np.arange(group.num_layers) * (group.layer_nbytes // unit)
            slot, out = starts[g, i : i + 1] // unit, digests[i : i + 1, at:end]
            row = group.row_nbytes // unit
            if unit == 4:
                digest_words(source[1], slot, layers, group.num_runs, block_tokens, row, tokens, out)
            else:
                digest_bytes(source[0], slot, layers, group.num_runs, block_tokens, row, tokens, out)
            at = end
    return np.int64(DONE)


_TOKENS = types.Array(types.uint32, 1, "C", readonly=True)


@functools.cache
def digest_kernel() -> Any:
    """Return the compiled digest of blocks in place; it releases the GIL.

    Arguments: memory (bytes, words); byte offsets int64 [groups, n]; GROUP_LAYOUT [groups]; tokens per block uint32
    [n], 0 = all; the output, digests uint64 [n, layers of all groups]. Returns DONE, OUT_OF_BOUNDS or TOO_MANY_TOKENS.
    """
    out = types.Array(types.uint64, 2, "C")
    return compiled(_digest_blocks, types.int64(SOURCE, OFFSETS, LAYOUT, _TOKENS, out))


@functools.cache
def copy_kernel() -> Any:
    """Return the compiled copy of blocks; it releases the GIL.

    Arguments: source (bytes, words), byte offsets int64 [groups, n]; target likewise; GROUP_LAYOUT [groups]; tokens
    per block uint32 [n], 0 = all; the output, digests of the copied bytes uint64 [n, layers of all groups], or [0, 0]:
    then whole slots are copied without digests; cursor int64 [1], 0 at first: several threads that share it share the
    work. Returns DONE when no piece is left; or OUT_OF_BOUNDS or TOO_MANY_TOKENS, having copied nothing.
    """
    digests, cursor = types.Array(types.uint64, 2, "C"), types.Array(types.int64, 1, "C")
    return compiled(_copy_pieces, types.int64(SOURCE, OFFSETS, TARGET, OFFSETS, LAYOUT, _TOKENS, digests, cursor))

"""The compiled loops that copy blocks between mappings and compute their digests on the way: one pass over the bytes.

What a digest is stands in `kvpool.digest`. Moves check no bounds: callers do. `layout` is a `SpecLayout`'s array.
"""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from jit.compiling import compiled
from kvpool.digest_kernels import digest_bytes, digest_words, mix
from kvpool.local.index_layout import (
    PLAN_GROUP,
    PLAN_GROUP_WIDTH,
    PLAN_LAYER_NBYTES,
    PLAN_LAYERS,
    PLAN_ROW_NBYTES,
    PLAN_RUNS,
)

DONE, OUT_OF_BOUNDS, TOO_MANY_TOKENS = 0, 1, 2

_READ_BYTES, _WRITE_BYTES = types.Array(types.uint8, 1, "C", readonly=True), types.Array(types.uint8, 1, "C")
_READ_WORDS, _WRITE_WORDS = types.Array(types.uint32, 1, "C", readonly=True), types.Array(types.uint32, 1, "C")
BYTES, WORDS = (_READ_BYTES, _WRITE_BYTES), (_READ_WORDS, _WRITE_WORDS)

memcpy: Any = types.ExternalFunction("memcpy", types.uint64(types.uint64, types.uint64, types.uint64))


def _move_words_of(source: Any, start: Any, target: Any, to: Any, count: Any, first: Any) -> Any:
    """Copy `count` words and return the sum of their mixes, the first one's index being `first`."""
    total = np.uint64(0)
    row, out = source[start : start + count], target[to : to + count]
    for k in range(len(row)):
        word = row[k]
        out[k] = word
        total += mix(word, first + k)
    return total


def _move_row_of(source: Any, start: Any, target: Any, to: Any, count: Any, first: Any) -> Any:
    """As `_move_words` of one token row of `count` bytes, which fills its last word with zeros."""
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


def _move_group(
    source8: Any, source32: Any, start: Any, target8: Any, target32: Any, to: Any, layout: Any, g: Any, tokens: Any,
    in_words: Any, digests: Any, at: Any,
) -> None:  # fmt: skip
    """Copy the first `tokens` tokens of one slot, from byte `start` to byte `to`; layer digests to digests[at:]."""
    base = PLAN_GROUP + g * PLAN_GROUP_WIDTH
    block_tokens, row_nbytes = layout[0], layout[base + PLAN_ROW_NBYTES]
    whole = tokens == block_tokens
    runs = 1 if whole else layout[base + PLAN_RUNS]
    run_tokens = layout[base + PLAN_RUNS] * block_tokens if whole else tokens
    row_words = (row_nbytes + 3) // 4
    for layer in range(layout[base + PLAN_LAYERS]):
        shift = layer * layout[base + PLAN_LAYER_NBYTES]
        total = np.uint64(0)
        for run in range(runs):
            if in_words:
                first = run * block_tokens * row_words
                total += _move_words(
                    source32, (start + shift) // 4 + first, target32, (to + shift) // 4 + first,
                    run_tokens * row_words, first,
                )  # fmt: skip
            else:
                for token in range(run_tokens):
                    row = run * block_tokens + token
                    near = shift + row * row_nbytes
                    total += _move_row(source8, start + near, target8, to + near, row_nbytes, row * row_words)
        digests[at + layer] = total


move_group = numba.njit(_move_group)


def _within(nbytes: Any, offsets: Any, layout: Any) -> bool:
    """Whether all slots at `offsets` [groups, n] lie within so many bytes."""
    for g in range(len(offsets)):
        base = PLAN_GROUP + g * PLAN_GROUP_WIDTH
        last = nbytes - layout[base + PLAN_LAYERS] * layout[base + PLAN_LAYER_NBYTES]
        for i in range(offsets.shape[1]):
            if offsets[g, i] < 0 or offsets[g, i] > last:
                return False
    return True


def _rows_in_words(source8: Any, source32: Any, target8: Any, target32: Any, layout: Any) -> bool:
    """Whether both memories start at multiples of 4 and all rows are of such a length."""
    whole = len(source32) == len(source8) // 4 and len(target32) == len(target8) // 4
    for g in range(layout[1]):
        whole = whole and layout[PLAN_GROUP + g * PLAN_GROUP_WIDTH + PLAN_ROW_NBYTES] % 4 == 0
    return whole


within = numba.njit(_within)
rows_in_words = numba.njit(_rows_in_words)


def _copy_blocks(
    source8: Any, source32: Any, starts: Any, target8: Any, target32: Any, targets: Any, layout: Any, num_tokens: Any,
    expected: Any, digests: Any, right: Any,
) -> Any:  # fmt: skip
    if not (within(len(source8), starts, layout) and within(len(target8), targets, layout)):
        return np.int64(OUT_OF_BOUNDS)
    for i in range(len(num_tokens)):
        if num_tokens[i] > layout[0]:
            return np.int64(TOO_MANY_TOKENS)
    words = rows_in_words(source8, source32, target8, target32, layout)
    for i in range(len(num_tokens)):
        tokens = np.int64(num_tokens[i]) if num_tokens[i] else layout[0]
        same, at = True, 0
        for g in range(layout[1]):
            start, to = starts[g, i], targets[g, i]
            in_words = words and start % 4 == 0 and to % 4 == 0
            move_group(source8, source32, start, target8, target32, to, layout, g, tokens, in_words, digests[i], at)
            at += layout[PLAN_GROUP + g * PLAN_GROUP_WIDTH + PLAN_LAYERS]
        if len(expected):
            for layer in range(digests.shape[1]):
                same = same and digests[i, layer] == expected[i, layer]
        right[i] = same
    return np.int64(DONE)


def _digest_blocks(source8: Any, source32: Any, starts: Any, layout: Any, num_tokens: Any, digests: Any) -> Any:
    if not within(len(source8), starts, layout):
        return np.int64(OUT_OF_BOUNDS)
    for i in range(len(num_tokens)):
        if num_tokens[i] > layout[0]:
            return np.int64(TOO_MANY_TOKENS)
    words = rows_in_words(source8, source32, source8, source32, layout)
    one_start, one_stop = np.zeros(1, np.int64), np.empty(1, np.int64)
    for i in range(len(num_tokens)):
        one_stop[0] = np.int64(num_tokens[i]) if num_tokens[i] else layout[0]
        at = 0
        for g in range(layout[1]):
            base = PLAN_GROUP + g * PLAN_GROUP_WIDTH
            num_layers, row_nbytes = layout[base + PLAN_LAYERS], layout[base + PLAN_ROW_NBYTES]
            unit = 4 if words and starts[g, i] % 4 == 0 else 1
            layers = np.arange(num_layers) * (layout[base + PLAN_LAYER_NBYTES] // unit)
            slot, out = starts[g, i : i + 1] // unit, digests[i : i + 1, at : at + num_layers]
            runs = layout[base + PLAN_RUNS]
            if unit == 4:
                digest_words(source32, slot, layers, runs, layout[0], row_nbytes // 4, one_start, one_stop, out)
            else:
                digest_bytes(source8, slot, layers, runs, layout[0], row_nbytes, one_start, one_stop, out)
            at += num_layers
    return np.int64(DONE)


@functools.cache
def digest_kernel() -> Any:
    """The compiled digest of blocks where they lie, without the GIL: DONE, OUT_OF_BOUNDS or TOO_MANY_TOKENS.

    Arguments: memory as bytes and as words; byte offsets int64 [groups, n]; plan; tokens uint32 [n], 0 = all; digests
    uint64 [n, layers of all groups], written.
    """
    offsets, layout = types.Array(types.int64, 2, "C", readonly=True), types.Array(types.int64, 1, "C", readonly=True)
    tokens, out = types.Array(types.uint32, 1, "C", readonly=True), types.Array(types.uint64, 2, "C")
    return compiled(_digest_blocks, types.int64(BYTES[0], WORDS[0], offsets, layout, tokens, out))


@functools.cache
def copy_kernel() -> Any:
    """The compiled copy of blocks, without the GIL: DONE, OUT_OF_BOUNDS or TOO_MANY_TOKENS; nothing is copied then.

    Arguments: source as bytes and as words, byte offsets int64 [groups, n]; target likewise; plan; tokens uint32 [n],
    0 = all; the digests uint64 [n, layers of all groups] that are right, or [0, …] where none are told; written: the
    digests of what was copied, and uint8 [n] whether the block's are right.
    """
    offsets, layout = types.Array(types.int64, 2, "C", readonly=True), types.Array(types.int64, 1, "C", readonly=True)
    tokens = types.Array(types.uint32, 1, "C", readonly=True)
    expected, digests = types.Array(types.uint64, 2, "C", readonly=True), types.Array(types.uint64, 2, "C")
    right = types.Array(types.uint8, 1, "C")
    source, target = (BYTES[0], WORDS[0], offsets), (BYTES[1], WORDS[1], offsets)
    return compiled(_copy_blocks, types.int64(*source, *target, layout, tokens, expected, digests, right))

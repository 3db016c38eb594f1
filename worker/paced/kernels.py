"""Compiled loops that write and check the paced engine's stand-in for KV. They do not check their arguments.

Token t of a sequence has a state: a hash of its id and of the previous token's state. The words of the token's KV rows
are derived from that state, the layer and the row, so two tokens have equal KV only if all ids up to them are equal.
"""

import functools
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numba import types

from jit.compiling import compiled

_GAMMA, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
# A mask that leaves finite values of any 2- or 4-byte float format.
_NUMBERS = np.uint32(0x3F3F3F3F)
_MASK = (1 << 64) - 1


LAYER: Final = np.dtype([("number", np.int64), ("offset", np.int64)])
"""A model layer and its offset within a slot, in words."""

ROWS: Final = np.dtype(
    [("block_tokens", np.int64), ("rows", np.int64), ("row_words", np.int64), ("start", np.int64), ("end", np.int64)]
)
"""Tokens [start, end) of a sequence: each has `rows` rows of `row_words` words in every layer."""


class PacedKernels(NamedTuple):
    """The compiled functions; they release the GIL.

    states(tokens i32[n], before u64, out u64[n]): the states of n tokens that follow one with state `before`.
    fill(words u32[m], slots i64[b], layers LAYER[l], states u64[k], rows ROWS[1]): write the KV of the tokens in
    `rows`. `slots` holds each block's offset in words, `states` the states of all tokens of the sequence.
    check(words, slots, layers, states, rows, wrong bool[b]): set `wrong` for each block that holds other words than
    `fill` would write.
    """

    states: Any
    fill: Any
    check: Any


@functools.cache
def kernels() -> PacedKernels:
    """Return the kernels; the first call compiles them or loads them from the cache."""
    i64, u64 = types.int64, types.uint64
    tokens, states = types.Array(types.int32, 1, "C", readonly=True), types.Array(u64, 1, "C", readonly=True)
    words, given = types.Array(types.uint32, 1, "C"), types.Array(types.uint32, 1, "C", readonly=True)
    slots = types.Array(i64, 1, "C", readonly=True)
    layers, rows = (types.Array(numba.from_dtype(dtype), 1, "C", readonly=True) for dtype in (LAYER, ROWS))
    place = (slots, layers, states, rows)
    return PacedKernels(
        compiled(_states, types.void(tokens, u64, types.Array(u64, 1, "C"))),
        compiled(_fill, types.void(words, *place)),
        compiled(_check, types.void(given, *place, types.Array(types.boolean, 1, "C"))),
    )


def mixed(value: int) -> int:
    """Hash a 64-bit value like the compiled loops, in plain Python.

    The finaliser of splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    value = (value + int(_GAMMA)) & _MASK
    value = ((value ^ (value >> 30)) * int(_M1)) & _MASK
    value = ((value ^ (value >> 27)) * int(_M2)) & _MASK
    return value ^ (value >> 31)


@numba.njit(inline="always")
def _mix(x: Any) -> Any:
    x = x + _GAMMA
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@numba.njit(inline="always")
def _row_seed(state: Any, layer: Any, row: Any) -> Any:
    return _mix(state ^ (np.uint64(layer) << _S32 | np.uint64(row)))


@numba.njit(inline="always")
def _word(seed: Any, index: Any) -> Any:
    x = (seed + np.uint64(index) * _GAMMA) * _M1
    return np.uint32(x >> _S32) & _NUMBERS


def _states(tokens: Any, before: Any, out: Any) -> None:
    state = before
    for i in range(len(tokens)):
        state = _mix(state ^ np.uint64(tokens[i]))
        out[i] = state


def _fill(words: Any, slots: Any, layers: Any, states: Any, rows: Any) -> None:
    block_tokens, num_rows, row_words = rows[0].block_tokens, rows[0].rows, rows[0].row_words
    for t in range(rows[0].start, rows[0].end):
        slot = slots[t // block_tokens]
        for j in range(len(layers)):
            number, offset = layers[j].number, layers[j].offset
            for row in range(num_rows):
                seed = _row_seed(states[t], number, row)
                base = slot + offset + (row * block_tokens + t % block_tokens) * row_words
                out = words[base : base + row_words]
                for w in range(row_words):
                    out[w] = _word(seed, w)


def _check(words: Any, slots: Any, layers: Any, states: Any, rows: Any, wrong: Any) -> None:
    block_tokens, num_rows, row_words = rows[0].block_tokens, rows[0].rows, rows[0].row_words
    for t in range(rows[0].start, rows[0].end):
        slot = slots[t // block_tokens]
        differ = np.uint32(0)
        for j in range(len(layers)):
            number, offset = layers[j].number, layers[j].offset
            for row in range(num_rows):
                seed = _row_seed(states[t], number, row)
                base = slot + offset + (row * block_tokens + t % block_tokens) * row_words
                found = words[base : base + row_words]
                for w in range(row_words):
                    differ |= found[w] ^ _word(seed, w)
        if differ:
            wrong[t // block_tokens] = True

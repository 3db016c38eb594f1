"""What the paced engine writes in place of KV, as compiled loops. Nothing here checks its arguments.

Token t of a sequence has a state: a hash of its id and of the state before. The words of its rows are made of that
state, their layer and their place, so that two tokens' KV is equal only where all ids up to them are.
"""

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from jit.compiling import compiled

_GAMMA, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)
# Of any float of 2 or 4 bytes this leaves a number, never an infinity.
_NUMBERS = np.uint32(0x3F3F3F3F)
_MASK = (1 << 64) - 1


class PacedKernels(NamedTuple):
    """Compiled without the GIL.

    states(tokens i32[n], before u64, out u64[n]): of n tokens after one with that state.
    fill(words u32[m], slots i64[b], block_tokens, layers i64[l, 2], rows, row_words, states u64[k], start, end): write
    tokens [start, end) of a sequence; `slots` in words, per block; `layers`: (number, offset in words within a slot);
    `states` of all of the sequence's tokens.
    check(..., wrong bool[b]): as fill, but says which blocks hold other words than fill would write.
    """

    states: Any
    fill: Any
    check: Any


@functools.cache
def kernels() -> PacedKernels:
    """Compiled, or loaded, at the first call."""
    i64, u64 = types.int64, types.uint64
    tokens, states = types.Array(types.int32, 1, "C", readonly=True), types.Array(u64, 1, "C", readonly=True)
    words, given = types.Array(types.uint32, 1, "C"), types.Array(types.uint32, 1, "C", readonly=True)
    slots, layers = types.Array(i64, 1, "C", readonly=True), types.Array(i64, 2, "C", readonly=True)
    place = (slots, i64, layers, i64, i64, states, i64, i64)
    return PacedKernels(
        compiled(_states, types.void(tokens, u64, types.Array(u64, 1, "C"))),
        compiled(_fill, types.void(words, *place)),
        compiled(_check, types.void(given, *place, types.Array(types.boolean, 1, "C"))),
    )


def mixed(value: int) -> int:
    """The states' hash of 64 bits (splitmix64's finaliser, Steele et al., "Fast splittable pseudorandom number
    generators", OOPSLA 2014) outside compiled code."""
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


def _fill(
    words: Any, slots: Any, block_tokens: Any, layers: Any, rows: Any, row_words: Any, states: Any, start: Any, end: Any
) -> None:
    for t in range(start, end):
        slot = slots[t // block_tokens]
        for j in range(len(layers)):
            for row in range(rows):
                seed = _row_seed(states[t], layers[j, 0], row)
                base = slot + layers[j, 1] + (row * block_tokens + t % block_tokens) * row_words
                out = words[base : base + row_words]
                for w in range(row_words):
                    out[w] = _word(seed, w)


def _check(
    words: Any,
    slots: Any,
    block_tokens: Any,
    layers: Any,
    rows: Any,
    row_words: Any,
    states: Any,
    start: Any,
    end: Any,
    wrong: Any,
) -> None:
    for t in range(start, end):
        slot = slots[t // block_tokens]
        differ = np.uint32(0)
        for j in range(len(layers)):
            for row in range(rows):
                seed = _row_seed(states[t], layers[j, 0], row)
                base = slot + layers[j, 1] + (row * block_tokens + t % block_tokens) * row_words
                found = words[base : base + row_words]
                for w in range(row_words):
                    differ |= found[w] ^ _word(seed, w)
        if differ:
            wrong[t // block_tokens] = True

"""Compiled loops of `kvpool.digest`, which defines the digest. They check no arguments."""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from jit.compiling import compiled
from jit.digest_mix import mix
from kvpool.spec import TOKEN_RANGE


@functools.cache
def digest_kernels() -> tuple[Any, Any]:
    """Return (kernel over uint32 words, kernel over bytes), compiled or loaded from the cache at the first call.

    Both release the GIL and check nothing. Arguments: memory as words or as bytes; offsets of slots int64 [n_slots] and
    of layers within a slot int64 [n_layers], in that unit; runs of tokens per layer (heads x 2); tokens per block;
    length of a token row in that unit; TOKEN_RANGE [n_slots]; the output, digests uint64 [n_slots, n_layers].
    """
    int64s, out = types.Array(types.int64, 1, "C", readonly=True), types.Array(types.uint64, 2, "C")
    ranges = types.Array(numba.from_dtype(TOKEN_RANGE), 1, "C", readonly=True)
    scalars = (types.int64, types.int64, types.int64)

    def signature(element: Any) -> Any:
        memory = types.Array(element, 1, "C", readonly=True)
        return types.void(memory, int64s, int64s, *scalars, ranges, out)

    return compiled(_digest_words, signature(types.uint32)), compiled(_digest_bytes, signature(types.uint8))


def _digest_words(
    words: Any, slots: Any, layers: Any, runs: Any, block_tokens: Any, row_words: Any, tokens: Any, out: Any
) -> None:
    for i in range(len(slots)):
        start, stop = tokens[i].start, tokens[i].stop
        # A block whose tokens all count is one run; otherwise each (head, part) is one.
        whole = start == 0 and stop == block_tokens
        num_runs = 1 if whole else runs
        run_words = (runs * block_tokens if whole else stop - start) * row_words
        for j in range(len(layers)):
            total = np.uint64(0)
            for run in range(num_runs):
                first = (run * block_tokens + start) * row_words
                base = slots[i] + layers[j] + first
                row = words[base : base + run_words]
                for k in range(len(row)):
                    total += mix(row[k], first + k)
            out[i, j] = total


def _digest_bytes(
    memory: Any, slots: Any, layers: Any, runs: Any, block_tokens: Any, row_nbytes: Any, tokens: Any, out: Any
) -> None:
    row_words = (row_nbytes + 3) // 4
    for i in range(len(slots)):
        for j in range(len(layers)):
            total = np.uint64(0)
            for run in range(runs):
                for token in range(tokens[i].start, tokens[i].stop):
                    row = run * block_tokens + token
                    base = slots[i] + layers[j] + row * row_nbytes
                    for w in range(row_words):
                        word = np.uint64(0)
                        for b in range(min(4, row_nbytes - 4 * w)):
                            word |= np.uint64(memory[base + 4 * w + b]) << np.uint64(8 * b)
                        total += mix(word, row * row_words + w)
            out[i, j] = total


digest_words, digest_bytes = numba.njit(_digest_words), numba.njit(_digest_bytes)
"""The same loops, for calls from other compiled functions."""

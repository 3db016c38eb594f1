"""The mixing function of KV digests, for compiled loops of several packages; `kvpool.digest` defines it. Frozen."""

from typing import Any

import numba
import numpy as np

__all__ = ["GAMMA", "MULTIPLIER_1", "MULTIPLIER_2", "mix"]

GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB

_GAMMA, _MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(GAMMA), np.uint64(MULTIPLIER_1), np.uint64(MULTIPLIER_2)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


def _mix_word(word: Any, index: Any) -> Any:
    x = (np.uint64(index) << _S32 | np.uint64(word)) + _GAMMA
    x = (x ^ (x >> _S30)) * _MULTIPLIER_1
    x = (x ^ (x >> _S27)) * _MULTIPLIER_2
    return x ^ (x >> _S31)


mix = numba.njit(inline="always")(_mix_word)
"""`mix(word, index)` of a uint32 word and its index."""

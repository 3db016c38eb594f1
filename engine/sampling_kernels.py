"""Inner loops of sampling on the CPU, compiled by numba.

They use the same integers and the same exactly rounded floating-point operations as `exact_math` and `sampling`, so
results are equal bit for bit. No fast-math flag may be set here.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from engine.exact_math import (
    EXP_LEAST,
    INVERSE_LN2,
    LN2_HI,
    LN2_LO,
    LOG_EVEN,
    LOG_ODD,
    MULTIPLIERS,
    ROUNDS,
    SQRT_HALF,
    TAYLOR,
    WEYL,
)

Doubles = npt.NDArray[np.float64]
_F = TypeVar("_F", bound=Callable[..., Any])

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MANTISSA, _ONE = np.int64((1 << 52) - 1), np.int64(1023 << 52)
_EVEN0, _EVEN1, _EVEN2 = LOG_EVEN
_ODD0, _ODD1, _ODD2, _ODD3 = LOG_ODD
_TAYLOR = np.array(TAYLOR)


def _kernel(function: _F) -> _F:
    return cast(_F, numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=False)(function))


@_kernel
def _log(x: float) -> float:
    bits = np.float64(x).view(np.int64)
    mantissa = np.int64((bits & _MANTISSA) | _ONE).view(np.float64)
    halve = mantissa * 0.5 > SQRT_HALF
    mantissa = mantissa * 0.5 if halve else mantissa
    k = np.float64((bits >> 52) - 1023 + (1 if halve else 0))
    f = mantissa - 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    even = w * (_EVEN0 + w * (_EVEN1 + w * _EVEN2))
    odd = z * (_ODD0 + w * (_ODD1 + w * (_ODD2 + w * _ODD3)))
    half_square = f * f * 0.5
    return float(k * LN2_HI - ((half_square - (s * (half_square + (even + odd)) + k * LN2_LO)) - f))


@_kernel
def _exp(x: float) -> float:
    if x < EXP_LEAST:
        return 0.0
    k = np.rint(x * INVERSE_LN2)
    r = (x - k * LN2_HI) - k * LN2_LO
    value = _TAYLOR[-1]
    for i in range(len(_TAYLOR) - 2, -1, -1):
        value = value * r + _TAYLOR[i]
    return float(value * np.int64((np.int64(k) + 1023) << 52).view(np.float64))


@_kernel
def _gumbel(high: np.uint64, low: np.uint64) -> float:
    bits = np.int64((high << np.uint64(20)) | (low >> np.uint64(12)))
    return -_log(-_log((np.float64(bits) + 0.5) * 2.0**-52))


@_kernel
def add_noise(scores: Doubles, temperature: float, seed: np.uint64, choice: np.uint64, index: np.uint64) -> None:
    """Add temperature * the Gumbel noise of `sampling.gumbel_noise` to scores [V]."""
    for pair in range((scores.size + 1) // 2):
        c0, c1, c2, c3 = np.uint64(pair), index, choice, np.uint64(0)
        k0, k1 = seed & _MASK, seed >> _32
        for _ in range(ROUNDS):
            p0, p1 = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _MASK, (p0 >> _32) ^ c3 ^ k1, p0 & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        scores[2 * pair] += temperature * _gumbel(c1, c0)
        if 2 * pair + 1 < scores.size:
            scores[2 * pair + 1] += temperature * _gumbel(c3, c2)


@_kernel
def candidates(
    logits: Doubles, temperature: float, top_k: int, top_p: float, min_p: float, unit: float
) -> npt.NDArray[np.bool_]:
    """Return bool [V]: the ids that `sampling` keeps. With top-p, only ids of non-zero weight are sorted."""
    kept = np.zeros(logits.size, np.bool_)
    ids = np.arange(logits.size)
    if 0 < top_k < logits.size:
        ids = np.flatnonzero(logits >= np.partition(logits, logits.size - top_k)[logits.size - top_k])
    top = logits.max()
    if min_p > 0:
        likely = np.zeros(ids.size, np.bool_)
        for i in range(ids.size):
            likely[i] = _exp((logits[ids[i]] - top) / temperature) >= min_p
        ids = ids[likely]
    units = np.ones(ids.size, np.int64)
    if top_p < 1:
        for i in range(ids.size):
            units[i] = np.int64(_exp((logits[ids[i]] - top) / temperature) * unit)
        ids, units = ids[units > 0], units[units > 0]
    order = np.argsort(-logits[ids], kind="mergesort")  # stable: ties stay in order of id
    if 0 < top_k < order.size:
        order = order[:top_k]
    total = units[order].sum()
    before = 0
    for i in order:
        if top_p < 1 and before > 0 and np.float64(before) >= top_p * np.float64(total):
            break
        kept[ids[i]] = True
        before += units[i]
    return kept

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
Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32] | Doubles
_F = TypeVar("_F", bound=Callable[..., Any])

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_MASK = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MANTISSA, _ONE = np.int64((1 << 52) - 1), np.int64(1023 << 52)
_EVEN0, _EVEN1, _EVEN2 = LOG_EVEN
_ODD0, _ODD1, _ODD2, _ODD3 = LOG_ODD
_TAYLOR = np.array(TAYLOR)
_LN2 = 0.6931471805599453
_SLACK = 1e-6  # far above the rounding errors of the noise
MOST_NOISE = 53 * _LN2 + _SLACK

DRAW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("choice", np.uint64),
        ("index", np.uint64),
    ]
)


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
def _words(pair: int, seed: np.uint64, choice: np.uint64, index: np.uint64) -> tuple[np.uint64, ...]:
    """Return Philox' four words for the ids 2 * pair and 2 * pair + 1, as `exact_math.philox4x32`."""
    c0, c1, c2, c3 = np.uint64(pair), index, choice, np.uint64(0)
    k0, k1 = seed & _MASK, seed >> _32
    for _ in range(ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _MASK, (p0 >> _32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@_kernel
def most_noise(high: np.uint64) -> float:
    """Return an upper bound of the noise -log(-log(u)) by the highest 32 bits of u.

    It is at most -log(1 - u), and 1 - u is at least 2^-(n+1) if u begins with n ones.
    """
    rest = _MASK - high
    if rest == 0:
        return MOST_NOISE
    ones = 31 - ((np.float64(rest).view(np.int64) >> 52) - 1023)
    return float((ones + 1) * _LN2 + _SLACK)


@_kernel
def _best_draw(
    logits: Logits,
    ids: Ids,
    first: int,
    temperature: float,
    seed: np.uint64,
    choice: np.uint64,
    index: np.uint64,
) -> tuple[int, float]:
    """Return the id with the largest score among `ids` (ascending; empty: all), and its score.

    The noise of an id is computed only if its bound does not rule the id out. `first` is drawn first: an id with a
    large logit rules out many.
    """
    words = _words(first >> 1, seed, choice, index)
    odd = (first & 1) == 1
    noise = _gumbel(words[3], words[2]) if odd else _gumbel(words[1], words[0])
    best, chosen = np.float64(logits[first]) + temperature * noise, first
    drawn = -1  # pair of ids whose words are known
    for place in range(ids.size or logits.size):
        i = ids[place] if ids.size else place
        logit = np.float64(logits[i])
        if logit + temperature * MOST_NOISE < best:
            continue
        if drawn != i >> 1:
            drawn = i >> 1
            words = _words(drawn, seed, choice, index)
        odd = (i & 1) == 1
        high, low = (words[3], words[2]) if odd else (words[1], words[0])
        if logit + temperature * most_noise(high) < best:
            continue
        score = logit + temperature * _gumbel(high, low)
        if score > best or (score == best and i < chosen):
            best, chosen = score, i
    return chosen, best


@_kernel
def _within(logits: Logits, ids: Ids, top: float, temperature: float, units: Ids, top_p: float) -> Ids:
    """Return the places in `ids` of the most likely ids that hold `top_p` of all `units`, and perhaps some more.

    No id that is left out is likelier than one that is returned. So only these have to be sorted.
    """
    wanted = top_p * np.float64(units.sum())
    reach = 4.0
    while True:
        near = np.zeros(ids.size, np.bool_)
        held = 0
        for i in range(ids.size):
            if top - np.float64(logits[ids[i]]) <= reach * temperature:
                near[i] = True
                held += units[i]
        if np.float64(held) >= wanted:
            return np.flatnonzero(near)
        reach *= 2.0


@_kernel
def _kept(logits: Logits, top: float, temperature: float, top_k: int, top_p: float, min_p: float, unit: float) -> Ids:
    """Return the ids that `sampling` keeps, ascending. With top-p, only the most likely ids are sorted."""
    ids = np.arange(logits.size)
    is_cut = 0 < top_k < logits.size
    if is_cut:
        ids = np.flatnonzero(logits >= np.partition(logits, logits.size - top_k)[logits.size - top_k])
    if min_p > 0:
        likely = np.zeros(ids.size, np.bool_)
        for i in range(ids.size):
            likely[i] = _exp((np.float64(logits[ids[i]]) - top) / temperature) >= min_p
        ids = ids[likely]
    if not is_cut and top_p >= 1:
        return ids
    units = np.ones(ids.size, np.int64)
    if top_p < 1:
        for i in range(ids.size):
            units[i] = np.int64(_exp((np.float64(logits[ids[i]]) - top) / temperature) * unit)
        ids, units = ids[units > 0], units[units > 0]
    total = units.sum()
    if not is_cut:
        near = _within(logits, ids, top, temperature, units, top_p)
        ids, units = ids[near], units[near]
    order = np.argsort(-logits[ids], kind="mergesort")  # stable: ties stay in order of id
    if is_cut and top_k < order.size:
        order = order[:top_k]
        total = units[order].sum()
    count, before = 0, 0
    for i in order:
        if top_p < 1 and before > 0 and np.float64(before) >= top_p * np.float64(total):
            break
        count += 1
        before += units[i]
    return np.sort(ids[order[:count]])


@_kernel
def choose_rows(logits: Logits, draws: npt.NDArray[np.void], unit: float, chosen: Ids, scores: Doubles) -> None:
    """Write the choice of each row of logits [B, V] and its score to chosen [B] and scores [B].

    `draws` [B] are of dtype DRAW; `unit`: see `sampling`. A row with NaN has the score NaN; of one with an infinity, or
    with nothing else than -inf, the score is infinite.
    """
    for row in range(len(logits)):
        own, how = logits[row], draws[row]
        first, top = 0, own[0]
        for i in range(own.size):
            if own[i] > top or np.isnan(own[i]):
                first, top = i, own[i]
        best = np.float64(top)
        chosen[row], scores[row] = first, best
        if how.temperature == 0 or not np.isfinite(best):
            continue
        ids = np.empty(0, np.int64)
        if how.top_k > 0 or how.top_p < 1 or how.min_p > 0:
            ids = _kept(own, best, how.temperature, how.top_k, how.top_p, how.min_p, unit)
        chosen[row], scores[row] = _best_draw(own, ids, first, how.temperature, how.seed, how.choice, how.index)

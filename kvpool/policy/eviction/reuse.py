"""Survival model of block reuse, learnt online. Independent of caches and tiers.

A use of a block is followed by another at the rate m(facts) * base(age, stratum): Cox's proportional hazards. m is a
product of one factor for each fact about the use (uses of the block, length of the prompt, pause before it, ...),
fitted by iterative proportional fitting. The base rate has Breslow's estimate, for each stratum of uses on its own: a
tool that returns within seconds and a user who returns within the hour differ in more than a factor. A stratum with few
events has a base rate of the shape of all. A sample of the latest uses is kept; those not yet followed by another are
censored observations. Every estimate starts with a prior that counts as a number of events, so that a new pool starts
with the usual behaviour of chats and shared prefixes: reused blocks are reused again, and users take minutes to answer.

The index of a block is the highest rate of uses per second that keeping it can give, from its current age up to any
later one (the Gittins index; LHD's hit density, with the optimal eviction time): max over T of P(used before T) /
E[time until used, at most T].

Sources: Cox, "Regression Models and Life-Tables", 1972; Gittins, "Bandit Processes and Dynamic Allocation Indices",
1979; Beckmann et al., "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.
"""

import functools
import math
from typing import Any, Final

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from jit.compiling import compiled_with_gil

_Floats = NDArray[np.float64]

# Levels of age: one up to a quarter of a second, then two per octave, up to six days.
_EDGES_S = np.concatenate([[0.0], 2.0 ** (-2 + np.arange(43) / 2)])
_WIDTHS_S = np.diff(_EDGES_S)
_NUM_LEVELS: Final = len(_WIDTHS_S)
# Ages at which the index is tabulated: four per octave.
_TABLED_S = np.concatenate([[0.0], 2.0 ** (-2 + np.arange(82) / 4)])
NUM_AGES: Final = len(_TABLED_S) - 1

LOG2: Final = math.log(2)

# Classes of m: four per octave, from 1/256 to 256.
STEPS: Final = 4
NUM_CLASSES: Final = 16 * STEPS + 1
_CLASS_RATIOS = 2.0 ** (np.arange(NUM_CLASSES) / STEPS - 8)

# The prior: users' pauses are log-normal with a median of two minutes; other uses are equally likely per octave of age.
_PAUSE_MEDIAN_S, _PAUSE_SIGMA = 120.0, 1.0
_PAUSED, _PER_OCTAVE = 0.5, 0.04
_PRIOR_EVENTS = 100.0  # of the base rate, over all ages
_PRIOR_STRATUM_EVENTS = 50.0  # of a stratum's base rate, with the shape of that of all strata
_PRIOR_FACTOR_EVENTS = 300.0  # of each factor
_PRIOR_PARTIAL_EVENTS = 5.0  # few: reuse of partial blocks differs between workloads, so it is learnt quickly

MAX_RECORDS: Final = 16384
MIN_STEP: Final = 8  # uses per recorded one, at least
NUM_COLUMNS: Final = 7  # most factors of a use
_SWEEPS = 2

# First factor of each group; at most one factor of a group applies to a use. Buckets of counts are bit lengths.
PARTIAL, HITS, TURN, PROMPT, NEW, PLACE, PAUSE, SHARED, NONE = 0, 2, 20, 30, 50, 70, 90, 110, 111
NUM_FACTORS: Final = NONE + 1

# Strata: first uses, uses of shared prefixes, and later turns by the pause before them (`stratum_of`).
NUM_STRATA: Final = 6

# Fields of a record. The gap until the next use is -1 if there was none yet.
R_ROW, R_BEGUN, R_GAP, R_VISIT, R_STRATUM, R_FACTS = 0, 1, 2, 3, 4, 5
RECORD_FIELDS: Final = R_FACTS + NUM_COLUMNS


def place_of_ages(ages_s: _Floats) -> NDArray[np.int64]:
    """Return the places of ages in the table of the index, int64 [n]; `index_of` does the same for one age."""
    places = (np.log2(np.maximum(ages_s, 0.25)) + 2) * 4 + 0.5
    result: NDArray[np.int64] = np.where(ages_s < 0.25, 0, np.minimum(places.astype(np.int64) + 1, NUM_AGES - 1))
    return result


def _prior_factors() -> _Floats:
    """Return the logarithms of the prior factors, float64 [factors]."""
    prior = np.zeros(NUM_FACTORS)
    prior[PARTIAL] = -2.0
    prior[HITS : HITS + 10] = (0.0, 0.0, 0.1, 0.4, 0.9, 1.2, 3.0, 5.0, 5.0, 5.0)
    prior[HITS + 10 : HITS + 12] = -0.8
    prior[TURN : TURN + 8] = (-0.2, 0.3, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6)
    prior[NEW : NEW + 10] = (0.0, 0.0, 0.0, 0.0, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5)
    prior[PLACE : PLACE + 10] = prior[PLACE + 10 : PLACE + 20] = 0.4 - 0.1 * np.arange(10)
    prior[PAUSE : PAUSE + 16] = (0.2,) * 8 + (-0.2,) * 3 + (-0.5,) * 5
    return prior


def _prior_events() -> _Floats:
    """Return the prior number of events per level of age for m = 1, float64 [levels]."""
    middles = np.sqrt(np.maximum(_EDGES_S[:-1], _EDGES_S[1] / 4) * _EDGES_S[1:])
    off = np.log(middles / _PAUSE_MEDIAN_S) / _PAUSE_SIGMA
    octaves = 0.5
    pause = _PAUSED * math.log(2) / (_PAUSE_SIGMA * math.sqrt(2 * math.pi)) * np.exp(-off * off / 2)
    events: _Floats = octaves * (_PER_OCTAVE + pause)
    return events


class ReuseModel:
    """Estimate of how likely and how soon a block with given facts is reused.

    `factors` float64 [factors] and `index` float64 [strata * classes * ages], which the caller provides, are written at
    the start and by `fit`.
    """

    def __init__(self, factors: _Floats, index: _Floats) -> None:
        self._factors = factors
        self._index = index.reshape(NUM_STRATA, NUM_CLASSES, NUM_AGES)
        self._prior_factors = _prior_factors()
        self._prior_weights = np.full(NUM_FACTORS, _PRIOR_FACTOR_EVENTS)
        self._prior_weights[PARTIAL] = _PRIOR_PARTIAL_EVENTS
        prior_events = _prior_events()
        scale = _PRIOR_EVENTS / prior_events.sum()
        self._prior_events = prior_events * scale
        self._prior_seconds = _WIDTHS_S * scale
        factors[:] = self._prior_factors
        self._fit, self._tabulate = _kernels()
        self._rates = np.tile(self._prior_events / self._prior_seconds, (NUM_STRATA, 1))
        self._tabulate(self._rates, self._index)

    def fit(self, records: NDArray[np.int64], now_ns: int) -> None:
        """Fit the model to records of uses, int64 [n, RECORD_FIELDS]. Takes some milliseconds."""
        prior = self._prior_factors, self._prior_weights, self._prior_events, self._prior_seconds
        self._fit(records, now_ns, *prior, self._factors, self._rates)
        self._tabulate(self._rates, self._index)


@numba.njit
def _ratio(log_ratio: Any) -> Any:
    """Return m, bounded."""
    return math.exp(min(max(log_ratio, -6.0), 6.0))


def _fit_rates(
    records: Any,
    now_ns: Any,
    prior_factors: Any,
    prior_weights: Any,
    prior_events: Any,
    prior_seconds: Any,
    log_factors: Any,
    rates: Any,
) -> None:
    """Fit the factors and the base rates per stratum and level to the records."""
    count = len(records)
    ages, levels = np.empty(count), np.empty(count, np.int64)
    events = np.zeros((NUM_STRATA, _NUM_LEVELS))
    for i in range(count):
        gap = records[i, R_GAP]
        ages[i] = (gap if gap >= 0 else now_ns - records[i, R_BEGUN]) * 1e-9
        levels[i] = min(max(np.searchsorted(_EDGES_S, ages[i], side="right") - 1, 0), _NUM_LEVELS - 1)
        if gap >= 0:
            events[records[i, R_STRATUM], levels[i]] += 1
    lived, expected = np.zeros((NUM_STRATA, _NUM_LEVELS)), np.empty(count)
    passed = np.zeros((NUM_STRATA, _NUM_LEVELS + 1))  # base events expected before each level
    base, weights = np.empty(_NUM_LEVELS), np.empty(_NUM_LEVELS)
    seen_events, seen_expected = np.empty(NUM_FACTORS), np.empty(NUM_FACTORS)
    log_ratios, changes = np.zeros(count), np.empty(NUM_FACTORS)
    for i in range(count):
        for j in range(NUM_COLUMNS):
            log_ratios[i] += log_factors[records[i, R_FACTS + j]]
    for _ in range(_SWEEPS):
        lived[:] = 0
        passed[:] = 0
        for i in range(count):
            stratum, level, m = records[i, R_STRATUM], levels[i], _ratio(log_ratios[i])
            lived[stratum, level] += m * min(ages[i] - _EDGES_S[level], _WIDTHS_S[level])
            passed[stratum, level] += m  # here: lived through all levels before this one
        for stratum in range(NUM_STRATA):
            through = 0.0
            for level in range(_NUM_LEVELS - 1, -1, -1):
                lived[stratum, level] += through * _WIDTHS_S[level]
                through += passed[stratum, level]
        total = 0.0
        for level in range(_NUM_LEVELS):
            weights[level] = prior_seconds[level] + lived[:, level].sum()
            base[level] = (events[:, level].sum() + prior_events[level]) / weights[level]
            total += base[level] * weights[level]
        for stratum in range(NUM_STRATA):
            passed[stratum, 0] = 0
            for level in range(_NUM_LEVELS):
                prior_s = weights[level] * _PRIOR_STRATUM_EVENTS / total
                rate = (events[stratum, level] + base[level] * prior_s) / (lived[stratum, level] + prior_s)
                rates[stratum, level] = rate
                passed[stratum, level + 1] = passed[stratum, level] + rate * _WIDTHS_S[level]
        for i in range(count):
            stratum, level = records[i, R_STRATUM], levels[i]
            within = min(ages[i] - _EDGES_S[level], _WIDTHS_S[level])
            expected[i] = passed[stratum, level] + rates[stratum, level] * within
        for j in range(NUM_COLUMNS):
            seen_events[:] = 0
            seen_expected[:] = 0
            for i in range(count):
                factor = records[i, R_FACTS + j]
                if factor != NONE:
                    seen_events[factor] += records[i, R_GAP] >= 0
                    seen_expected[factor] += _ratio(log_ratios[i]) * expected[i]
            changes[:] = 0
            for factor in range(NONE):
                if seen_expected[factor] > 0:
                    weight = prior_weights[factor]
                    prior_expects = weight * math.exp(log_factors[factor] - prior_factors[factor])
                    expects = seen_expected[factor] + prior_expects
                    changes[factor] = math.log((seen_events[factor] + weight) / expects)
                    log_factors[factor] += changes[factor]
            for i in range(count):
                log_ratios[i] += changes[records[i, R_FACTS + j]]


def _tabulate_index(rates: Any, index: Any) -> None:
    """Tabulate the index by stratum, class and age for the base `rates` per stratum and level."""
    num = NUM_AGES + 1
    hazard, lives, kept_s = np.empty(num), np.empty(num), np.zeros(num)
    for stratum in range(NUM_STRATA):
        level, before = 0, 0.0  # base events expected before the level
        for age in range(num):
            while level < _NUM_LEVELS - 1 and _TABLED_S[age] >= _EDGES_S[level + 1]:
                before += rates[stratum, level] * _WIDTHS_S[level]
                level += 1
            within = min(_TABLED_S[age] - _EDGES_S[level], _WIDTHS_S[level])
            hazard[age] = before + rates[stratum, level] * within
        for c in range(NUM_CLASSES):
            for age in range(num):
                lives[age] = math.exp(-_CLASS_RATIOS[c] * hazard[age])
                if age:
                    step = (lives[age] + lives[age - 1]) / 2 * (_TABLED_S[age] - _TABLED_S[age - 1])
                    kept_s[age] = kept_s[age - 1] + step
            for age in range(NUM_AGES):
                best = 0.0
                for end in range(age + 1, num):
                    best = max(best, (lives[age] - lives[end]) / max(kept_s[end] - kept_s[age], 1e-12))
                index[stratum, c, age] = best


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Return (fit, tabulate), compiled or loaded from the cache at the first call."""
    records, floats = types.Array(types.int64, 2, "C"), types.Array(types.float64, 1, "C")
    rates, index = types.Array(types.float64, 2, "C"), types.Array(types.float64, 3, "C")
    fit = compiled_with_gil(_fit_rates, types.void(records, types.int64, *(floats,) * 5, rates))
    return fit, compiled_with_gil(_tabulate_index, types.void(rates, index))

"""Survival model of block reuse, learnt online. Independent of queues and tiers.

A use of a block is followed by another at the rate m(facts) * base(age). `base` is shared; m is a product of one factor
for each fact about the use (uses of the block, length of the prompt, pause before it, ...): Cox's proportional hazards,
with Breslow's estimate of the base rate and factors by iterative proportional fitting. A sample of the latest uses is
kept; those not yet followed by another are censored observations. Every estimate starts with a prior that counts as a
number of events, so that a new pool starts with the usual behaviour of chats and shared prefixes: reused blocks are
reused again, and users take minutes to answer.

The index of a block is the highest rate of uses per second that keeping it can give, from its current age up to any
later one (the Gittins index; LHD's hit density, with the optimal eviction time): max over T of P(used before T) /
E[time until used, at most T].

Sources: Cox, "Regression Models and Life-Tables", 1972; Gittins, "Bandit Processes and Dynamic Allocation Indices",
1979; Beckmann et al., "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

# Levels of age: one up to a quarter of a second, then two per octave, up to two hours.
_EDGES_S = np.concatenate([[0.0], 2.0 ** (-2 + np.arange(31) / 2)])
_WIDTHS_S = np.diff(_EDGES_S)
# Ages at which the index is tabulated: four per octave.
_TABLED_S = np.concatenate([[0.0], 2.0 ** (-2 + np.arange(60) / 4)])
_LAST_TABLED = len(_TABLED_S) - 2

_LOG2 = math.log(2)

# Classes of m: four per octave, from 1/256 to 256.
_STEPS = 4
NUM_CLASSES = 16 * _STEPS + 1
_CLASS_RATIOS = 2.0 ** (np.arange(NUM_CLASSES) / _STEPS - 8)

# The prior: users' pauses are log-normal with a median of two minutes; other uses are equally likely per octave of age.
_PAUSE_MEDIAN_S, _PAUSE_SIGMA = 120.0, 1.0
_PAUSED, _PER_OCTAVE = 0.5, 0.04
_PRIOR_EVENTS = 100.0  # of the base rate, over all ages
_PRIOR_FACTOR_EVENTS = 300.0  # of each factor
_PRIOR_PARTIAL_EVENTS = 5.0  # few: reuse of partial blocks differs between workloads, so it is learnt quickly

_MAX_RECORDS = 8192
_MIN_STEP = 8  # uses per recorded one, at least
_NUM_COLUMNS = 7
_SWEEPS = 2

# First factor of each group; at most one factor of a group applies to a use. Buckets of counts are bit lengths.
_PARTIAL, _HITS, _TURN, _PROMPT, _NEW, _PLACE, _PAUSE, _SHARED, _NONE = 0, 2, 20, 30, 50, 70, 90, 110, 111


@dataclass(slots=True, eq=False)
class Visit:
    """One request's use of the blocks of its prompt."""

    now_ns: int
    request_blocks: int  # blocks of the whole prompt (and answer)
    known_blocks: int = 0  # leading blocks that had been stored before
    reached_blocks: int = 0  # leading blocks found or stored so far
    turn: int = 0  # earlier requests of the same conversation, as far as known
    pause_s: float = 0.0  # time since the previous request of the conversation


def _bits(number: int, most: int) -> int:
    return min(max(number, 0).bit_length(), most)


def _facts(visit: Visit, hits: int, depth: int, partial: bool) -> tuple[int, ...]:
    """Return the factors that apply to a use of the block at `depth`, its `hits`-th use after the first."""
    if partial:
        return (_PARTIAL,)
    later = visit.turn > 0
    if not hits and not later:  # most blocks when they are stored
        prompt, place = _bits(visit.request_blocks, 11), _bits(depth - visit.known_blocks, 9)
        return _HITS + 10, _TURN, _PROMPT + prompt, _PLACE + place
    facts = [
        _HITS + _bits(hits, 9) if hits else _HITS + 10 + later,
        _TURN + _bits(visit.turn, 7),
        _PROMPT + _bits(visit.request_blocks, 11),
    ]
    if not hits:
        facts.append(_PLACE + 10 * later + _bits(depth - visit.known_blocks, 9))
    if later:
        facts.append(_NEW + _bits(visit.request_blocks - visit.known_blocks, 9))
        facts.append(_PAUSE + min(max(int(math.log2(visit.pause_s + 0.01)) + 3, 0), 15))
    if hits > visit.turn:
        facts.append(_SHARED)
    return tuple(facts)


def _prior_factors() -> _Floats:
    """Return the logarithms of the prior factors, float64 [factors]."""
    prior = np.zeros(_NONE + 1)
    prior[_PARTIAL] = -2.0
    prior[_HITS : _HITS + 10] = (0.0, 0.0, 0.1, 0.4, 0.9, 1.2, 3.0, 5.0, 5.0, 5.0)
    prior[_HITS + 10 : _HITS + 12] = -0.8
    prior[_TURN : _TURN + 8] = (-0.2, 0.3, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6)
    prior[_NEW : _NEW + 10] = (0.0, 0.0, 0.0, 0.0, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5)
    prior[_PLACE : _PLACE + 10] = prior[_PLACE + 10 : _PLACE + 20] = 0.4 - 0.1 * np.arange(10)
    prior[_PAUSE : _PAUSE + 16] = (0.2,) * 8 + (-0.2,) * 3 + (-0.5,) * 5
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
    """Estimate of how likely and how soon a block with given facts is reused, learnt from every use."""

    def __init__(self) -> None:
        self._prior_factors = _prior_factors()
        self._prior_weights = np.full(_NONE + 1, _PRIOR_FACTOR_EVENTS)
        self._prior_weights[_PARTIAL] = _PRIOR_PARTIAL_EVENTS
        prior_events = _prior_events()
        scale = _PRIOR_EVENTS / prior_events.sum()
        self._prior_events = prior_events * scale
        self._prior_seconds = _WIDTHS_S * scale
        self._log_factors = self._prior_factors.copy()
        self._factors: list[float] = self._log_factors.tolist()
        # Ring of recorded uses. `seconds` is the time until the next use of the same block, -1 if there was none yet.
        self._begun_ns = np.zeros(_MAX_RECORDS, np.int64)
        self._seconds = np.full(_MAX_RECORDS, -1.0)
        self._columns = np.full((_MAX_RECORDS, _NUM_COLUMNS), _NONE, np.intp)
        self._keys: list[object] = [None] * _MAX_RECORDS
        self._open: dict[object, int] = {}  # by key: records without a next use
        self._unread: list[tuple[int, Visit, int, int, bool]] = []  # read by `learn`: visits change while in progress
        self._num_records = self._num_fitted = self._num_skipped = 0
        self._tabulate(self._prior_events / self._prior_seconds)

    def classify(self, visit: Visit, hits: int, depth: int, partial: bool) -> int:
        """Return the class of m of a block's use, 0..NUM_CLASSES - 1; among blocks of equal age, higher is better."""
        log_ratio = sum(map(self._factors.__getitem__, _facts(visit, hits, depth, partial)))
        return min(max(round((log_ratio / _LOG2 + 8) * _STEPS), 0), NUM_CLASSES - 1)

    def uses_per_second(self, reuse_class: int, age_ns: int) -> float:
        """Return the index (highest rate of uses per second) of a block of this class, `age_ns` after its last use."""
        age_s = age_ns * 1e-9
        if age_s < 0.25:
            return self._table[reuse_class][0]
        place = int((math.log2(age_s) + 2) * 4 + 0.5) + 1
        return self._table[reuse_class][min(place, _LAST_TABLED)]

    def used(self, key: object, visit: Visit, hits: int, depth: int, partial: bool, resident_blocks: int) -> None:
        """Record a use of a block, and the interval since the last recorded use of the same key.

        Only a sample of the uses is recorded; it spans more time the more `resident_blocks` the pool has.
        """
        record = self._open.pop(key, None)
        if record is not None:
            self._seconds[record] = max((visit.now_ns - int(self._begun_ns[record])) * 1e-9, 1e-3)
        self._num_skipped += 1
        # The ring must span the uses of several times the blocks in the pool.
        if self._num_skipped < max(_MIN_STEP, 4 * resident_blocks // _MAX_RECORDS):
            return
        self._num_skipped = 0
        record = self._num_records % _MAX_RECORDS
        if self._open.get(self._keys[record]) == record:
            del self._open[self._keys[record]]
        self._num_records += 1
        self._keys[record] = key
        self._open[key] = record
        self._begun_ns[record] = visit.now_ns
        self._seconds[record] = -1.0
        self._unread.append((record, visit, hits, depth, partial))

    def learn(self, now_ns: int) -> bool:
        """Refit if there are enough new records. Returns True if it did. Takes milliseconds, at growing intervals."""
        if self._num_records - self._num_fitted < max(64, min(1024, self._num_fitted // 6)):
            return False
        self._num_fitted = self._num_records
        for record, visit, hits, depth, partial in self._unread:
            facts = _facts(visit, hits, depth, partial)
            self._columns[record] = _NONE
            self._columns[record, : len(facts)] = facts
        self._unread.clear()
        self._tabulate(self._fit(now_ns, min(self._num_records, _MAX_RECORDS)))
        return True

    def _fit(self, now_ns: int, count: int) -> _Floats:
        """Fit the factors to the first `count` records of the ring. Returns the base rate per level, float64."""
        columns, seconds = self._columns[:count], self._seconds[:count]
        again = seconds >= 0
        ages = np.where(again, seconds, (now_ns - self._begun_ns[:count]) * 1e-9)
        levels = np.minimum(np.searchsorted(_EDGES_S, ages, side="right") - 1, len(_WIDTHS_S) - 1)
        events = np.bincount(levels[again], minlength=len(_WIDTHS_S)) + self._prior_events
        lived_s = np.clip(ages[:, None] - _EDGES_S[None, :-1], 0, _WIDTHS_S[None])
        factors = self._log_factors
        rates: _Floats = events
        for _ in range(_SWEEPS):
            rates = events / (_ratios(factors, columns) @ lived_s + self._prior_seconds)
            expected = lived_s @ rates
            for column in columns.T:
                self._fit_column(column, again, _ratios(factors, columns) * expected)
        self._factors = factors.tolist()
        return rates

    def _fit_column(self, column: NDArray[np.intp], again: NDArray[np.bool_], expected: _Floats) -> None:
        seen = np.unique(column)
        seen = seen[seen != _NONE]
        events = np.bincount(column, weights=again, minlength=_NONE + 1)[seen]
        expected_events = np.bincount(column, weights=expected, minlength=_NONE + 1)[seen]
        weights, factors = self._prior_weights[seen], self._log_factors[seen]
        prior_expects = weights * np.exp(factors - self._prior_factors[seen])
        self._log_factors[seen] += np.log((events + weights) / (expected_events + prior_expects))

    def _tabulate(self, rates: _Floats) -> None:
        """Tabulate the index by class and age for base `rates` per level."""
        at_edges = np.concatenate([[0.0], np.cumsum(rates * _WIDTHS_S)])
        lives = np.exp(-_CLASS_RATIOS[:, None] * np.interp(_TABLED_S, _EDGES_S, at_edges)[None])
        steps = (lives[:, 1:] + lives[:, :-1]) / 2 * np.diff(_TABLED_S)
        kept_s = np.concatenate([np.zeros((NUM_CLASSES, 1)), np.cumsum(steps, axis=1)], axis=1)
        best = np.zeros((NUM_CLASSES, len(_TABLED_S) - 1))
        for age in range(len(_TABLED_S) - 1):
            used = lives[:, age, None] - lives[:, age + 1 :]
            best[:, age] = (used / np.maximum(kept_s[:, age + 1 :] - kept_s[:, age, None], 1e-12)).max(axis=1)
        self._table: list[list[float]] = best.tolist()


def _ratios(log_factors: _Floats, columns: NDArray[np.intp]) -> _Floats:
    """Return m of each record, float64 [n]; `columns` [n, factors of a use] are indices of factors."""
    ratios: _Floats = np.exp(np.clip(log_factors[columns].sum(axis=1), -6, 6))
    return ratios

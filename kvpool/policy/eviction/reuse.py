"""Survival model of block reuse, learnt online. No blocks, queues or tiers here.

A use of a block is followed by another at the rate m(facts) * base(age). `base` is shared; m is a product of one factor
for each fact about the use (uses of the block, length of the prompt, pause before it, ...): Cox's proportional hazards,
with Breslow's estimate of the base rate and factors by iterative proportional fitting. A sample of the latest uses is
kept; those not yet followed by another are censored observations. Every estimate starts with a prior worth some events,
so that a young pool follows what is usual for chats and prefixes: reused blocks are reused again, and people take
minutes to answer.

The value of a byte of memory is the highest rate of uses per second that keeping the block can give, from its age now
up to any later one (the Gittins index; LHD's hit density, with the optimal eviction time): max over T of P(used before
T) / E[time until used, or T].

Sources: Cox, "Regression Models and Life-Tables", 1972; Gittins, "Bandit Processes and Dynamic Allocation Indices",
1979; Beckmann et al., "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

# Ages: one level up to a quarter of a second, then two an octave, up to two hours.
_EDGES_S = np.concatenate([[0.0], 2.0 ** (-2 + np.arange(31) / 2)])
_WIDTHS_S = np.diff(_EDGES_S)
# Where the index is tabled: four an octave.
_TABLED_S = np.concatenate([[0.0], 2.0 ** (-2 + np.arange(60) / 4)])
_LAST_TABLED = len(_TABLED_S) - 2

_LOG2 = math.log(2)

# Classes of m: four an octave, from 1/256 to 256.
_STEPS = 4
NUM_CLASSES = 16 * _STEPS + 1
_CLASS_RATIOS = 2.0 ** (np.arange(NUM_CLASSES) / _STEPS - 8)

# The prior: a person's pause is about log-normal, some minutes; other uses are as likely in every octave of age.
_PAUSE_MEDIAN_S, _PAUSE_SIGMA = 120.0, 1.0
_PAUSED, _PER_OCTAVE = 0.5, 0.04
_PRIOR_EVENTS = 100.0  # of the base rate, over all ages
_PRIOR_FACTOR_EVENTS = 300.0  # of each factor
_PRIOR_PARTIAL_EVENTS = 5.0  # whether partial blocks are found again depends on who asks: learnt at once

_MAX_RECORDS = 8192
_MIN_STEP = 8  # uses per remembered one
_NUM_COLUMNS = 7
_SWEEPS = 2

# The factors, one of each group for a use; log2 buckets are bit lengths.
_PARTIAL, _HITS, _TURN, _PROMPT, _NEW, _PLACE, _PAUSE, _SHARED, _NONE = 0, 2, 20, 30, 50, 70, 90, 110, 111


@dataclass(slots=True, eq=False)
class Visit:
    """One request's way along its blocks."""

    now_ns: int
    request_blocks: int
    known_blocks: int = 0  # leading ones that had been there before
    reached_blocks: int = 0  # those found and stored so far
    turn: int = 0  # requests before it in the same conversation, as far as known
    pause_s: float = 0.0  # since the one before


def _bits(number: int, most: int) -> int:
    return min(max(number, 0).bit_length(), most)


def _facts(visit: Visit, hits: int, depth: int, partial: bool) -> tuple[int, ...]:
    """The factors that apply to a use of the block at `depth`, its `hits`-th after the first."""
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
    """Logarithms, in the order of the groups above."""
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
    """Events per level of age for m = 1."""
    middles = np.sqrt(np.maximum(_EDGES_S[:-1], _EDGES_S[1] / 4) * _EDGES_S[1:])
    off = np.log(middles / _PAUSE_MEDIAN_S) / _PAUSE_SIGMA
    octaves = 0.5
    pause = _PAUSED * math.log(2) / (_PAUSE_SIGMA * math.sqrt(2 * math.pi)) * np.exp(-off * off / 2)
    events: _Floats = octaves * (_PER_OCTAVE + pause)
    return events


class ReuseModel:
    """Learns from every use; estimates how likely and how soon a block with given facts is reused."""

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
        # A ring of uses. `seconds` until the next one of the same block, -1 while there was none.
        self._begun_ns = np.zeros(_MAX_RECORDS, np.int64)
        self._seconds = np.full(_MAX_RECORDS, -1.0)
        self._columns = np.full((_MAX_RECORDS, _NUM_COLUMNS), _NONE, np.intp)
        self._keys: list[object] = [None] * _MAX_RECORDS
        self._open: dict[object, int] = {}  # by key: records without a next use
        self._unread: list[tuple[int, Visit, int, int, bool]] = []  # their facts are complete when the request is over
        self._num_records = self._num_fitted = self._num_skipped = 0
        self._tabulate(self._prior_events / self._prior_seconds)

    def classify(self, visit: Visit, hits: int, depth: int, partial: bool) -> int:
        """The class of m of a block's use, one of NUM_CLASSES; it orders blocks of one age."""
        log_ratio = sum(map(self._factors.__getitem__, _facts(visit, hits, depth, partial)))
        return min(max(round((log_ratio / _LOG2 + 8) * _STEPS), 0), NUM_CLASSES - 1)

    def uses_per_second(self, reuse_class: int, age_ns: int) -> float:
        """The most uses per second of keeping it that a block of this class gives, `age_ns` after its last use."""
        age_s = age_ns * 1e-9
        if age_s < 0.25:
            return self._table[reuse_class][0]
        place = int((math.log2(age_s) + 2) * 4 + 0.5) + 1
        return self._table[reuse_class][min(place, _LAST_TABLED)]

    def used(self, key: object, visit: Visit, hits: int, depth: int, partial: bool, resident_blocks: int) -> None:
        """A use of a block; the next one of the same key says how long it took."""
        record = self._open.pop(key, None)
        if record is not None:
            self._seconds[record] = max((visit.now_ns - int(self._begun_ns[record])) * 1e-9, 1e-3)
        self._num_skipped += 1
        # What is remembered reaches back over several times what the pool holds.
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
        """Refit if enough was observed since the last fit; return True if so. Takes milliseconds, ever more rarely."""
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
        """New factors from the first `count` records of the ring. The base rate by level."""
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
        """The index by class and age."""
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
    """m of each record."""
    ratios: _Floats = np.exp(np.clip(log_factors[columns].sum(axis=1), -6, 6))
    return ratios

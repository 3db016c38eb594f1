"""How much slower each node is than its model's costs say: one factor per node for prefill, one for decode.

A factor is relative to the model's other nodes: what all of them do is the model's cost (`recentre`). So a node that
slows down gets a factor, and the costs that all share are not spoiled by it.

What work costs: prefill(new, reused), decode step(batch, context), transfer(bytes). Per model, learned as it runs.

The built-in guesses describe a small model on a CPU or a large one on a GPU about equally badly; one sample sets their
scale. A measured profile (`events.CostsGiven`) takes their place. How far beyond what was measured a prediction lies is
known, and lengthens it (`cost_formulas.margin`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conductor.policy.events import CostsGiven, DecodeSample, PathCosts, PrefillSample, TransferSample
from conductor.policy.fitting import LONGEST_S, CostFit, OutlierFilter
from conductor.policy.requests import NONE
from worker.policy.cost_formulas import fetch_s, margin, prefill_s, read_s, tbt_s

__all__ = [
    "DECODE",
    "PREFILL",
    "MeanDuration",
    "ModelCosts",
    "NodeSlowdowns",
    "TransferCosts",
    "fetch_s",
    "prefill_s",
    "read_s",
    "tbt_s",
]

PREFILL: Final = 0  # rows of `factors`
DECODE: Final = 1

_STREAKS: Final = (10, 20)  # measurements that make a change: decode steps come by the dozen per second
_DRIFT: Final = 0.05  # of a usual error, by which a factor follows it
_DEAD: Final = log(1.1)  # nodes within 10 % of each other count as equal: noise must not choose between them
_MOST: Final = log(16.0)  # nobody is believed to be further off, so that a liar draws or drives away no more than that
_LEAST_SHIFT: Final = 0.02
_ENOUGH: Final = 8  # measurements before a node says something about the others


class NodeSlowdowns:
    """By slot of the node. The factors are one array that compiled loops read."""

    def __init__(self) -> None:
        self.factors: NDArray[np.float64] = np.ones((2, 0))  # times the model's cost, by PREFILL and DECODE
        self._levels: NDArray[np.float64] = np.zeros((2, 0))  # their logarithms, as they are learned
        self._nums: NDArray[np.int64] = np.zeros((2, 0), np.int64)
        self._watches: dict[tuple[int, int], OutlierFilter] = {}

    def make_room(self, num_slots: int) -> None:
        """For nodes with slots below `num_slots`; new ones are as quick as the others."""
        missing = num_slots - self._nums.shape[1]
        if missing > 0:
            self.factors = np.concatenate([self.factors, np.ones((2, missing))], axis=1)
            self._levels = np.concatenate([self._levels, np.zeros((2, missing))], axis=1)
            self._nums = np.concatenate([self._nums, np.zeros((2, missing), np.int64)], axis=1)

    def forget(self, slot: int) -> None:
        """The node has left; its slot may be given to another one."""
        if 0 <= slot < self._nums.shape[1]:
            self.factors[:, slot], self._levels[:, slot], self._nums[:, slot] = 1.0, 0.0, 0
            for kind in (PREFILL, DECODE):
                self._watches.pop((kind, slot), None)

    def of(self, kind: int, slot: int) -> float:
        """The node's factor; 1 without a node."""
        return float(self.factors[kind, slot]) if slot != NONE else 1.0

    def note(self, kind: int, slot: int, log_error: float) -> tuple[float | None, bool]:
        """The node's work took exp(`log_error`) times what its model's costs say.

        Returns the same with the node's own part taken out and outliers clipped, which the costs may learn from (None:
        they may not), and whether it was one.
        """
        watch = self._watches.get((kind, slot))
        if watch is None:
            watch = self._watches[kind, slot] = OutlierFilter(_STREAKS[kind])
        level = float(self._levels[kind, slot])
        before = watch.num_outliers
        usual, change = watch.note(log_error - level)
        self._nums[kind, slot] += 1
        self._set(kind, slot, level + change + _DRIFT * (usual or 0.0))
        is_believed = abs(self._levels[kind, slot]) < _MOST
        return usual if is_believed else None, watch.num_outliers > before

    def recentre(self, kind: int, slots: NDArray[np.int64]) -> float:
        """Make the quicker half's slowest of a model's nodes the measure; returns the logarithm of what the model's
        cost is to be multiplied by. Of two nodes that differ the quicker one is the measure, and a lone one is it."""
        known = slots[self._nums[kind, slots] >= _ENOUGH]
        if not len(known):
            return 0.0
        middle = (len(known) - 1) // 2
        shift = float(np.partition(self._levels[kind, known], middle)[middle])
        if abs(shift) < _LEAST_SHIFT:
            return 0.0
        levels = np.clip(self._levels[kind, known] - shift, -_MOST, _MOST)
        self._levels[kind, known] = levels
        self.factors[kind, known] = np.where(np.abs(levels) < _DEAD, 1.0, np.exp(levels))
        return shift

    def _set(self, kind: int, slot: int, level: float) -> None:
        level = min(max(level, -_MOST), _MOST)
        self._levels[kind, slot] = level
        self.factors[kind, slot] = 1.0 if abs(level) < _DEAD else exp(level)


_PREFILL_GUESS = (5e-3, 2e-4, 1e-8)  # per request, per new token, per (new token, token attended to)
_DECODE_GUESS = (5e-3, 5e-4, 1e-7)  # per step, per sequence, per token of context
_TRANSFER_GUESS = (5e-4, 1e-9)  # per batch, per byte
_LOAD_GUESS = (1e-4, 2e-10)  # likewise, within a host
_SSD_GUESS = (1e-3, 2e-9)
_FETCHES = ("fetch", "pull", "copy")  # the paths that read from a pool node, most of them over the network
_MEMORY = 0.95
_LEAST_SHARE = 0.001  # of the largest work of a profile, that a coefficient which was found to be 0 stands for
_LEAST_S, _MOST_S = 1e-9, LONGEST_S / 2  # that a profile can speak of
_STREAK = 10
_MOST_TOKENS, _MOST_BATCH, _MOST_CONTEXT, _MOST_NBYTES = 2.0**21, 2.0**13, 2.0**27, 2.0**42
"""Work that somebody may ask for. A profile's range may go beyond that: no fit holds what is meant by it."""


class MeanDuration:
    """A running mean; None before the first value."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.mean_s: float | None = None

    def add(self, seconds: float) -> None:
        """Learn from one measurement that can be true."""
        if not 0 <= seconds < LONGEST_S:
            return
        self.num_samples += 1
        memory = min(_MEMORY, 1 - 1 / self.num_samples)
        self.mean_s = seconds if self.mean_s is None else memory * self.mean_s + (1 - memory) * seconds


@dataclass(frozen=True, slots=True)
class CostTerms:
    """A model's costs as numbers: the coefficients of `prefill_s` and `tbt_s`, and seconds of a usual step."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    decode_terms: tuple[float, ...]  # with `ModelCosts.decode_most`, for compiled loops
    step_s: float


class ModelCosts:
    """One model's compute costs, those of a usual node of it; `slowdowns` says how far each one is from that."""

    def __init__(self, slowdowns: NodeSlowdowns | None = None) -> None:
        self.slowdowns = slowdowns if slowdowns is not None else NodeSlowdowns()
        self.given = ""  # name of the profile that was given
        self.decode_time = MeanDuration()  # t_d: how long a request decodes
        self._fits = (_Fit(_PREFILL_GUESS, 10), _Fit(_DECODE_GUESS, 20))
        self._step = MeanDuration()
        self._terms: CostTerms | None = None  # as asked for since they changed last
        self.prefill_most = (0.0, 0.0)  # most new tokens, and most tokens of a prompt, that were measured
        self.decode_most = (0.0, 0.0)  # largest batch, and most context in a step

    def give(self, given: CostsGiven) -> None:
        """Begin anew with a measured profile."""
        self.given = given.name
        self._terms = None
        self.prefill_most = given.new_tokens, given.prompt_tokens
        self.decode_most = given.batch, given.context_tokens
        new, prompt = min(given.new_tokens, _MOST_TOKENS), min(given.prompt_tokens, _MOST_TOKENS)
        batch, context = min(given.batch, _MOST_BATCH), min(given.context_tokens, _MOST_CONTEXT)
        prompts = ((1.0, 0.0), (new, 0.0), (1.0, prompt - 1.0), (new, max(0.0, prompt - new)))
        steps = ((1.0, 0.0), (batch, batch), (1.0, context), (batch, context))
        self._fits = (
            _Fit.around(given.prefill, [_prefill_features(*point) for point in prompts], 10),
            _Fit.around(given.decode, [(1.0, *point) for point in steps], 20),
        )

    def add_prefill(self, sample: PrefillSample, slot: int = NONE) -> None:
        """Learn from a prefill of a node, or of nobody in particular."""
        new, prompt = sample.new_tokens, sample.new_tokens + sample.reused_tokens
        features = _prefill_features(new, sample.reused_tokens)
        self._terms = None
        if new > 0 and self._learn(PREFILL, features, sample.seconds, slot) is not None:
            self.prefill_most = max(self.prefill_most[0], new), max(self.prefill_most[1], prompt)

    def add_decode(self, sample: DecodeSample, slot: int = NONE) -> None:
        """Likewise from a decode step."""
        if sample.batch <= 0:
            return
        self._terms = None
        learned_s = self._learn(DECODE, (1.0, sample.batch, sample.context_tokens), sample.seconds, slot)
        if learned_s is not None:
            self._step.add(learned_s)
            batch, context = self.decode_most
            self.decode_most = max(batch, sample.batch), max(context, sample.context_tokens)

    def recentre(self, kind: int, slots: NDArray[np.int64]) -> None:
        """Move the common part of the slowdowns of the model's nodes (`slots`) into the model's cost."""
        if shift := self.slowdowns.recentre(kind, slots):
            self._terms = None
            self._fits[kind].fit.rescale(shift)

    @property
    def terms(self) -> "CostTerms":
        """Terms of the current predictions."""
        if self._terms is None:
            prefill, decode = self._fits[PREFILL].fit, self._fits[DECODE].fit
            step_s = self._step.mean_s if self._step.mean_s is not None else decode.predict((1.0, 1.0, 0.0))
            of_prefill: Any = prefill.coefficients
            of_decode: Any = decode.coefficients
            self._terms = CostTerms(of_prefill, of_decode, (*of_decode, *self.decode_most), step_s)
        return self._terms

    @property
    def prefill(self) -> tuple[float, float, float]:
        """Leading arguments of `prefill_s`."""
        return self.terms.prefill

    @property
    def decode(self) -> tuple[float, float, float]:
        """Leading arguments of `tbt_s`."""
        return self.terms.decode

    def prefill_cost_s(self, new_tokens: int, reused_tokens: int = 0, slot: int = NONE) -> float:
        """Seconds that a prefill takes on a node, or on a usual one."""
        prompt = new_tokens + reused_tokens
        seconds = prefill_s(*self.prefill, prompt, reused_tokens) * self.slowdowns.of(PREFILL, slot)
        return seconds * margin(new_tokens, self.prefill_most[0], prompt, self.prefill_most[1])

    def step_cost_s(self, batch: float, context: float, max_batch: int, slot: int = NONE) -> float:
        """Seconds between tokens there."""
        turns = max(1.0, batch / max_batch)
        seconds = tbt_s(*self.decode, batch, context, max_batch) * self.slowdowns.of(DECODE, slot)
        return seconds * margin(batch / turns, self.decode_most[0], context / turns, self.decode_most[1])

    def covers_prefill(self, new_tokens: float, prompt_tokens: float) -> bool:
        """Was as much measured?"""
        return new_tokens <= self.prefill_most[0] and prompt_tokens <= self.prefill_most[1]

    def covers_decode(self, batch: float, context: float) -> bool:
        """Likewise."""
        return batch <= self.decode_most[0] and context <= self.decode_most[1]

    @property
    def typical_step_s(self) -> float:
        """Seconds between a request's tokens as lately seen."""
        return self.terms.step_s

    def summary(self) -> dict[str, Any]:
        """For export."""
        return {
            "profile": self.given,
            "prefill": {**self._fits[PREFILL].summary(), "most": list(self.prefill_most)},
            "decode": {**self._fits[DECODE].summary(), "most": list(self.decode_most)},
            "decode_time_s": self.decode_time.mean_s,
        }

    def _learn(self, kind: int, features: Sequence[float], seconds: float, slot: int) -> float | None:
        """The seconds that were learned: those measured, but for outliers. None: nothing was."""
        mine = self._fits[kind]
        if not mine.fit.can_learn(features, seconds):
            return None
        if slot == NONE or not mine.fit.is_calibrated:
            return mine.learn(features, seconds)
        shared_s = mine.fit.predict(features)
        mine.fit.note_error(shared_s * self.slowdowns.of(kind, slot), seconds)
        usual, is_outlier = self.slowdowns.note(kind, slot, log(seconds / shared_s))
        mine.num_clipped += is_outlier
        if usual is None:
            return None
        learned_s = shared_s * exp(usual)
        mine.fit.add(features, learned_s)
        return learned_s * self.slowdowns.of(kind, slot)


class TransferCosts:
    """Cost of moving KV bytes, per path. Nothing costs nothing: 0 seconds for 0 bytes."""

    def __init__(self) -> None:
        guesses = {"fetch": _TRANSFER_GUESS, "load": _LOAD_GUESS, "ssd_read": _SSD_GUESS}
        self._fits = {path: _Fit(guess, _STREAK) for path, guess in guesses.items()}
        self._most: dict[str, float] = {}

    def give(self, paths: tuple[PathCosts, ...]) -> None:
        """Begin anew on these paths, with what was measured."""
        for given in paths:
            corners = [(1.0, 1.0), (1.0, min(given.nbytes, _MOST_NBYTES))]
            self._fits[given.path] = _Fit.around((given.fixed_s, given.per_byte_s), corners, _STREAK)
            self._most[given.path] = given.nbytes

    def add(self, sample: TransferSample) -> None:
        path = "fetch" if sample.path in _FETCHES else sample.path
        mine = self._fits.setdefault(path, _Fit(_TRANSFER_GUESS, _STREAK))
        features = (1.0, sample.nbytes)
        if sample.nbytes > 0 and mine.fit.can_learn(features, sample.seconds):
            mine.learn(features, sample.seconds)
            self._most[path] = max(self._most.get(path, 0.0), sample.nbytes)

    def of(self, path: str) -> tuple[float, float]:
        """Return the leading arguments of `read_s` for a path."""
        return self._fits[path].fit.coefficients  # type: ignore[return-value]  # one per feature

    def covers(self, path: str, nbytes: float) -> bool:
        """Was as much measured in one batch?"""
        return nbytes <= self._most.get(path, 0.0)

    def fetch_s(self, nbytes: float, num_concurrent: int) -> float:
        """Seconds to read `nbytes` from another host's pool node that sends to `num_concurrent` others."""
        return fetch_s(read_s(*self.of("fetch"), nbytes, num_concurrent), self.load_s(nbytes))

    def load_s(self, nbytes: float) -> float:
        """Seconds to read `nbytes` from the memory of the host's own pool node."""
        return read_s(*self.of("load"), nbytes, 0)

    def ssd_read_s(self, nbytes: float) -> float:
        """Seconds for a pool node to bring `nbytes` from SSD to memory."""
        return read_s(*self.of("ssd_read"), nbytes, 0)

    def summary(self) -> dict[str, Any]:
        """For export."""
        return {path: fit.summary() for path, fit in sorted(self._fits.items())}


class _Fit:
    """A fit that clips outliers and follows changes by itself, unless somebody else tells it what to learn."""

    def __init__(self, prior: Sequence[float], streak: int) -> None:
        self.fit = CostFit(prior)
        self.num_clipped = 0
        self._watch = OutlierFilter(streak)
        self._given = 0

    @classmethod
    def around(cls, coefficients: Sequence[float], corners: Sequence[Sequence[float]], streak: int) -> "_Fit":
        """As if `coefficients` had been measured at each of the corners, often enough to judge what comes next."""
        largest = max(sum(c * x for c, x in zip(coefficients, corner, strict=True)) for corner in corners)
        tops = [max(column) for column in zip(*corners, strict=True)]
        floors = [max(_LEAST_SHARE * largest, 1e-12) / top if top > 0 else 1.0 for top in tops]
        made = cls([c if c > 0 else floor for c, floor in zip(coefficients, floors, strict=True)], streak)
        while not made.fit.is_calibrated:
            for corner in corners:
                seconds = sum(c * x for c, x in zip(coefficients, corner, strict=True))
                made.fit.add(corner, min(max(seconds, _LEAST_S), _MOST_S))
        made._given = made.fit.num_samples
        return made

    def learn(self, features: Sequence[float], seconds: float) -> float | None:
        """From a measurement that the fit can learn from; returns what was learned, if anything."""
        predicted_s = self.fit.predict(features)
        self.fit.note_error(predicted_s, seconds)
        if self.fit.is_calibrated:
            before = self._watch.num_outliers
            usual, change = self._watch.note(log(seconds / predicted_s))
            self.num_clipped += self._watch.num_outliers - before
            if change:
                self.fit.rescale(change)
            if usual is None:
                return None
            seconds = predicted_s * exp(change + usual)
        self.fit.add(features, seconds)
        return seconds

    def summary(self) -> dict[str, Any]:
        """For export."""
        return {
            "coefficients": list(self.fit.coefficients),
            "samples": self.fit.num_samples - self._given,
            "clipped": self.num_clipped,
            "relative_error": self.fit.relative_error,
        }


def _prefill_features(new_tokens: float, reused_tokens: float) -> tuple[float, float, float]:
    # Each new token attends to all reused ones and to half of the new ones.
    return 1.0, float(new_tokens), new_tokens * (reused_tokens + new_tokens / 2)

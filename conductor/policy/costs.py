"""Predicted costs of prefills, decode steps and transfers, learned online, and a slowdown factor for each node.

The formulas are those of `worker.policy.cost_formulas`. Compute costs are learned per model. They start from built-in
guesses, whose scale the first sample sets, or from a measured profile (`events.CostsGiven`). A prediction beyond the
range that was measured is lengthened by `cost_formulas.margin`.

A node's slowdown factors, one for prefill and one for decode, are relative to the model's other nodes: the common part
is moved into the model's costs (`recentre`). So one slow node gets a factor and does not distort the shared costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import copysign, exp, log, sqrt
from operator import mul
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from conductor.policy.events import CostsGiven, DecodeSample, PathCosts, PrefillSample, TransferSample
from conductor.policy.requests import NONE
from worker.policy.cost_formulas import fetch_s, margin, prefill_s, read_s, tbt_s

__all__ = [
    "DECODE",
    "DECODE_COSTS",
    "LONGEST_S",
    "PREFILL",
    "PREFILL_COSTS",
    "TRANSFER_COSTS",
    "CostFit",
    "MeanDuration",
    "ModelCosts",
    "NodeSlowdowns",
    "OutlierFilter",
    "TransferCosts",
    "fetch_s",
    "prefill_s",
    "read_s",
    "tbt_s",
]

_FIRST_SPREAD = 0.15
_SPREADS = (0.01, 0.5)  # bounds of the spread
_SPREAD_STEP = 0.1  # e-folds by which the spread moves per error, however large, so that outliers do not drag it
_LEAST_BAND = 0.2
_ISOLATED = 2  # so few agreeing outliers are clipped; more may be the beginning of a change
_BAND = 4.0  # spreads


class OutlierFilter:
    """Filter of prediction errors, given as logarithms of measured / predicted.

    An error beyond the band (0.2 plus four median errors) is an outlier and is clipped to the band's edge. `streak`
    outliers that agree with each other, nearly in a row, are a lasting change; a shorter burst, or outliers that
    disagree, are not. While a burst may be the beginning of a change, nothing is learned from it.
    """

    def __init__(self, streak: int) -> None:
        self._streak = streak
        self._spread = _FIRST_SPREAD  # running median of |error|
        self._agreeing = 0
        self._level = 0.0  # mean of the agreeing outliers
        self.num = 0
        self.num_outliers = 0

    @property
    def band(self) -> float:
        """Largest error that counts as noise."""
        return _LEAST_BAND + _BAND * self._spread

    def note(self, error: float) -> tuple[float | None, float]:
        """Add an error; return (the error to learn from or None, the lasting change that was detected or 0)."""
        band = self.band
        self.num += 1
        if abs(error) <= band:
            self._widen(error)
            self._agreeing = max(0, self._agreeing - 2)
            return error, 0.0
        self.num_outliers += 1
        if self._agreeing and abs(error - self._level) > band:
            self._agreeing -= 1
        else:
            self._agreeing += 1
            self._level = error if self._agreeing == 1 else self._level + (error - self._level) / self._agreeing
        if self._agreeing <= _ISOLATED:
            self._widen(error)
            return copysign(band, error), 0.0
        if self._agreeing < self._streak:
            return None, 0.0
        self._agreeing = 0
        return min(max(error - self._level, -band), band), self._level

    def _widen(self, error: float) -> None:
        step = _SPREAD_STEP if abs(error) > self._spread else -_SPREAD_STEP
        self._spread = min(max(self._spread * exp(step), _SPREADS[0]), _SPREADS[1])


LONGEST_S = 1e4  # longer durations cannot be true and are rejected

_FORGETTING = 0.995  # weight of the past per sample: about 200 samples are remembered
_PRIOR_WEIGHT = 0.05  # weight of the prior's shape per coefficient, in samples
_ERROR_MEMORY = 0.95
_FROM = 24  # first samples, fitted together, since outliers cannot be recognised among fewer
_ROUNDS = 4
_FLOOR_S = 1e-9


class CostFit:
    """Fit of `seconds = sum_j coefficient_j * feature_j` that minimises the *relative* squared error.

    Recursive least squares in normal-equation form: with forgetting it cannot wind up, and the non-negative solution
    is exact for the few features that costs have. The prior is the prediction before the first sample; later its
    scale follows the samples, and its proportions determine what the samples leave open. The first samples are kept
    and fitted together iteratively with outliers clipped (Huber), so that a few wrong ones do not set the scale.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: positive seconds per unit of each feature."""
        self._prior = tuple(prior)
        size = len(self._prior)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._log_scale = 0.0
        self._weight = 0.0
        self._first: list[tuple[tuple[float, ...], float]] = []
        self._coefficients: tuple[float, ...] | None = self._prior
        self.num_samples = 0
        self.relative_error = 0.0  # running mean of |predicted - measured| / measured, at most 10 each

    @property
    def is_calibrated(self) -> bool:
        """True if there were enough samples to recognise outliers."""
        return self.num_samples >= _FROM

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature, none negative."""
        if self._coefficients is None:
            self._coefficients = self._fit_first() if self._first else self._solve()
        return self._coefficients

    def predict(self, features: Sequence[float]) -> float:
        """Return the predicted seconds, always above 0 so that errors can be relative to them."""
        return max(_FLOOR_S, float(sum(map(mul, self.coefficients, features))))

    def can_learn(self, features: Sequence[float], seconds: float) -> bool:
        """Return True if this is a plausible duration of a non-empty piece of work."""
        return 0 < seconds < LONGEST_S and sum(features) < float("inf") and min(features) >= 0 and max(features) > 0

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one measurement; it is ignored if `can_learn` is false for it."""
        if not self.can_learn(features, seconds):
            return
        seconds = max(seconds, _FLOOR_S)
        self.num_samples += 1
        if self.num_samples <= _FROM:
            self._first.append((tuple(features), seconds))
            self._coefficients = None
            if self.num_samples == _FROM:
                self._coefficients = self._fit_first()
                self._first = []
            return
        scaled = list(map(mul, self._prior, features))
        self._take(scaled, sum(scaled), seconds, self.predict(features))
        self._coefficients = None

    def note_error(self, predicted_s: float, seconds: float) -> None:
        """Update the mean relative error with a prediction made before its measurement was learned from."""
        memory = min(_ERROR_MEMORY, 1 - 1 / max(1, self.num_samples))
        error = min(abs(predicted_s - seconds) / max(seconds, _FLOOR_S), 10.0)
        self.relative_error += (1 - memory) * (error - self.relative_error)

    def rescale(self, log_factor: float) -> None:
        """Multiply all durations learned so far by exp(`log_factor`)."""
        factor = exp(log_factor)
        self._log_scale += log_factor
        self._first = [(features, seconds * factor) for features, seconds in self._first]
        self._moment = [value / factor for value in self._moment]
        self._gram = [[value / factor**2 for value in row] for row in self._gram]
        self._coefficients = None

    def _take(self, scaled: Sequence[float], shape: float, seconds: float, predicted: float) -> None:
        """Add a sample: its features multiplied by the prior's coefficients, and their sum."""
        # Errors are relative to the geometric mean of measured and predicted time: relative to the measured time
        # alone, short measurements would dominate.
        usual = sqrt(seconds * max(predicted, _FLOOR_S))
        self._weight = _FORGETTING * self._weight + 1
        self._log_scale += (log(seconds / shape) - self._log_scale) / self._weight
        rows = [each / usual for each in scaled]
        moment = self._moment
        # Loops instead of comprehensions, which would take twice as long for two or three features.
        for i, row in enumerate(rows):
            moment[i] = _FORGETTING * moment[i] + row * seconds / usual
            gram = self._gram[i]
            for j, other in enumerate(rows):
                gram[j] = _FORGETTING * gram[j] + row * other

    def _fit_first(self) -> tuple[float, ...]:
        """Return the coefficients fitted to the first samples, with outliers clipped."""
        samples = [(features, list(map(mul, self._prior, features)), seconds) for features, seconds in self._first]
        shapes = [sum(scaled) for _, scaled, _ in samples]
        logs = sorted([log(seconds / shape) for (_, _, seconds), shape in zip(samples, shapes, strict=True)])
        scale = exp((logs[(len(logs) - 1) // 2] + logs[len(logs) // 2]) / 2)
        found = tuple(scale * p for p in self._prior)
        size = len(self._prior)
        for _ in range(_ROUNDS):
            predicted = [max(sum(map(mul, found, features)), _FLOOR_S) for features, _, _ in samples]
            errors = [log(seconds / usual_s) for usual_s, (_, _, seconds) in zip(predicted, samples, strict=True)]
            band = _LEAST_BAND + _BAND * sorted(map(abs, errors))[len(errors) // 2]
            self._gram, self._moment = [[0.0] * size for _ in range(size)], [0.0] * size
            self._weight = self._log_scale = 0.0
            for (_, scaled, _), shape, usual_s, error in zip(samples, shapes, predicted, errors, strict=True):
                self._take(scaled, shape, usual_s * exp(min(max(error, -band), band)), usual_s)
            found = self._solve()
        return found

    def _solve(self) -> tuple[float, ...]:
        """Return the non-negative solution; coefficients that would be negative are fixed at 0, one by one."""
        scale = exp(self._log_scale)
        free = list(range(len(self._prior)))
        while True:
            matrix = [[self._gram[i][j] * scale**2 + (_PRIOR_WEIGHT if i == j else 0.0) for j in free] for i in free]
            right = [self._moment[i] * scale + _PRIOR_WEIGHT for i in free]
            solution = dict(zip(free, _solve_linear(matrix, right), strict=True))
            worst = min(free, key=lambda i: (solution[i], i))
            if solution[worst] >= 0 or len(free) == 1:
                break
            free.remove(worst)
        return tuple(max(0.0, solution.get(i, 0.0)) * scale * p for i, p in enumerate(self._prior))


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve by Gaussian elimination; no pivoting, since the matrix (Gram matrix plus prior) is positive definite."""
    size = len(right)
    for i in range(size):
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
            right[j] -= factor * right[i]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (right[i] - rest) / matrix[i][i]
    return solution


PREFILL: Final = 0  # rows of `NodeSlowdowns.factors`
DECODE: Final = 1

_STREAKS: Final = (10, 20)  # agreeing outliers that count as a change; decode steps are measured far more often
_DRIFT: Final = 0.05  # share of an error within the noise by which a factor follows it
_DEAD: Final = log(1.1)  # factors within 10 % count as 1, so that noise does not choose between equal nodes
_MOST: Final = log(16.0)  # largest factor, which limits how far wrong reports can attract or repel requests
_LEAST_SHIFT: Final = 0.02
_ENOUGH: Final = 8  # measurements before a node takes part in `recentre`


class NodeSlowdowns:
    """Slowdown factors of all nodes, indexed by slot."""

    def __init__(self) -> None:
        self.factors: NDArray[np.float64] = np.ones((2, 0))  # [PREFILL or DECODE, slot]; read by compiled loops
        self._levels: NDArray[np.float64] = np.zeros((2, 0))  # their logarithms, before the dead band is applied
        self._nums: NDArray[np.int64] = np.zeros((2, 0), np.int64)
        self._watches: dict[tuple[int, int], OutlierFilter] = {}

    def make_room(self, num_slots: int) -> None:
        """Extend the arrays to `num_slots` slots; new nodes start with a factor of 1."""
        missing = num_slots - self._nums.shape[1]
        if missing > 0:
            self.factors = np.concatenate([self.factors, np.ones((2, missing))], axis=1)
            self._levels = np.concatenate([self._levels, np.zeros((2, missing))], axis=1)
            self._nums = np.concatenate([self._nums, np.zeros((2, missing), np.int64)], axis=1)

    def start_like(self, slot: int, others: NDArray[np.int64]) -> None:
        """Let a node of which nothing was measured begin with the lower median of the factors of nodes of its kind.

        `others`: their slots.
        """
        for kind in (PREFILL, DECODE):
            known = others[self._nums[kind, others] >= _ENOUGH]
            if len(known) and not self._nums[kind, slot]:
                middle = (len(known) - 1) // 2
                self._nums[kind, slot] = _ENOUGH
                self._set(kind, slot, float(np.partition(self._levels[kind, known], middle)[middle]))

    def forget(self, slot: int) -> None:
        """Reset the slot of a node that has left."""
        if 0 <= slot < self._nums.shape[1]:
            self.factors[:, slot], self._levels[:, slot], self._nums[:, slot] = 1.0, 0.0, 0
            for kind in (PREFILL, DECODE):
                self._watches.pop((kind, slot), None)

    def of(self, kind: int, slot: int) -> float:
        """Return the node's factor; 1 if `slot` is NONE."""
        return float(self.factors[kind, slot]) if slot != NONE else 1.0

    def note(self, kind: int, slot: int, log_error: float) -> tuple[float | None, bool]:
        """Learn from work that took exp(`log_error`) times what the model's costs predict.

        Returns the error without the node's own slowdown and with outliers clipped, from which the model's costs may
        learn (None if they may not), and True if the measurement was an outlier.
        """
        watch = self._watches.get((kind, slot))
        if watch is None:
            watch = self._watches[kind, slot] = OutlierFilter(_STREAKS[kind])
        level = float(self._levels[kind, slot])
        before = watch.num_outliers
        usual, change = watch.note(log_error - level)
        self._nums[kind, slot] += 1
        # The first measurements count as much as they do in a mean with one that found the node usual.
        share = max(_DRIFT, 1 / (1 + int(self._nums[kind, slot])))
        self._set(kind, slot, level + change + share * (usual or 0.0))
        is_believed = abs(self._levels[kind, slot]) < _MOST
        return usual if is_believed else None, watch.num_outliers > before

    def recentre(self, kind: int, slots: NDArray[np.int64]) -> float:
        """Make the (lower) median node of a model the one with factor 1.

        Returns the logarithm of the factor by which the model's cost must be multiplied in exchange. Of two nodes the
        faster one is the median.
        """
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


# Built-in guesses in seconds: a compromise between a small model on a CPU and a large one on a GPU.
_PREFILL_GUESS = (5e-3, 2e-4, 1e-8)  # per request, per new token, per (new token, token attended to)
_DECODE_GUESS = (5e-3, 5e-4, 1e-7)  # per step, per sequence, per token of context
_TRANSFER_GUESS = (5e-4, 1e-9)  # per batch, per byte
_LOAD_GUESS = (1e-4, 2e-10)  # likewise, within a host
_SSD_GUESS = (1e-3, 2e-9)
_FETCHES = ("fetch", "pull", "copy")  # paths that read from a pool node, most of them over the network
_MEMORY = 0.95
_LEAST_SHARE = 0.001  # a coefficient of 0 in a profile becomes this share of the cost of its largest work
_LEAST_S, _MOST_S = 1e-9, LONGEST_S / 2  # bounds of the durations that a profile implies
_STREAK = 10
# Bounds of the ranges of a profile: beyond any real request, and still within what the fit can represent.
_MOST_TOKENS, _MOST_BATCH, _MOST_CONTEXT, _MOST_NBYTES = 2.0**21, 2.0**13, 2.0**27, 2.0**42


class MeanDuration:
    """Running mean of durations that forgets old values; None before the first one."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.mean_s: float | None = None

    def add(self, seconds: float) -> None:
        """Add a duration; negative and absurdly long ones are ignored."""
        if not 0 <= seconds < LONGEST_S:
            return
        self.num_samples += 1
        memory = min(_MEMORY, 1 - 1 / self.num_samples)
        self.mean_s = seconds if self.mean_s is None else memory * self.mean_s + (1 - memory) * seconds


PREFILL_COSTS: Final = np.dtype(
    [
        ("fixed_s", np.float64),
        ("per_token_s", np.float64),
        ("per_pair_s", np.float64),
        ("most_new", np.float64),  # tokens measured, see `ModelCosts.prefill_most`
        ("most_prompt", np.float64),
    ]
)
"""Coefficients of `cost_formulas.prefill_s`, for compiled loops."""

DECODE_COSTS: Final = np.dtype(
    [
        ("fixed_s", np.float64),
        ("per_sequence_s", np.float64),
        ("per_token_s", np.float64),
        ("most_batch", np.float64),  # measured, see `ModelCosts.decode_most`
        ("most_context", np.float64),
    ]
)
"""Coefficients of `cost_formulas.tbt_s`, for compiled loops."""

TRANSFER_COSTS: Final = np.dtype(
    [
        ("load_fixed_s", np.float64),
        ("load_per_byte_s", np.float64),
        ("fetch_fixed_s", np.float64),
        ("fetch_per_byte_s", np.float64),
        ("ssd_fixed_s", np.float64),
        ("ssd_per_byte_s", np.float64),
        ("may_recompute", np.int64),  # 1: instead of a fetch that takes longer than computing
    ]
)
"""Coefficients of `cost_formulas.read_s` for each path, for compiled loops."""


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Current costs of a model as numbers: the coefficients of `prefill_s` and `tbt_s`, and seconds of a usual step."""

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    prefill_record: NDArray[np.void]  # PREFILL_COSTS [1]
    decode_record: NDArray[np.void]  # DECODE_COSTS [1]
    step_s: float


class ModelCosts:
    """Compute costs of one model on a typical node; `slowdowns` contains each node's deviation from them."""

    def __init__(self, slowdowns: NodeSlowdowns | None = None) -> None:
        self.slowdowns = slowdowns if slowdowns is not None else NodeSlowdowns()
        self.given = ""  # name of the profile, if there is one
        self.decode_time = MeanDuration()  # time for which a request decodes
        self._fits = (_Fit(_PREFILL_GUESS, 10), _Fit(_DECODE_GUESS, 20))
        self._step = MeanDuration()
        self._terms: CostTerms | None = None  # cache; None after a change
        self.prefill_most = (0.0, 0.0)  # largest numbers of new tokens and of prompt tokens measured
        self.decode_most = (0.0, 0.0)  # largest batch and largest context of a step measured

    def give(self, given: CostsGiven) -> None:
        """Discard what was learned and start from a measured profile."""
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
        """Learn from a measured prefill of the node `slot`, or of an unknown node."""
        new, prompt = sample.new_tokens, sample.new_tokens + sample.reused_tokens
        features = _prefill_features(new, sample.reused_tokens)
        self._terms = None
        if new > 0 and self._learn(PREFILL, features, sample.seconds, slot) is not None:
            self.prefill_most = max(self.prefill_most[0], new), max(self.prefill_most[1], prompt)

    def add_decode(self, sample: DecodeSample, slot: int = NONE) -> None:
        """Learn from a measured decode step of the node `slot`, or of an unknown node."""
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
        """Current costs as numbers."""
        if self._terms is None:
            prefill, decode = self._fits[PREFILL].fit, self._fits[DECODE].fit
            step_s = self._step.mean_s if self._step.mean_s is not None else decode.predict((1.0, 1.0, 0.0))
            of_prefill: Any = prefill.coefficients
            of_decode: Any = decode.coefficients
            self._terms = CostTerms(
                of_prefill,
                of_decode,
                np.array([(*of_prefill, *self.prefill_most)], PREFILL_COSTS),
                np.array([(*of_decode, *self.decode_most)], DECODE_COSTS),
                step_s,
            )
        return self._terms

    @property
    def prefill(self) -> tuple[float, float, float]:
        """Leading arguments of `prefill_s`."""
        return self.terms.prefill

    @property
    def decode(self) -> tuple[float, float, float]:
        """Leading arguments of `tbt_s`."""
        return self.terms.decode

    def prefill_cost_s(self, new_tokens: int, reused_tokens: int = 0, slot: int = NONE, *, most_seen: int = 0) -> float:
        """Return the predicted seconds of a prefill on the node `slot`, or on a typical one.

        `most_seen`: as in `cost_formulas.prefill_s`.
        """
        prompt = new_tokens + reused_tokens
        seconds = prefill_s(*self.prefill, prompt, reused_tokens, most_seen) * self.slowdowns.of(PREFILL, slot)
        seen = min(prompt, most_seen) if most_seen else prompt
        return seconds * margin(seen - reused_tokens, self.prefill_most[0], seen, self.prefill_most[1])

    def step_cost_s(self, batch: float, context: float, max_batch: int, slot: int = NONE) -> float:
        """Return the predicted seconds between tokens on the node `slot`, or on a typical one.

        A batch larger than `max_batch` takes its steps in turns.
        """
        turns = max(1.0, batch / max_batch)
        seconds = tbt_s(*self.decode, batch, context, max_batch) * self.slowdowns.of(DECODE, slot)
        return seconds * margin(batch / turns, self.decode_most[0], context / turns, self.decode_most[1])

    def covers_prefill(self, new_tokens: float, prompt_tokens: float) -> bool:
        """Return True if a prediction for such a prefill is within the measured range."""
        return new_tokens <= self.prefill_most[0] and prompt_tokens <= self.prefill_most[1]

    def covers_decode(self, batch: float, context: float) -> bool:
        """Return True if a prediction for such a decode step is within the measured range."""
        return batch <= self.decode_most[0] and context <= self.decode_most[1]

    @property
    def typical_step_s(self) -> float:
        """Running mean of the seconds of a decode step."""
        return self.terms.step_s

    def summary(self) -> dict[str, Any]:
        """Return the costs as a JSON object."""
        return {
            "profile": self.given,
            "prefill": {**self._fits[PREFILL].summary(), "most": list(self.prefill_most)},
            "decode": {**self._fits[DECODE].summary(), "most": list(self.decode_most)},
            "decode_time_s": self.decode_time.mean_s,
        }

    def _learn(self, kind: int, features: Sequence[float], seconds: float, slot: int) -> float | None:
        """Learn from a measurement; return the seconds learned, with outliers clipped, or None if nothing was."""
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
    """Predicted duration of moving KV bytes, by path; 0 bytes take 0 seconds."""

    def __init__(self, *, may_recompute: bool = True) -> None:
        """`may_recompute`: a prefix is computed where that is predicted to take less time than to fetch it."""
        self._may_recompute = may_recompute
        guesses = {"fetch": _TRANSFER_GUESS, "load": _LOAD_GUESS, "ssd_read": _SSD_GUESS}
        self._fits = {path: _Fit(guess, _STREAK) for path, guess in guesses.items()}
        self._most: dict[str, float] = {}
        self._record: NDArray[np.void] | None = None  # cache; None after a change

    def give(self, paths: tuple[PathCosts, ...]) -> None:
        """Discard what was learned about these paths and start from their measured costs."""
        self._record = None
        for given in paths:
            corners = [(1.0, 1.0), (1.0, min(given.nbytes, _MOST_NBYTES))]
            self._fits[given.path] = _Fit.around((given.fixed_s, given.per_byte_s), corners, _STREAK)
            self._most[given.path] = given.nbytes

    def add(self, sample: TransferSample) -> None:
        """Learn from a measured transfer."""
        path = "fetch" if sample.path in _FETCHES else sample.path
        mine = self._fits.setdefault(path, _Fit(_TRANSFER_GUESS, _STREAK))
        features = (1.0, sample.nbytes)
        if sample.nbytes > 0 and mine.fit.can_learn(features, sample.seconds):
            self._record = None
            mine.learn(features, sample.seconds)
            self._most[path] = max(self._most.get(path, 0.0), sample.nbytes)

    @property
    def record(self) -> NDArray[np.void]:
        """TRANSFER_COSTS [1] with the current predictions."""
        if self._record is None:
            paths = *self.of("load"), *self.of("fetch"), *self.of("ssd_read")
            # Not before fetches were measured: a guess that is too slow would never be corrected.
            may_recompute = self._may_recompute and self.is_calibrated("fetch")
            self._record = np.array([(*paths, may_recompute)], TRANSFER_COSTS)
        return self._record

    def of(self, path: str) -> tuple[float, float]:
        """Return the leading arguments of `read_s` for a path."""
        return self._fits[path].fit.coefficients  # type: ignore[return-value]  # one per feature

    def is_calibrated(self, path: str) -> bool:
        """Return True if the path's cost is no longer a guess: enough transfers were measured, or a profile given."""
        return self._fits[path].fit.is_calibrated

    def covers(self, path: str, nbytes: float) -> bool:
        """Return True if a prediction for `nbytes` is within the measured range of the path."""
        return nbytes <= self._most.get(path, 0.0)

    def fetch_s(self, nbytes: float, num_concurrent: int) -> float:
        """Return the seconds to read `nbytes` from another host's pool node with `num_concurrent` other reads."""
        return fetch_s(read_s(*self.of("fetch"), nbytes, num_concurrent), self.load_s(nbytes))

    def load_s(self, nbytes: float) -> float:
        """Return the seconds to read `nbytes` from the memory of the pool node on the same host."""
        return read_s(*self.of("load"), nbytes, 0)

    def ssd_read_s(self, nbytes: float) -> float:
        """Return the seconds that a pool node takes to read `nbytes` from SSD into memory."""
        return read_s(*self.of("ssd_read"), nbytes, 0)

    def summary(self) -> dict[str, Any]:
        """Return the costs of all paths as a JSON object."""
        return {path: fit.summary() for path, fit in sorted(self._fits.items())}


class _Fit:
    """A cost fit with its own outlier filter and counters."""

    def __init__(self, prior: Sequence[float], streak: int) -> None:
        self.fit = CostFit(prior)
        self.num_clipped = 0
        self._watch = OutlierFilter(streak)
        self._given = 0

    @classmethod
    def around(cls, coefficients: Sequence[float], corners: Sequence[Sequence[float]], streak: int) -> "_Fit":
        """Return a calibrated fit, as if `coefficients` had been measured at each of the corners."""
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
        """Learn from a measurement for which `can_learn` is true; return the seconds learned, None if nothing was."""
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
        """Return the coefficients and counters as a JSON object."""
        return {
            "coefficients": list(self.fit.coefficients),
            "samples": self.fit.num_samples - self._given,
            "clipped": self.num_clipped,
            "relative_error": self.fit.relative_error,
        }


def _prefill_features(new_tokens: float, reused_tokens: float) -> tuple[float, float, float]:
    # Each new token attends to all reused ones and, on average, to half of the new ones.
    return 1.0, float(new_tokens), new_tokens * (reused_tokens + new_tokens / 2)

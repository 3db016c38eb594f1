"""Tells noise, outliers and lasting changes apart in a series of errors of predictions. Deterministic; no clock.

Online least squares for costs: non-negative coefficients, forgetting. `watch` tells it which news are outliers.
"""

from collections.abc import Sequence
from math import copysign, exp, log, sqrt
from operator import mul

__all__ = [
    "LONGEST_S",
    "CostFit",
    "OutlierFilter",
]

_FIRST_SPREAD = 0.15
_SPREADS = (0.01, 0.5)  # the least and the most that is taken for noise
_SPREAD_STEP = 0.1  # e-folds by which the spread moves per error: its size does not matter, so outliers cannot drag it
_LEAST_BAND = 0.2
_ISOLATED = 2  # outliers that agree with no more than one other one
_BAND = 4.0  # spreads


class OutlierFilter:
    """Over logarithms of measured / predicted.

    An error beyond the band (0.2 and four median errors) is an outlier: it counts as much as the band's edge. Outliers
    that agree with each other, `streak` of them nearly in a row, are no outliers but a change; a shorter burst, or one
    that says something else each time, never is. While it may be the beginning of a change, nothing is learned from it.
    """

    def __init__(self, streak: int) -> None:
        self._streak = streak
        self._spread = _FIRST_SPREAD  # running median of |error|
        self._agreeing = 0
        self._level = 0.0  # mean of those that agree
        self.num = 0
        self.num_outliers = 0

    @property
    def band(self) -> float:
        """Errors of up to so much are noise."""
        return _LEAST_BAND + _BAND * self._spread

    def note(self, error: float) -> tuple[float | None, float]:
        """(the error to learn from, if any; the change to believe in from now on: 0 for none)."""
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


LONGEST_S = 1e4  # nothing that is measured here takes hours: whoever says so, or says that it took no number, is wrong

_FORGETTING = 0.995  # weight of the past per sample: about 200 samples are remembered
_PRIOR_WEIGHT = 0.05  # samples that the prior's shape is worth, per coefficient
_ERROR_MEMORY = 0.95
_FROM = 24  # samples that are fitted together: until then nobody can say which of them are outliers
_ROUNDS = 4
_FLOOR_S = 1e-9


class CostFit:
    """Fits `seconds = sum_j coefficient_j * feature_j`, minimising *relative* squared error.

    Recursive least squares in its normal-equation form: with forgetting it cannot wind up, and the non-negative
    solution is exact for the few features that costs have. The prior is a shape: before the first sample it is the
    prediction itself, later its scale follows the samples and its proportions fill in what they do not tell. The first
    samples are kept and fitted together, over and over, outliers clipped (Huber): a few that are wrong set no scale.
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
        """Does it know enough to call a measurement an outlier?"""
        return self.num_samples >= _FROM

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature, none negative."""
        if self._coefficients is None:
            self._coefficients = self._fit_first() if self._first else self._solve()
        return self._coefficients

    def predict(self, features: Sequence[float]) -> float:
        """Seconds, above 0 for non-negative features, so that errors can be relative to them."""
        return max(_FLOOR_S, float(sum(map(mul, self.coefficients, features))))

    def can_learn(self, features: Sequence[float], seconds: float) -> bool:
        """Is this a credible duration of some work?"""
        return 0 < seconds < LONGEST_S and sum(features) < float("inf") and min(features) >= 0 and max(features) > 0

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one measurement; one that `can_learn` does not hold for is ignored."""
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
        self._take(features, seconds, self.predict(features))
        self._coefficients = None

    def note_error(self, predicted_s: float, seconds: float) -> None:
        """How far off a prediction was that was made before its measurement was learned from."""
        memory = min(_ERROR_MEMORY, 1 - 1 / max(1, self.num_samples))
        error = min(abs(predicted_s - seconds) / max(seconds, _FLOOR_S), 10.0)
        self.relative_error += (1 - memory) * (error - self.relative_error)

    def rescale(self, log_factor: float) -> None:
        """All work takes exp(`log_factor`) times what it took: as if all of the past had been measured so."""
        factor = exp(log_factor)
        self._log_scale += log_factor
        self._first = [(features, seconds * factor) for features, seconds in self._first]
        self._moment = [value / factor for value in self._moment]
        self._gram = [[value / factor**2 for value in row] for row in self._gram]
        self._coefficients = None

    def _take(self, features: Sequence[float], seconds: float, predicted: float) -> None:
        # Errors are relative to what is usual for such work: relative to the measured time, short ones would rule.
        usual = sqrt(seconds * max(predicted, _FLOOR_S))
        self._weight = _FORGETTING * self._weight + 1
        self._log_scale += (log(seconds / self._shape(features)) - self._log_scale) / self._weight
        rows = [p * x / usual for p, x in zip(self._prior, features, strict=True)]
        for i, row in enumerate(rows):
            self._moment[i] = _FORGETTING * self._moment[i] + row * seconds / usual
            self._gram[i] = [_FORGETTING * old + row * other for old, other in zip(self._gram[i], rows, strict=True)]

    def _fit_first(self) -> tuple[float, ...]:
        """The coefficients that fit the first samples; none is thrown away, but outliers pull no more than others."""
        logs = sorted(log(seconds / self._shape(features)) for features, seconds in self._first)
        scale = exp((logs[(len(logs) - 1) // 2] + logs[len(logs) // 2]) / 2)
        found = tuple(scale * p for p in self._prior)
        size = len(self._prior)
        for _ in range(_ROUNDS):
            predicted = [sum(c * x for c, x in zip(found, features, strict=True)) for features, _ in self._first]
            errors = [log(s / max(p, _FLOOR_S)) for p, (_, s) in zip(predicted, self._first, strict=True)]
            band = _LEAST_BAND + _BAND * sorted(map(abs, errors))[len(errors) // 2]
            self._gram, self._moment = [[0.0] * size for _ in range(size)], [0.0] * size
            self._weight = self._log_scale = 0.0
            for (features, _), usual_s, error in zip(self._first, predicted, errors, strict=True):
                self._take(features, max(usual_s, _FLOOR_S) * exp(min(max(error, -band), band)), usual_s)
            found = self._solve()
        return found

    def _shape(self, features: Sequence[float]) -> float:
        return sum(p * x for p, x in zip(self._prior, features, strict=True))

    def _solve(self) -> tuple[float, ...]:
        """Non-negative solution in units of scale * prior; one that would be negative is 0."""
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
    """Gaussian elimination; the matrix is positive definite (a Gram matrix plus the prior), so no pivoting."""
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

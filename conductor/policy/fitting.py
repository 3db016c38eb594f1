"""Online least squares with forgetting and non-negative coefficients, and a filter that separates noise, outliers and
lasting changes in a series of prediction errors.
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
        self._take(features, seconds, self.predict(features))
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

    def _take(self, features: Sequence[float], seconds: float, predicted: float) -> None:
        # Errors are relative to the geometric mean of measured and predicted time: relative to the measured time
        # alone, short measurements would dominate.
        usual = sqrt(seconds * max(predicted, _FLOOR_S))
        self._weight = _FORGETTING * self._weight + 1
        self._log_scale += (log(seconds / self._shape(features)) - self._log_scale) / self._weight
        rows = [p * x / usual for p, x in zip(self._prior, features, strict=True)]
        for i, row in enumerate(rows):
            self._moment[i] = _FORGETTING * self._moment[i] + row * seconds / usual
            self._gram[i] = [_FORGETTING * old + row * other for old, other in zip(self._gram[i], rows, strict=True)]

    def _fit_first(self) -> tuple[float, ...]:
        """Return the coefficients fitted to the first samples, with outliers clipped."""
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

"""Online least squares for costs: non-negative coefficients, forgetting, outliers clipped."""

from collections.abc import Sequence
from math import exp, log, sqrt

__all__ = ["LONGEST_S", "CostFit"]

LONGEST_S = 1e4  # nothing that is measured here takes hours: whoever says so, or says that it took no number, is wrong

_FORGETTING = 0.995  # weight of the past per sample: about 200 samples are remembered
_PRIOR_WEIGHT = 0.05  # samples that the prior's shape is worth, per coefficient
_ERROR_MEMORY = 0.95
_CLIP_FROM = 8  # samples before outliers are told from news
_STREAK = 5  # outliers on the same side in a row that are no outliers but a change
_KEPT_AT_CHANGE = 0.02  # weight that the past keeps at one
_FLOOR_S = 1e-9


class CostFit:
    """Fits `seconds = sum_j coefficient_j * feature_j`, minimising *relative* squared error.

    Recursive least squares in its normal-equation form: with forgetting it cannot wind up, and the non-negative
    solution is exact for the few features that costs have. The prior is a shape: before the first sample it is the
    prediction itself, later its scale follows the samples and its proportions fill in what they do not tell.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: positive seconds per unit of each feature."""
        self._prior = tuple(prior)
        size = len(self._prior)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._log_scale = 0.0
        self._weight = 0.0
        self._log_error = 0.0
        self._streak = 0  # outliers in a row, negative for those below
        self._coefficients: tuple[float, ...] | None = self._prior
        self.num_samples = 0
        self.num_clipped = 0
        self.relative_error = (
            0.0  # running mean of |predicted - measured| / measured, each predicted before it was used
        )

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature, none negative."""
        if self._coefficients is None:
            self._coefficients = self._solve()
        return self._coefficients

    def predict(self, features: Sequence[float]) -> float:
        """Seconds, never negative for non-negative features."""
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def add(self, features: Sequence[float], seconds: float) -> None:
        """Learn from one measurement; those without a credible duration or without work are ignored."""
        shape = sum(p * x for p, x in zip(self._prior, features, strict=True))
        if not 0 < seconds < LONGEST_S or shape <= 0:
            return
        seconds, predicted = max(seconds, _FLOOR_S), max(self.predict(features), _FLOOR_S)
        # Errors are relative to what is usual for such work: relative to the measured time, short ones would rule.
        usual = sqrt(seconds * predicted) if self.num_samples else seconds
        seconds = self._clip(seconds, predicted)
        self._discount(_FORGETTING)
        self._weight += 1
        self._log_scale += (log(seconds / shape) - self._log_scale) / self._weight
        rows = [p * x / usual for p, x in zip(self._prior, features, strict=True)]
        for i, row in enumerate(rows):
            self._moment[i] += row * seconds / usual
            for j, other in enumerate(rows):
                self._gram[i][j] += row * other
        self._coefficients = None

    def summary(self) -> dict[str, float | list[float]]:
        """For export."""
        return {
            "coefficients": list(self.coefficients),
            "samples": self.num_samples,
            "clipped": self.num_clipped,
            "relative_error": self.relative_error,
        }

    def _clip(self, seconds: float, predicted: float) -> float:
        """Bring an outlier to the edge of what is usual; several in a row are believed, at the past's cost."""
        self.num_samples += 1
        memory = min(_ERROR_MEMORY, 1 - 1 / self.num_samples)
        self.relative_error += (1 - memory) * (min(abs(predicted - seconds) / seconds, 10.0) - self.relative_error)
        deviation = log(seconds / predicted)
        band = 0.3 + 3 * self._log_error
        self._log_error += (1 - memory) * (min(abs(deviation), 2 * band) - self._log_error)
        if self.num_samples <= _CLIP_FROM or abs(deviation) <= band:
            self._streak = 0
            return seconds
        self._streak = max(self._streak, 0) + 1 if deviation > 0 else min(self._streak, 0) - 1
        if abs(self._streak) >= _STREAK:
            self._streak = 0
            self._discount(_KEPT_AT_CHANGE)
            return seconds
        self.num_clipped += 1
        return predicted * exp(band if deviation > 0 else -band)

    def _discount(self, factor: float) -> None:
        self._weight *= factor
        self._moment = [factor * value for value in self._moment]
        self._gram = [[factor * value for value in row] for row in self._gram]

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

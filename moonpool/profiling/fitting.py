"""Grid of measured work, and the fit of non-negative coefficients: relative least squares with Huber weights. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from moonpool.errors import ConfigError
from worker.policy.cost_profile import FitError

__all__ = ["MeasuredPoint", "WorkGrid", "grid_of"]

_LEAST_NEW = 16


@dataclass(frozen=True)
class MeasuredPoint:
    """Median and shortest seconds of repeated work. `x`: (new, reused) or (batch, context) tokens."""

    x: tuple[int, int]
    median_s: float
    least_s: float


@dataclass(frozen=True)
class WorkGrid:
    """Work to measure. `prefills`: (new, reused) tokens; `steps`: (batch, context tokens of each sequence)."""

    prefills: tuple[tuple[int, int], ...]
    steps: tuple[tuple[int, int], ...]


def grid_of(max_model_len: int, max_batch: int, capacity_tokens: int) -> WorkGrid:
    """Return prefills of 16 * 4**i new tokens after 0, 1/8 and 1/2 of the longest prompt, and similar decode steps.

    Work that does not fit into `capacity_tokens` of KV is skipped. Raises ConfigError if too few points are left.
    """
    longest = min(max_model_len - 1, capacity_tokens)
    news = [size for size in (_LEAST_NEW * 4**i for i in range(12)) if size < longest] + [longest]
    prefills = {(new, reused) for reused in (0, longest // 8, longest // 2) for new in news if new + reused <= longest}
    batches = sorted({min(2**i, max_batch) for i in range(0, 20, 1)})
    contexts = sorted({_LEAST_NEW, longest // 8, longest // 2, longest - 1})
    steps = {(batch, each) for batch in batches for each in contexts if batch * (each + 1) <= capacity_tokens}
    if len(prefills) < 4 or len(steps) < 4:
        raise ConfigError(
            f"--max-model-len and --capacity-tokens must be at least {16 * _LEAST_NEW} to fit costs, got prompts of "
            f"up to {longest} tokens and a capacity of {capacity_tokens} tokens"
        )
    return WorkGrid(tuple(sorted(prefills)), tuple(sorted(steps)))


__all__ = ["fit", "fit_error", "predicted"]

Floats = NDArray[np.float64]

_HUBER = 1.345  # standard deviations; keeps 95 % efficiency for normal errors
_SPREAD = 1.4826  # standard deviation per median absolute error of a normal distribution
_LEAST_SPREAD = 0.005
_ROUNDS = 30


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return non-negative coefficients [features] of `seconds = features @ coefficients`.

    `features`: [points, features]; `seconds`: [points].
    """
    x = np.asarray(features, np.float64)
    measured = np.asarray(seconds, np.float64)
    scale = np.maximum(x.max(axis=0), 1e-30)
    x = x / scale
    fitted = np.median(measured / x.sum(axis=1)) * x.sum(axis=1)
    found = np.zeros(x.shape[1])
    for turn in range(_ROUNDS):
        errors = np.abs(np.log(measured / fitted))
        spread = max(_SPREAD * float(np.median(errors)), _LEAST_SPREAD)
        # First absolute errors, which outliers affect little; then Huber's, which are more efficient.
        edge = spread / 10 if turn < _ROUNDS // 2 else _HUBER * spread
        weights = np.sqrt(np.minimum(1.0, edge / np.maximum(errors, 1e-12)))
        # Relative to the geometric mean of measured and fitted: relative to measured alone, short outliers dominate.
        usual = weights / np.sqrt(measured * fitted)
        found = _non_negative(x * usual[:, None], measured * usual)
        fitted = np.maximum(x @ found, 1e-12)
    return tuple((found / scale).tolist())


def predicted(features: Sequence[Sequence[float]], coefficients: Sequence[float]) -> Floats:
    """Return predicted seconds, float64 [points]."""
    seconds: Floats = np.asarray(features, np.float64) @ np.asarray(coefficients, np.float64)
    return seconds


def fit_error(features: Sequence[Sequence[float]], seconds: Sequence[float], coefficients: Sequence[float]) -> FitError:
    """Return the relative errors of the fit."""
    measured = np.asarray(seconds, np.float64)
    errors = np.abs(predicted(features, coefficients) - measured) / measured
    median, p90, worst = np.quantile(errors, (0.5, 0.9, 1.0)).round(4).tolist()
    return FitError(points=len(measured), median=median, p90=p90, worst=worst)


def _non_negative(rows: Floats, target: Floats) -> Floats:
    """Return the best non-negative solution over all subsets of non-zero coefficients (seven for three of them)."""
    size = rows.shape[1]
    best, least = np.zeros(size), float(target @ target)
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            some = list(chosen)
            solution = np.linalg.lstsq(rows[:, some], target, rcond=None)[0]
            loss = float(((rows[:, some] @ solution - target) ** 2).sum())
            if solution.min() >= 0 and loss < least:
                best, least = np.zeros(size), loss
                best[some] = solution
    return best

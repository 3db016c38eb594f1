"""Fits non-negative coefficients to measurements: relative least squares, outliers weighed down (Huber). Pure."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from worker.policy.cost_profile import FitError

__all__ = ["fit", "fit_error", "predicted"]

Floats = NDArray[np.float64]

_HUBER = 1.345  # standard deviations, at which 95 % efficiency is kept where nothing is wrong
_SPREAD = 1.4826  # of a normal distribution, per median of absolute errors
_LEAST_SPREAD = 0.005
_ROUNDS = 30


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Coefficients [features], none negative, of `seconds = features @ coefficients`."""
    x = np.asarray(features, np.float64)
    measured = np.asarray(seconds, np.float64)
    scale = np.maximum(x.max(axis=0), 1e-30)
    x = x / scale
    told = np.median(measured / x.sum(axis=1)) * x.sum(axis=1)
    found = np.zeros(x.shape[1])
    for turn in range(_ROUNDS):
        errors = np.abs(np.log(measured / told))
        spread = max(_SPREAD * float(np.median(errors)), _LEAST_SPREAD)
        # Absolute errors at first, which no outlier can drag far; then Huber's, which waste less of what is right.
        edge = spread / 10 if turn < _ROUNDS // 2 else _HUBER * spread
        weights = np.sqrt(np.minimum(1.0, edge / np.maximum(errors, 1e-12)))
        # Relative to what is usual for such work: relative to what was measured, times too short would rule.
        usual = weights / np.sqrt(measured * told)
        found = _non_negative(x * usual[:, None], measured * usual)
        told = np.maximum(x @ found, 1e-12)
    return tuple((found / scale).tolist())


def predicted(features: Sequence[Sequence[float]], coefficients: Sequence[float]) -> Floats:
    """Seconds [points]."""
    told: Floats = np.asarray(features, np.float64) @ np.asarray(coefficients, np.float64)
    return told


def fit_error(features: Sequence[Sequence[float]], seconds: Sequence[float], coefficients: Sequence[float]) -> FitError:
    """How far the fit is from what it was fitted to."""
    measured = np.asarray(seconds, np.float64)
    errors = np.abs(predicted(features, coefficients) - measured) / measured
    median, p90, worst = np.quantile(errors, (0.5, 0.9, 1.0)).round(4).tolist()
    return FitError(points=len(measured), median=median, p90=p90, worst=worst)


def _non_negative(rows: Floats, target: Floats) -> Floats:
    """The best of the solutions in which some coefficients are 0: with three of them there are seven."""
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

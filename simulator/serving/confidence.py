"""Means over seeds with 95 % confidence intervals (Student's t), and shares with Wilson's intervals. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import NormalDist, fmean, stdev

from conductor.policy.admission_evaluation import interval

_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean with its 95 % confidence interval; `low` = `high` = `mean` for a single value."""

    mean: float
    low: float
    high: float


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values, one per seed, or of their paired differences."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, mean, mean)
    half = _student(len(values) - 1) * stdev(values) / sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def ratio_of(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Return the geometric mean of the ratios of two sequences of positive values, paired by seed."""
    logs = mean_of([log(a / b) for a, b in zip(over, under, strict=True)])
    return Estimate(exp(logs.mean), exp(logs.low), exp(logs.high))


def share_of(count: int, total: int) -> Estimate | None:
    """Return the share `count` of `total`; None if `total` is 0."""
    if not total:
        return None
    return Estimate(count / total, *interval(count, total))


def _student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, otherwise by Hill's expansion
    (Abramowitz & Stegun 26.7.5), within 0.5 %."""
    if freedom == 1:
        return 12.706204736
    if freedom == 2:
        return 4.302652730
    z, n = _Z, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )

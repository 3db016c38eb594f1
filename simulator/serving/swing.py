"""How prefill and decode load swing against each other: Mooncake's trouble with judging by load as it is now (§7.2)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Swing", "swing_of"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Swing:
    """Of two loads, each a share of what its objective allows, about their slow trend.

    `lag_correlation` is the most negative correlation of prefill load with decode load `lag_s` later: -1 would be two
    loads in perfect anti-phase.
    """

    prefill_mean: float
    decode_mean: float
    prefill_std: float
    decode_std: float
    lag_correlation: float
    lag_s: float


def swing_of(
    prefill: Floats, decode: Floats, *, step_s: float, trend_s: float = 600.0, most_lag_s: float = 60.0
) -> Swing:
    """Of two series [samples], one sample every `step_s` seconds.

    The trend, a moving mean over `trend_s`, is taken off first. Series shorter than twice the longest lag have no
    correlation: 0.
    """
    most_lag = round(most_lag_s / step_s)
    x, y = (_detrended(series, max(1, round(trend_s / step_s))) for series in (prefill, decode))
    correlation, lag = 0.0, 0
    if len(x) >= 2 * most_lag:
        for shift in range(most_lag + 1):
            found = _correlation(x[: len(x) - shift], y[shift:])
            if found < correlation:
                correlation, lag = found, shift
    return Swing(
        prefill_mean=float(np.mean(prefill)) if len(prefill) else 0.0,
        decode_mean=float(np.mean(decode)) if len(decode) else 0.0,
        prefill_std=float(np.std(x)) if len(x) else 0.0,
        decode_std=float(np.std(y)) if len(y) else 0.0,
        lag_correlation=correlation,
        lag_s=lag * step_s,
    )


def _detrended(series: Floats, window: int) -> Floats:
    if not len(series):
        return series
    sums = np.concatenate([[0.0], np.cumsum(series)])
    places = np.arange(len(series))
    low, high = np.maximum(0, places - window // 2), np.minimum(len(series), places + window // 2 + 1)
    trend: Floats = (sums[high] - sums[low]) / (high - low)
    return series - trend


def _correlation(x: Floats, y: Floats) -> float:
    if np.std(x) == 0 or np.std(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])

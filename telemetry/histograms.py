"""Duration histograms in the form that nodes report among their counters: NAME_le_10ms, …, NAME_count, NAME_sum_ms."""

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["DurationHistogram", "histogram_names", "histogram_of", "is_part"]

_SUM: Final = "_sum_ms"
_BOUND: Final = re.compile(r"([0-9]+)(us|ms|s|m|h|d)")
_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class DurationHistogram:
    """Cumulative histogram: `at_most[i]` durations were at most `bounds_s[i]`, of `count` with the sum `sum_s`."""

    bounds_s: tuple[float, ...]  # ascending
    at_most: tuple[float, ...]
    count: float
    sum_s: float

    def quantile_s(self, quantile: float) -> float | None:
        """Return the quantile, interpolated within its bucket as Prometheus does; None if the histogram is empty.

        A quantile beyond the last bound is that bound.
        """
        if not self.count or not self.bounds_s:
            return None
        wanted = quantile * self.count
        i = bisect_left(self.at_most, wanted)
        if i == len(self.bounds_s):
            return self.bounds_s[-1]
        start_s, before = (self.bounds_s[i - 1], self.at_most[i - 1]) if i else (0.0, 0.0)
        inside = self.at_most[i] - before
        return start_s + (self.bounds_s[i] - start_s) * ((wanted - before) / inside if inside else 1.0)


def histogram_names(counters: Mapping[str, float]) -> list[str]:
    """Return the names of the histograms among the counters."""
    return [name.removesuffix(_SUM) for name in counters if name.endswith(_SUM)]


def histogram_of(counters: Mapping[str, float], name: str) -> DurationHistogram:
    """Return the histogram of that name; empty if the counters have none."""
    start = f"{name}_le_"
    buckets = sorted(
        (int(found[1]) * _UNITS_S[found[2]], count)
        for key, count in counters.items()
        if key.startswith(start) and (found := _BOUND.fullmatch(key, len(start)))
    )
    bounds, at_most = zip(*buckets, strict=True) if buckets else ((), ())
    return DurationHistogram(
        bounds, at_most, counters.get(f"{name}_count", 0.0), counters.get(f"{name}{_SUM}", 0.0) / 1e3
    )


def is_part(key: str, names: list[str]) -> bool:
    """Return True if a counter is part of one of these histograms."""
    return any(key.startswith((f"{name}_le_", f"{name}_count", f"{name}{_SUM}")) for name in names)

"""Times counted in a bounded number of buckets."""

from bisect import bisect_left

__all__ = ["Histogram"]

_MS = 1_000_000
_BOUNDS_NS = {
    "10ms": 10 * _MS,
    "100ms": 100 * _MS,
    "1s": 1000 * _MS,
    "10s": 10_000 * _MS,
    "1m": 60_000 * _MS,
    "5m": 300_000 * _MS,
    "15m": 900_000 * _MS,
    "1h": 3_600_000 * _MS,
    "6h": 21_600_000 * _MS,
    "1d": 86_400_000 * _MS,
}


class Histogram:
    """How often a duration was at most so long. Nothing in it ever falls."""

    _NAMES = tuple(_BOUNDS_NS)
    _BOUNDS = tuple(_BOUNDS_NS.values())

    def __init__(self) -> None:
        self._counts = [0] * (len(self._BOUNDS) + 1)
        self._total_ns = 0

    def add(self, duration_ns: int, count: int = 1) -> None:
        """Count `count` times the same duration."""
        self._counts[bisect_left(self._BOUNDS, duration_ns)] += count
        self._total_ns += max(0, duration_ns) * count

    def counters(self, prefix: str) -> dict[str, int]:
        """`prefix_le_1s` and so on: how many were at most that long; `prefix_count`: all; `prefix_sum_ms`."""
        found: dict[str, int] = {}
        total = 0
        for name, count in zip(self._NAMES, self._counts, strict=False):
            total += count
            found[f"{prefix}_le_{name}"] = total
        return found | {f"{prefix}_count": total + self._counts[-1], f"{prefix}_sum_ms": self._total_ns // _MS}

"""Estimate of a rail's speed from its completions, robust to single late ones."""

from collections import deque
from statistics import median
from typing import Final

_NS: Final = 1_000_000_000
WEIGHT: Final = 0.3
"""Weight of a new sample in the moving average."""
MEDIAN_OF: Final = 5
"""Number of samples whose median is averaged, so that one or two late completions have no effect."""
FORGET_NS: Final = 2 * _NS
"""Half-life of the difference from the nominal speed while there are no samples."""


class RailSpeed:
    """Speed of one rail in bytes per second: a moving average of medians, initially the nominal speed.

    Without samples it decays towards the nominal speed, so that a rail that gets no work because it was slow is tried
    again.
    """

    def __init__(self, nominal_bytes_s: float) -> None:
        self.nominal_bytes_s = nominal_bytes_s
        self._average: float | None = None
        self._recent: deque[float] = deque(maxlen=MEDIAN_OF)
        self._sampled_ns = 0

    def sample(self, nbytes: int, took_ns: int, now_ns: int) -> None:
        """Add a sample: `nbytes` completed in `took_ns`, during which the rail was never idle."""
        before = self.bytes_s(now_ns)
        self._recent.append(nbytes * _NS / max(took_ns, 1))
        # While there are few samples, one may change the average by at most a factor of four.
        typical = min(max(median(self._recent), before / 4), before * 4)
        self._average = before + WEIGHT * (typical - before)
        self._sampled_ns = now_ns

    @property
    def measured_bytes_s(self) -> float | None:
        """The last estimate from samples, however old; None without samples."""
        return self._average

    def bytes_s(self, now_ns: int) -> float:
        """Return the estimate at this time, at least 1."""
        if self._average is None:
            return self.nominal_bytes_s
        kept: float = 0.5 ** (max(0, now_ns - self._sampled_ns - FORGET_NS) / FORGET_NS)
        return max(1.0, self.nominal_bytes_s + kept * (self._average - self.nominal_bytes_s))

    def forget(self) -> None:
        """Discard all samples, since the rail was rebuilt."""
        self._average = None
        self._recent.clear()

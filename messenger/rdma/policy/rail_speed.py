"""Estimate of a rail's speed from its completions, robust to single late ones."""

from collections import deque
from statistics import median
from typing import Final

_NS: Final = 1_000_000_000
WEIGHT: Final = 0.3
"""Weight of a new sample in the moving average."""
MEDIAN_OF: Final = 5
"""Samples of which the median is taken in: one or two late completions in five change nothing."""
FORGET_NS: Final = 2 * _NS
"""Half-life of the distance to the nominal speed while there are no samples."""


class RailSpeed:
    """Bytes per second of one rail: a moving average of medians, initially the nominal speed.

    Without samples it decays towards the nominal speed, so that a rail that got no work because it was slow once is
    tried again.
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
        # Until there is a median to trust, a sample may move the average by a factor of four at most.
        typical = min(max(median(self._recent), before / 4), before * 4)
        self._average = before + WEIGHT * (typical - before)
        self._sampled_ns = now_ns

    def bytes_s(self, now_ns: int) -> float:
        """Return the estimate at this time; always above zero."""
        if self._average is None:
            return self.nominal_bytes_s
        kept: float = 0.5 ** (max(0, now_ns - self._sampled_ns - FORGET_NS) / FORGET_NS)
        return max(1.0, self.nominal_bytes_s + kept * (self._average - self.nominal_bytes_s))

    def forget(self) -> None:
        """Discard all samples, since the rail was rebuilt."""
        self._average = None
        self._recent.clear()

"""Times between the tokens of one answer, of which an endless one keeps a bounded number. Pure."""

from array import array
from typing import Final

ENDLESS_MOST: Final = 4096


class TokenIntervals:
    """Seconds between tokens, in order: all of them, or the last `most`."""

    def __init__(self, most: int = 0) -> None:
        """`most`: number that is kept; 0: all."""
        self._most = most
        self._kept = array("f")

    def add(self, interval_s: float) -> None:
        """Append the time before the next token."""
        self._kept.append(interval_s)
        if self._most and len(self._kept) >= 2 * self._most:  # not at each token: the rest is moved
            del self._kept[: -self._most]

    @property
    def last_s(self) -> float:
        """Time before the last token; only after `add`."""
        return self._kept[-1]

    @property
    def slow_s(self) -> float:
        """Mean of the longest 10 % (rounded up); 0 if there are none."""
        kept = sorted(self._kept[-self._most :])
        count = -(-len(kept) // 10)
        return sum(kept[-count:]) / count if count else 0.0

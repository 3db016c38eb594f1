"""Which peers are not asked for a while, since asking them costs a deadline each time. Pure; time is an argument.

When an engine is past hope: its steps fail, one after the other, whatever they compute.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class _Trouble:
    count: int  # failures in a row
    until_s: float  # asked by nobody before
    is_tried: bool = False  # by one caller, since the last failure


class CircuitBreaker:
    """A peer that failed is left alone for `hold_off_s`, doubling up to `longest_s` with each further failure.

    Then one caller is let through to find out; the others stay away until its call has ended, or for another while.
    """

    def __init__(self, hold_off_s: float, longest_s: float) -> None:
        self._hold_off_s = hold_off_s
        self._longest_s = longest_s
        self._troubles: dict[str, _Trouble] = {}

    def try_pass(self, peer: str, now_s: float) -> bool:
        """May the peer be asked now? Of those who ask while it is in trouble, one per while is told yes."""
        trouble = self._troubles.get(peer)
        if trouble is None:
            return True
        if now_s < trouble.until_s:
            return False
        trouble.until_s = now_s + self._pause_s(trouble.count)
        trouble.is_tried = True
        return True

    def failed(self, peer: str, now_s: float) -> None:
        """A call to the peer went unanswered. Of calls that were under way together, the first one counts."""
        former = self._troubles.get(peer)
        count = 1 if former is None else former.count + former.is_tried
        self._troubles[peer] = _Trouble(count, now_s + self._pause_s(count))

    def succeeded(self, peer: str) -> None:
        """The peer answered, were it a refusal."""
        self._troubles.pop(peer, None)

    def _pause_s(self, count: int) -> float:
        return float(min(self._hold_off_s * 2 ** (count - 1), self._longest_s))


# More than the five attempts that one request is given: a request whose steps always fail must not, on its own, end
# the node that others are served by. Fewer would; many more would let each of them fail requests for nothing.
MAX_FAILED_STEPS: Final = 8


class EngineHealth:
    """Counts the steps that failed since the last one that did not."""

    def __init__(self, max_failed_steps: int = MAX_FAILED_STEPS) -> None:
        self._max_failed_steps = max_failed_steps
        self.num_failed = 0

    def failed(self) -> None:
        """A step failed."""
        self.num_failed += 1

    def succeeded(self) -> None:
        """A step computed something."""
        self.num_failed = 0

    @property
    def is_broken(self) -> bool:
        """No step can be expected to succeed: only another process may do better."""
        return self.num_failed >= self._max_failed_steps

"""Which peers are not asked for a while, since asking them costs a deadline each time. Pure; time is an argument."""

from dataclasses import dataclass


@dataclass(slots=True)
class _Trouble:
    count: int  # failures in a row
    until_s: float  # asked by nobody before
    is_tried: bool = False  # by one caller, since the last failure


class Breaker:
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

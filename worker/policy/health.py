"""Failure detection: a circuit breaker for peers that hang, and the health of the engine. Pure; time is an argument."""

from dataclasses import dataclass
from typing import Final


@dataclass(slots=True)
class _Trouble:
    count: int  # failures in a row
    until_s: float  # the peer is not called before this time
    is_tried: bool = False  # a caller has tried since the last failure


class CircuitBreaker:
    """Circuit breaker that skips a failed peer for `hold_off_s`, doubled up to `longest_s` with each further failure.

    After the pause one caller may try the peer; the others keep skipping it until that call has ended, or for another
    pause.
    """

    def __init__(self, hold_off_s: float, longest_s: float) -> None:
        self._hold_off_s = hold_off_s
        self._longest_s = longest_s
        self._troubles: dict[str, _Trouble] = {}

    def try_pass(self, peer: str, now_s: float) -> bool:
        """Return True if the peer may be called now. After a failure, one caller per pause gets True."""
        trouble = self._troubles.get(peer)
        if trouble is None:
            return True
        if now_s < trouble.until_s:
            return False
        trouble.until_s = now_s + self._pause_s(trouble.count)
        trouble.is_tried = True
        return True

    def failed(self, peer: str, now_s: float) -> None:
        """Record a call without a reply. Of concurrent failed calls only the first one counts."""
        former = self._troubles.get(peer)
        count = 1 if former is None else former.count + former.is_tried
        self._troubles[peer] = _Trouble(count, now_s + self._pause_s(count))

    def succeeded(self, peer: str) -> None:
        """Record a reply, including a refusal."""
        self._troubles.pop(peer, None)

    def _pause_s(self, count: int) -> float:
        return float(min(self._hold_off_s * 2 ** (count - 1), self._longest_s))


# More than the five attempts of one request: a request whose steps always fail must not end the node on its own. A much
# larger limit would fail more requests on a broken engine.
MAX_FAILED_STEPS: Final = 8


class EngineHealth:
    """Counter of consecutive failed steps."""

    def __init__(self, max_failed_steps: int = MAX_FAILED_STEPS) -> None:
        self._max_failed_steps = max_failed_steps
        self.num_failed = 0

    def failed(self) -> None:
        """Record a failed step."""
        self.num_failed += 1

    def succeeded(self) -> None:
        """Record a step that computed something."""
        self.num_failed = 0

    @property
    def is_broken(self) -> bool:
        """True if no step can be expected to succeed, so that the process must be restarted."""
        return self.num_failed >= self._max_failed_steps


class StepWatch:
    """Tells a step of the engine that never ends from one that takes long.

    It counts looks, not time: a process that was stopped for a while has looked no more often than its engine could
    compute.
    """

    LOOKS: Final = 10  # within the longest step

    def __init__(self) -> None:
        self._step = self._looks = 0

    def look(self, step: int) -> bool:
        """Return True if all of the last LOOKS looks have seen the same step in progress; 0 is none."""
        self._looks = self._looks + 1 if step and step == self._step else 0
        self._step = step
        return self._looks >= self.LOOKS

"""How long to wait before the next try: longer after each one in vain, up to a bound, and not in step with others."""

import random

__all__ = ["Backoff"]

_GROWTH = 1.6


class Backoff:
    """One line of tries. The first waits are short, for what is back in a moment must be found in a moment."""

    def __init__(self, first_s: float = 0.2, most_s: float = 3.0, rng: random.Random | None = None) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._step_s = first_s
        self._rng = rng or random.Random()

    def succeeded(self) -> None:
        """The next wait is a first one again."""
        self._step_s = self._first_s

    def failed(self) -> float:
        """Seconds to wait now: between half of this step and all of it."""
        step_s, self._step_s = self._step_s, min(self._step_s * _GROWTH, self._most_s)
        return step_s * self._rng.uniform(0.5, 1.0)

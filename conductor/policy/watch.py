"""Tells noise, outliers and lasting changes apart in a series of errors of predictions. Deterministic; no clock."""

from math import copysign, exp

__all__ = ["Watch"]

_FIRST_SPREAD = 0.15
_SPREADS = (0.01, 0.5)  # the least and the most that is taken for noise
_SPREAD_STEP = 0.1  # e-folds by which the spread moves per error: its size does not matter, so outliers cannot drag it
_LEAST_BAND = 0.2
_ISOLATED = 2  # outliers that agree with no more than one other one
_BAND = 4.0  # spreads


class Watch:
    """Over logarithms of measured / predicted.

    An error beyond the band (0.2 and four median errors) is an outlier: it counts as much as the band's edge. Outliers
    that agree with each other, `streak` of them nearly in a row, are no outliers but a change; a shorter burst, or one
    that says something else each time, never is. While it may be the beginning of a change, nothing is learned from it.
    """

    def __init__(self, streak: int) -> None:
        self._streak = streak
        self._spread = _FIRST_SPREAD  # running median of |error|
        self._agreeing = 0
        self._level = 0.0  # mean of those that agree
        self.num = 0
        self.num_outliers = 0

    @property
    def band(self) -> float:
        """Errors of up to so much are noise."""
        return _LEAST_BAND + _BAND * self._spread

    def note(self, error: float) -> tuple[float | None, float]:
        """(the error to learn from, if any; the change to believe in from now on: 0 for none)."""
        band = self.band
        self.num += 1
        if abs(error) <= band:
            self._widen(error)
            self._agreeing = max(0, self._agreeing - 2)
            return error, 0.0
        self.num_outliers += 1
        if self._agreeing and abs(error - self._level) > band:
            self._agreeing -= 1
        else:
            self._agreeing += 1
            self._level = error if self._agreeing == 1 else self._level + (error - self._level) / self._agreeing
        if self._agreeing <= _ISOLATED:
            self._widen(error)
            return copysign(band, error), 0.0
        if self._agreeing < self._streak:
            return None, 0.0
        self._agreeing = 0
        return min(max(error - self._level, -band), band), self._level

    def _widen(self, error: float) -> None:
        step = _SPREAD_STEP if abs(error) > self._spread else -_SPREAD_STEP
        self._spread = min(max(self._spread * exp(step), _SPREADS[0]), _SPREADS[1])

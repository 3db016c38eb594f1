"""Pacing of steps: sleeps until their durations have passed, without spinning, and measures lateness."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_WITHOUT_REST_S = 0.005  # a step that begins within this time follows the last one immediately
_WINDOW_S = 10.0
_TOLERATED = 0.1  # lateness as a share of the planned duration


class Pace:
    """Clock of one engine.

    A late step is compensated by the steps that immediately follow, by at most their own durations; the rest is
    counted.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._now, self._sleep = now, sleep
        self._began = self._ended = 0.0
        self._behind = 0.0
        self.steps = 0
        self.planned_s = 0.0  # planned duration of all steps
        self.late_s = 0.0  # total lateness
        self._window: tuple[float, float, float] | None = None  # start, planned_s and late_s at that time

    def begin(self) -> None:
        """Begin a step."""
        now = self._now()
        self._began = now
        if now - self._ended < _WITHOUT_REST_S:
            self._began -= self._behind
        else:
            self.late_s += self._behind
        self._behind = 0.0

    def wait(self, seconds: float) -> None:
        """Sleep until `seconds` of the step have passed."""
        left = self._began + seconds - self._now()
        if left > 0:
            self._sleep(left)

    def run_out(self, action: Callable[[], None]) -> None:
        """Run an action whose time does not count as part of the step."""
        began = self._now()
        action()
        self._began += self._now() - began

    def end(self, seconds: float) -> None:
        """End a step with a planned duration of `seconds`."""
        self.wait(seconds)
        self._ended = self._now()
        self.steps += 1
        self.planned_s += seconds
        if seconds:  # an engine without durations cannot be late
            over = self._ended - self._began - seconds
            self._behind = min(over, seconds)  # a step can make up for at most its own duration
            self.late_s += over - self._behind
            self._complain()

    def _complain(self) -> None:
        began, planned_s, late_s = self._window or (self._ended, self.planned_s, self.late_s)
        self._window = (began, planned_s, late_s)
        if self._ended - began < _WINDOW_S:
            return
        planned_s, late_s = self.planned_s - planned_s, self.late_s - late_s
        if late_s > _TOLERATED * planned_s:
            log.warning(
                "this machine cannot keep up with the profile: steps of %.2f s in total took %.2f s longer in the last "
                "%.0f s; measurements are slower than the profile",
                *(planned_s, late_s, self._ended - began),
            )
        self._window = None

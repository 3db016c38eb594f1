"""Which rate to try next: doubling, then bisection, then the border again. Pure: verdicts in, rates out.

Rates are points of a geometric grid, start · (1 + resolution)^k, so that neighbours differ by the resolution. Measured
verdicts are noisy near the border, so a rate is judged by the majority of at most three trials, and the answer is a
rate that passed twice beside a neighbour that failed twice; one lucky or unlucky step changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

VOTES = 2
"""Equal verdicts that settle a rate at the border; with two kinds of them, three trials always do."""


class Verdict(StrEnum):
    """Of one step. `INVALID`: the sender could not keep up, which says nothing of the server."""

    PASS = "pass"
    FAIL = "fail"
    INVALID = "invalid"


@dataclass(frozen=True)
class Finding:
    """The answer. `rate`: the largest that meets the objectives, None when even the lowest does not.

    `bounded`: a neighbour was seen to fail; otherwise `rate` is what could be tried, and the capacity is that or more.
    `sender_limited`: the sender, not the server, was the bound.
    """

    rate: float | None
    bounded: bool
    sender_limited: bool


@dataclass
class _Votes:
    passes: int = 0
    fails: int = 0
    invalid: int = 0

    @property
    def blocked(self) -> bool:
        """The sender failed to keep up at this rate as often as it takes to believe it."""
        return self.invalid >= VOTES

    @property
    def tied(self) -> bool:
        return self.passes == self.fails > 0 and not self.blocked

    @property
    def passed(self) -> bool:
        return self.passes > self.fails and not self.blocked

    @property
    def failed(self) -> bool:
        return self.fails > self.passes or self.blocked

    @property
    def settled(self) -> bool:
        return self.blocked or max(self.passes, self.fails) >= VOTES


@dataclass
class CapacitySearch:
    """`start`: the first rate, `resolution`: the answer's, as a share of it; `least`, `most`: no rate beyond these.

    Call `next_rate`, run a step at it, `record` its verdict, until it is None; then `finding` is the answer. Every call
    sequence ends: there are finitely many rates on the grid and at most three valid trials of each.
    """

    start: float
    resolution: float = 0.1
    least: float = 0.01
    most: float = 1e6
    _votes: dict[int, _Votes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that leave nothing to search."""
        if not (0 < self.least <= self.start <= self.most < math.inf and 0 < self.resolution <= 1):
            raise ValueError(f"cannot search from {self.start} within {self.least}..{self.most} by {self.resolution}")

    def rate_of(self, point: int) -> float:
        """The rate of a grid point; 0 is the start."""
        return self.start * (1 + self.resolution) ** point

    def next_rate(self) -> float | None:
        """The rate to try next; None when the answer is settled."""
        point = self._next_point()
        return None if point is None else self.rate_of(point)

    def record(self, verdict: Verdict) -> None:
        """The verdict on a step at `next_rate`. Raises ValueError when nothing was to be tried."""
        point = self._next_point()
        if point is None:
            raise ValueError("the search is over")
        votes = self._votes.setdefault(point, _Votes())
        if verdict is Verdict.PASS:
            votes.passes += 1
        elif verdict is Verdict.FAIL:
            votes.fails += 1
        else:
            votes.invalid += 1

    @property
    def finding(self) -> Finding:
        """The answer so far; final once `next_rate` is None."""
        low, high = self._border()
        blocked = high is not None and self._votes[high].blocked
        return Finding(
            rate=None if low is None else self.rate_of(low),
            bounded=high is not None and not blocked,
            sender_limited=blocked,
        )

    def validate(self) -> None:
        """Raises AssertionError if a rate has more trials than can be needed, or the border has none."""
        for votes in self._votes.values():
            assert max(votes.passes, votes.fails, votes.invalid) <= VOTES, votes
        low, high = self._border()
        assert low is None or high is None or low < high, (low, high)

    def _border(self) -> tuple[int | None, int | None]:
        """(highest point below the first failing one that passed, the first failing one). A point at which the sender
        failed bounds the search as if the server had."""
        high = min((p for p, v in self._votes.items() if v.failed), default=None)
        low = max((p for p, v in self._votes.items() if v.passed and (high is None or p < high)), default=None)
        return low, high

    def _next_point(self) -> int | None:
        low, high = self._border()
        bottom, top = self._limits()
        if (tied := self._tied_between(low, high)) is not None:
            return tied
        if low is None and high is None:
            return 0
        if high is None:
            assert low is not None
            return self._unsettled(low) if low >= top else min(low + self._doubling(), top)
        if low is None:
            return self._unsettled(high) if high <= bottom else max(high - self._doubling(), bottom)
        return (low + high) // 2 if high - low > 1 else self._unsettled(low, high)

    def _tied_between(self, low: int | None, high: int | None) -> int | None:
        """A rate on which the votes are divided and which may move the border."""
        above = -math.inf if low is None else low
        below = math.inf if high is None else high
        return min((p for p, v in self._votes.items() if v.tied and above < p < below), default=None)

    def _unsettled(self, *points: int) -> int | None:
        """The first of these points that has not been judged alike twice."""
        return next((p for p in points if not self._votes[p].settled), None)

    def _doubling(self) -> int:
        return max(round(math.log(2) / math.log1p(self.resolution)), 1)

    def _limits(self) -> tuple[int, int]:
        """The lowest and the highest point."""
        step = math.log1p(self.resolution)
        bottom = math.ceil(math.log(self.least / self.start) / step - 1e-9)
        return bottom, math.floor(math.log(self.most / self.start) / step + 1e-9)

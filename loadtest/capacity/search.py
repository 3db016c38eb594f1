"""Search for the capacity of a server: the next rate to try, the objectives at a rate, and the verdict on a step. Pure.

The search doubles the rate, then bisects, then repeats the rates at the border. Rates are points of a geometric grid,
start · (1 + resolution)^k, so that neighbours differ by the resolution. Verdicts are noisy near the border, so a rate
is decided by the majority of at most three trials. The result is a rate that passed twice whose upper neighbour failed
twice; a single outlier does not change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from loadtest.bench.results import latencies_of, meets
from loadtest.errors import SettingInvalid
from loadtest.record import RequestRecord, SendOutcome

VOTES = 2
"""Equal verdicts that decide a rate at the border. With two possible verdicts, three trials always suffice."""


class StepVerdict(StrEnum):
    """Verdict on one step. `INVALID`: the sender could not keep up, so the step does not measure the server."""

    PASS = "pass"
    FAIL = "fail"
    INVALID = "invalid"


@dataclass(frozen=True)
class CapacityFinding:
    """Result of the search. `rate`: the largest that meets the objectives, None if even the lowest does not.

    `bounded`: the next higher rate failed; otherwise `rate` is a lower bound of the capacity. `sender_limited`: the
    sender, not the server, was the bottleneck.
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
        """True if the sender failed to keep up at this rate in VOTES trials."""
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
    """State of the search.

    `start`: the first rate; `resolution`: relative precision of the result; `least`, `most`: range of rates to try.

    Call `next_rate`, run a step at that rate and `record` its verdict, until `next_rate` returns None; then `finding`
    is the result. The search terminates: the grid has finitely many rates and each has at most three valid trials.
    """

    start: float
    resolution: float = 0.1
    least: float = 0.01
    most: float = 1e6
    _votes: dict[int, _Votes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate the fields. Raises ValueError if the range of rates is empty."""
        if not (0 < self.least <= self.start <= self.most < math.inf and 0 < self.resolution <= 1):
            raise ValueError(f"cannot search from {self.start} within {self.least}..{self.most} by {self.resolution}")

    def rate_of(self, point: int) -> float:
        """Return the rate of a grid point; point 0 is the start."""
        return self.start * (1 + self.resolution) ** point

    def next_rate(self) -> float | None:
        """Return the rate to try next, or None when the search is complete."""
        point = self._next_point()
        return None if point is None else self.rate_of(point)

    def record(self, verdict: StepVerdict) -> None:
        """Record the verdict on a step at `next_rate`. Raises ValueError if the search is complete."""
        point = self._next_point()
        if point is None:
            raise ValueError("the search is over")
        votes = self._votes.setdefault(point, _Votes())
        if verdict is StepVerdict.PASS:
            votes.passes += 1
        elif verdict is StepVerdict.FAIL:
            votes.fails += 1
        else:
            votes.invalid += 1

    @property
    def finding(self) -> CapacityFinding:
        """The result so far; final once `next_rate` returns None."""
        low, high = self._border()
        blocked = high is not None and self._votes[high].blocked
        return CapacityFinding(
            rate=None if low is None else self.rate_of(low),
            bounded=high is not None and not blocked,
            sender_limited=blocked,
        )

    def validate(self) -> None:
        """Raise AssertionError if a rate has too many trials or the border is inconsistent."""
        for votes in self._votes.values():
            assert max(votes.passes, votes.fails, votes.invalid) <= VOTES, votes
        low, high = self._border()
        assert low is None or high is None or low < high, (low, high)

    def _border(self) -> tuple[int | None, int | None]:
        """Return (highest passed point below the first failed one, first failed point).

        A point at which the sender failed bounds the search as if the server had failed.
        """
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
        """Return a point with tied votes whose decision may move the border."""
        above = -math.inf if low is None else low
        below = math.inf if high is None else high
        return min((p for p, v in self._votes.items() if v.tied and above < p < below), default=None)

    def _unsettled(self, *points: int) -> int | None:
        """Return the first of these points that does not have VOTES equal verdicts."""
        return next((p for p in points if not self._votes[p].settled), None)

    def _doubling(self) -> int:
        return max(round(math.log(2) / math.log1p(self.resolution)), 1)

    def _limits(self) -> tuple[int, int]:
        """Return the lowest and the highest grid point."""
        step = math.log1p(self.resolution)
        bottom = math.ceil(math.log(self.least / self.start) / step - 1e-9)
        return bottom, math.floor(math.log(self.most / self.start) / step + 1e-9)


WARM_SHARE = 0.2
"""Fraction of a step's requests, in order of arrival, that are not evaluated because they reach an idle server."""
LEAST_REQUESTS = 50


@dataclass(frozen=True)
class CapacityObjective:
    """Objectives of a capacity search.

    `bounds_ms`: upper bounds of ttft, tpot and e2el, each to hold at `percentile` of the completed requests; at most
    the fraction `max_lost_share` of the requests may be rejected or fail. `step_s`: duration of a step in seconds; a
    step sends at least 50 requests.
    """

    bounds_ms: Mapping[str, float]
    percentile: float = 90.0
    max_lost_share: float = 0.01
    step_s: float = 30.0

    def __post_init__(self) -> None:
        """Validate the fields. Raises SettingInvalid naming the flag."""
        if not self.bounds_ms:
            raise SettingInvalid("--find-capacity needs objectives; give --goodput ttft:MS tpot:MS")
        if not 0 < self.percentile <= 100:
            raise SettingInvalid(f"--capacity-percentile is {self.percentile:g}; expected above 0, at most 100")
        if not 0 <= self.max_lost_share < 1:
            raise SettingInvalid(f"--capacity-max-lost is {self.max_lost_share:g}; expected from 0 to below 1")
        if not 0 < self.step_s < math.inf:
            raise SettingInvalid(f"--capacity-step is {self.step_s:g}; expected seconds, above 0")

    def requests_at(self, rate: float) -> int:
        """Return the number of requests of a step at that rate."""
        return max(math.ceil(rate * self.step_s), LEAST_REQUESTS)

    def describe(self) -> str:
        """Return the objectives as one sentence."""
        bounds = ", ".join(f"{name.upper()} ≤ {bound:g} ms" for name, bound in self.bounds_ms.items())
        return (
            f"{bounds} at p{self.percentile:g} of completed requests; at most {self.max_lost_share:.1%} rejected or "
            f"failed; {self.step_s:g} s per step, at least {LEAST_REQUESTS} requests, of which the first "
            f"{WARM_SHARE:.0%} are not evaluated"
        )


@dataclass(frozen=True)
class CapacityStep:
    """One trial of a rate.

    `judged`: number of evaluated requests. `latency_ms`: each metric at the objective's percentile, None if no request
    was completed. `attainment`: fraction of the evaluated requests that met every bound. `reasons`: why the step did
    not pass.
    """

    rate: float
    verdict: StepVerdict
    judged: int
    lost_share: float
    latency_ms: Mapping[str, float | None]
    attainment: float
    reasons: tuple[str, ...]

    @property
    def goodput_rps(self) -> float:
        """Requests per second that met every bound."""
        return self.rate * self.attainment

    def as_json(self) -> dict[str, Any]:
        """Return the step as an entry of capacity.json."""
        return {**vars(self), "verdict": self.verdict.value, "goodput_rps": self.goodput_rps}


def judge_step(
    rate: float, records: Sequence[RequestRecord], objective: CapacityObjective, invalid_reasons: Sequence[str]
) -> CapacityStep:
    """Return the verdict on one step from the records of its requests and the reasons why the run is invalid."""
    judged = sorted(records, key=lambda r: r.due_s)[int(WARM_SHARE * len(records)) :]
    completed = [r for r in judged if r.outcome is SendOutcome.COMPLETED]
    lost_share = 1 - len(completed) / len(judged) if judged else 1.0
    found = [latencies_of(r) for r in completed]
    latency_ms = {
        metric: 1000 * float(np.percentile([x.of(metric) for x in found], objective.percentile)) if found else None
        for metric in objective.bounds_ms
    }
    reasons = [
        f"p{objective.percentile:g} {metric.upper()} {value:.4g} ms > {objective.bounds_ms[metric]:g} ms"
        for metric, value in latency_ms.items()
        if value is not None and value > objective.bounds_ms[metric]
    ]
    if lost_share > objective.max_lost_share:
        reasons.append(f"{lost_share:.1%} rejected or failed")
    verdict = StepVerdict.INVALID if invalid_reasons else StepVerdict.FAIL if reasons else StepVerdict.PASS
    met = sum(meets(r, objective.bounds_ms) for r in judged)
    return CapacityStep(
        rate=rate,
        verdict=verdict,
        judged=len(judged),
        lost_share=lost_share,
        latency_ms=latency_ms,
        attainment=met / len(judged) if judged else 0.0,
        reasons=(*invalid_reasons, *reasons),
    )

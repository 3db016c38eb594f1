"""What a server has to keep at a rate, and whether it did in one step. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.bench.figures import latencies_of, meets
from loadtest.capacity.search import Verdict
from loadtest.errors import SettingInvalid
from loadtest.record import Outcome, RequestRecord

WARM_SHARE = 0.2
"""The first part of a step meets an empty server and is not judged."""
LEAST_REQUESTS = 50


@dataclass(frozen=True)
class CapacityObjective:
    """`bounds_ms`: of ttft, tpot, e2el, each to be kept at `percentile` of the completed requests; at most
    `max_lost_share` of the requests may be rejected or fail. `step_s`: a step sends for so long, and never fewer than
    50 requests."""

    bounds_ms: Mapping[str, float]
    percentile: float = 90.0
    max_lost_share: float = 0.01
    step_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises SettingInvalid naming the flag."""
        if not self.bounds_ms:
            raise SettingInvalid("--find-capacity needs objectives; give --goodput ttft:MS tpot:MS")
        if not 0 < self.percentile <= 100:
            raise SettingInvalid(f"--capacity-percentile is {self.percentile:g}; expected above 0, at most 100")
        if not 0 <= self.max_lost_share < 1:
            raise SettingInvalid(f"--capacity-max-lost is {self.max_lost_share:g}; expected from 0 to below 1")
        if not 0 < self.step_s < math.inf:
            raise SettingInvalid(f"--capacity-step is {self.step_s:g}; expected seconds, above 0")

    def requests_at(self, rate: float) -> int:
        """How many requests a step at that rate sends."""
        return max(math.ceil(rate * self.step_s), LEAST_REQUESTS)

    def describe(self) -> str:
        """One sentence for people."""
        bounds = ", ".join(f"{name.upper()} ≤ {bound:g} ms" for name, bound in self.bounds_ms.items())
        return (
            f"{bounds} at p{self.percentile:g} of completed requests; at most {self.max_lost_share:.1%} rejected or "
            f"failed; {self.step_s:g} s a step, at least {LEAST_REQUESTS} requests, of which the first "
            f"{WARM_SHARE:.0%} are not judged"
        )


@dataclass(frozen=True)
class Step:
    """One trial of a rate. `latency_ms`: each metric at the objective's percentile, null of nothing; `attainment`:
    share of the judged requests that met every bound; `reasons`: why it did not pass."""

    rate: float
    verdict: Verdict
    judged: int
    lost_share: float
    latency_ms: Mapping[str, float | None]
    attainment: float
    reasons: tuple[str, ...]

    @property
    def goodput_rps(self) -> float:
        """Requests per second of this rate that met every bound."""
        return self.rate * self.attainment

    def as_json(self) -> dict[str, Any]:
        """For the result."""
        return {**vars(self), "verdict": self.verdict.value, "goodput_rps": self.goodput_rps}


def judge_step(
    rate: float, records: Sequence[RequestRecord], objective: CapacityObjective, invalid_reasons: Sequence[str]
) -> Step:
    """Judge what one step left. `records`: of all its requests, sent or not lost."""
    judged = sorted(records, key=lambda r: r.due_s)[int(WARM_SHARE * len(records)) :]
    completed = [r for r in judged if r.outcome is Outcome.COMPLETED]
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
    verdict = Verdict.INVALID if invalid_reasons else Verdict.FAIL if reasons else Verdict.PASS
    met = sum(meets(r, objective.bounds_ms) for r in judged)
    return Step(
        rate=rate,
        verdict=verdict,
        judged=len(judged),
        lost_share=lost_share,
        latency_ms=latency_ms,
        attainment=met / len(judged) if judged else 0.0,
        reasons=(*invalid_reasons, *reasons),
    )

"""Outcome of a live run under overload, excluding an initial period in which the cluster learns answer lengths and
prediction errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

WINDOW_S = 30.0


@dataclass(frozen=True)
class OverloadObjectives:
    """Objectives in seconds; TBT is the mean of the longest tenth of an answer's intervals."""

    ttft_s: float
    tbt_s: float

    def end_of(self, record: dict[str, Any]) -> str:
        """Return how a request ended: good, an objective missed, or the replay's outcome."""
        if record["outcome"] != "completed":
            return str(record["outcome"])
        if record["ttft_s"] > self.ttft_s:
            return "TTFT missed"
        return "TBT missed" if (record["tbt_worst10_s"] or 0.0) > self.tbt_s else "good"


def counted(
    records: Sequence[dict[str, Any]], objectives: OverloadObjectives, *, from_s: float, until_s: float
) -> dict[str, Any]:
    """Summarise the requests due between the two times: goodput per second, ends, prompt tokens computed and wasted.

    Tokens are wasted on requests that missed an objective. `good_by_window` is the goodput of all requests in each
    `WINDOW_S` of arrivals.
    """
    inside = [record for record in records if from_s <= record["due_s"] < until_s]
    ends = Counter(map(objectives.end_of, inside))
    served = [record for record in inside if record["outcome"] == "completed"]
    computed = sum(map(_computed, served))
    wasted = sum(_computed(record) for record in served if objectives.end_of(record) != "good")
    goods = Counter(int(record["due_s"] / WINDOW_S) for record in records if objectives.end_of(record) == "good")
    ttfts = [record["ttft_s"] for record in served]
    return {
        "requests": len(inside),
        "goodput_rps": ends["good"] / (until_s - from_s),
        "slo_attainment": ends["good"] / len(inside),
        "rejected": ends["rejected"],
        "ends": ends,
        "computed_prompt_tokens": computed,
        "wasted_prompt_tokens": wasted,
        "wasted_share": wasted / computed if computed else 0.0,
        "ttft_p90_s": quantiles(ttfts, n=10)[-1] if len(ttfts) > 1 else 0.0,
        "good_by_window": [goods[window] / WINDOW_S for window in range(int(until_s / WINDOW_S))],
    }


def _computed(record: dict[str, Any]) -> int:
    """Return the number of computed prompt tokens."""
    return int(record["prompt_tokens"] - record["cached_tokens"])

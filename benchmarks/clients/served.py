"""Requests served according to the cluster: differences of /metrics between two moments."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ServedTotals:
    """Totals since the front door's start."""

    totals: dict[str, float]
    """Sample name -> sum over its labels."""
    by_reason: dict[str, float]
    """How requests ended -> how many."""

    def __sub__(self, earlier: ServedTotals) -> ServedTotals:
        return ServedTotals(_minus(self.totals, earlier.totals), _minus(self.by_reason, earlier.by_reason))

    def count(self, name: str) -> float:
        """A counter, by its name without vLLM's prefix."""
        return self.totals.get(f"vllm:{name}", 0.0)

    def mean_s(self, name: str) -> float:
        """Mean of a histogram in seconds; NaN where nothing was observed."""
        observed = self.count(f"{name}_count")
        return self.count(f"{name}_sum") / observed if observed else float("nan")

    @property
    def completed(self) -> float:
        """Requests that ended as they should: at a stop or at their length."""
        return self.by_reason.get("stop", 0.0) + self.by_reason.get("length", 0.0)

    @property
    def failed(self) -> float:
        """Requests that ended otherwise."""
        return sum(self.by_reason.values()) - self.completed


def read_served(url: str) -> ServedTotals:
    """Ask the front door at `url`. Raises OSError when it does not answer."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    totals: dict[str, float] = {}
    reasons: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
            if sample.name == "vllm:request_success_total":
                reason = sample.labels["finished_reason"]
                reasons[reason] = reasons.get(reason, 0.0) + sample.value
    return ServedTotals(totals, reasons)


def _minus(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}

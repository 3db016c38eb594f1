"""Requests served according to the cluster: differences of /metrics between two times."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ServedTotals:
    """Totals since the frontend's start, or between two times."""

    totals: dict[str, float]
    """Sum over all labels by sample name."""
    by_reason: dict[str, float]
    """Number of requests by finish reason."""

    def __sub__(self, earlier: ServedTotals) -> ServedTotals:
        return ServedTotals(_minus(self.totals, earlier.totals), _minus(self.by_reason, earlier.by_reason))

    def count(self, name: str) -> float:
        """Return a counter by its name without the prefix `vllm:`."""
        return self.totals.get(f"vllm:{name}", 0.0)

    def mean_s(self, name: str) -> float:
        """Return the mean of a histogram in seconds; NaN without observations."""
        observed = self.count(f"{name}_count")
        return self.count(f"{name}_sum") / observed if observed else float("nan")

    @property
    def completed(self) -> float:
        """Number of requests that ended at a stop or at their length."""
        return self.by_reason.get("stop", 0.0) + self.by_reason.get("length", 0.0)

    @property
    def failed(self) -> float:
        """Number of requests that ended in another way."""
        return sum(self.by_reason.values()) - self.completed


def read_served(url: str) -> ServedTotals:
    """Read /metrics of the frontend at `url`. Raises OSError if it does not answer."""
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

"""Figures of report.json from records, and the estimate of the time saved by reuse. Pure.

The saving is estimated from the replay itself: prefill seconds are fitted as a + b·(n - p) + c·(n² - p²) over prompts
of n tokens of which p were reused (fixed cost, linear layers, attention; least squares on relative errors). Computing a
request's reused prefix would have taken b·p + c·p² more. That time is distributed over the places by tokens, and the
loading time is subtracted from the pool's parts. Waiting for an SSD counts as queueing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from loadtest.cluster_metrics import INTEGRITY_EVENTS, ClusterHistory
from loadtest.objectives import ReplayObjectives, attainment, fit_durations
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord, SendOutcome
from loadtest.verify import Verification
from traces import token_hit_rate

__all__ = ["PLACES", "PrefillFit", "fit_prefill", "reuse_by_tier", "tokens_by_place"]

PLACES: Final = ("pages", "dram", "ssd", "remote")
"""Places of reused KV: the prefill worker's KV cache, its pool node's memory, that node's SSD, another pool node."""
_LEAST_REQUESTS: Final = 10


@dataclass(frozen=True)
class PrefillFit:
    """Coefficients of prefill seconds by tokens. `requests`: number of fitted requests."""

    constant: float
    per_token: float
    per_token_squared: float
    requests: int

    def of_prefix(self, tokens: int) -> float:
        """Return the seconds that computing a prefix of `tokens` tokens adds to a prefill."""
        return self.per_token * tokens + self.per_token_squared * tokens * tokens


def tokens_by_place(record: RequestRecord) -> dict[str, int] | None:
    """Return the request's reused tokens by place; None if the server does not report it."""
    reported = [record.extension.get(f"cached_{place}_tokens") for place in PLACES[1:]]
    counts = [count for count in reported if isinstance(count, int)]
    if len(counts) < len(reported):
        return None
    return dict(zip(PLACES, (max(0, record.cached_tokens - sum(counts)), *counts), strict=True))


def fit_prefill(records: Sequence[RequestRecord]) -> PrefillFit | None:
    """Fit prefill seconds over completed requests; None if the server does not report them or with too few requests."""
    samples = [
        (float(record.prompt_tokens), float(record.cached_tokens), seconds)
        for record in records
        if (seconds := _seconds(record, "prefill_s")) > 0
    ]
    if len(samples) < _LEAST_REQUESTS:
        return None
    n, p, seconds = np.array(samples).T
    a, b, c = fit_durations(np.stack([np.ones_like(n), n - p, n * n - p * p], axis=1), seconds)
    return PrefillFit(float(a), float(b), float(c), len(samples))


def reuse_by_tier(records: Sequence[RequestRecord], fit: PrefillFit | None) -> dict[str, dict[str, Any]] | None:
    """Return per place: tokens, requests with any, seconds of computation avoided, of loading, and the difference.

    None if the server does not report the places of reused tokens; without a fit, computation seconds are None.
    """
    found = [(record, places) for record in records if (places := tokens_by_place(record)) is not None]
    if not found:
        return None
    return {place: _saved(place, found, fit) for place in PLACES}


def _saved(place: str, found: Sequence[tuple[RequestRecord, dict[str, int]]], fit: PrefillFit | None) -> dict[str, Any]:
    mine = [(record, places) for record, places in found if places[place]]
    load_s = 0.0
    if place != "pages":
        load_s = math.fsum(
            _seconds(record, "load_s") * places[place] / (sum(places.values()) - places["pages"])
            for record, places in mine
        )
    compute_s = None
    if fit is not None:
        compute_s = math.fsum(
            fit.of_prefix(sum(places.values())) * places[place] / sum(places.values()) for _, places in mine
        )
    return {
        "tokens": sum(places[place] for _, places in mine),
        "requests": len(mine),
        "compute_s": compute_s,
        "load_s": load_s,
        "saved_s": None if compute_s is None else compute_s - load_s,
    }


def _seconds(record: RequestRecord, key: str) -> float:
    value = record.extension.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


PERCENTILES = (50, 90, 99)
_PARTS = ("queue_s", "load_s", "prefill_s")


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """Return {p50, p90, p99} of the finite values; None values if there are none."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return dict.fromkeys((f"p{p}" for p in PERCENTILES), None)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(finite, PERCENTILES), strict=True)}


def summarise(
    records: Sequence[RequestRecord],
    requests: Mapping[int, PlannedRequest],
    *,
    tokens_per_block: int,
    objectives: ReplayObjectives,
    history: ClusterHistory,
    verification: Verification | None,
) -> dict[str, Any]:
    """Return the figures of report.json. `requests`: planned requests by index; `records`: requests that were sent."""
    completed = [r for r in records if r.outcome is SendOutcome.COMPLETED]
    ended = Counter(r.outcome for r in records)
    prompt_tokens = sum(r.prompt_tokens for r in completed)
    output_tokens = sum(r.max_tokens for r in completed)
    cached_tokens = sum(r.cached_tokens for r in completed)
    seconds = replay_seconds(records)
    retried = [r for r in records if r.attempts > 1]
    by_path = history.kv_bytes_by_path
    unloaded = objectives.unloaded
    prefill_fit = fit_prefill(completed)
    return {
        "planned": len(requests),
        "requests": len(records),
        **{outcome.value: ended[outcome] for outcome in SendOutcome},
        "prefix_hit_rate": cached_tokens / prompt_tokens if prompt_tokens else None,
        "ideal_prefix_hit_rate": ideal_hit_rate(completed, requests, tokens_per_block) if completed else None,
        "reuse_by_tier": reuse_by_tier(completed, prefill_fit),
        "prefill_fit_s": asdict(prefill_fit) if prefill_fit else None,
        "ttft_s": percentiles(r.ttft_s for r in completed),
        "tbt_s": percentiles(interval for r in completed for interval in r.intervals_s),
        "tbt_worst10_s": percentiles(r.tbt_worst10_s for r in completed),
        "e2e_s": percentiles(r.end_s - r.sent_s for r in completed),
        "ttft_parts_s": {part: percentiles(_extension(completed, part)) for part in _PARTS},
        "unloaded_ttft_s": unloaded.ttft_s if unloaded else None,
        "unloaded_tbt_s": unloaded.tbt_s if unloaded else None,
        "unloaded": unloaded.as_json() if unloaded else None,
        **attainment(objectives, records, seconds),
        "send_lateness_s": percentiles(r.lateness_s for r in records),
        "retried_requests": len(retried),
        "retries": sum(r.attempts - 1 for r in retried),
        "duration_s": seconds,
        "request_rps": len(completed) / seconds if seconds else None,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": cached_tokens,
        "output_tokens": output_tokens,
        "overlong_prompts": sum(r.overlong for r in records),
        "replaced_requests": sum(_attempts(r) > 1 for r in completed),
        "kv_bytes_moved": sum(by_path.values()) if history.samples else None,
        "kv_bytes_by_path": by_path,
        **{event: history.increase(event) for event in INTEGRITY_EVENTS},
        "verified_requests": verification.verified_requests if verification else 0,
        "wrong_tokens": verification.wrong_tokens if verification else None,
        "near_ties": verification.near_ties if verification else None,
        "verification": verification.as_json() if verification else None,
        "reasons": reasons(records),
    }


def replay_seconds(records: Sequence[RequestRecord]) -> float:
    """Return the seconds from the first request's sending to the last request's end."""
    ends = [r.end_s for r in records if math.isfinite(r.end_s)]
    return max(ends) - min(r.sent_s for r in records) if ends else 0.0


def ideal_hit_rate(
    records: Sequence[RequestRecord], requests: Mapping[int, PlannedRequest], tokens_per_block: int
) -> float:
    """Return the token hit rate of an infinite cache on these requests, in order of arrival.

    Only full blocks are cached, each request's blocks are inserted at its arrival, and the last prompt token is always
    computed.
    """
    prompts = [requests[r.index] for r in sorted(records, key=lambda r: (r.due_s, r.index))]
    return token_hit_rate(((p.block_ids, len(p.prompt)) for p in prompts), tokens_per_block)


def reasons(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Return the reasons why requests were rejected or failed, the most frequent first."""
    counted = Counter((r.outcome.value, r.reason) for r in records if r.reason)
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return [{"outcome": outcome, "reason": reason, "count": count} for (outcome, reason), count in ordered]


def _extension(records: Sequence[RequestRecord], key: str) -> list[float]:
    values = [r.extension.get(key) for r in records]
    return [float(v) for v in values if isinstance(v, int | float)]


def _attempts(record: RequestRecord) -> int:
    attempts = record.extension.get("attempts", 1)
    return attempts if isinstance(attempts, int) else 1

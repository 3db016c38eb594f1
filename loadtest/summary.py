"""From records to the figures of the report. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from loadtest.cluster_metrics import INTEGRITY_EVENTS, ClusterHistory
from loadtest.objectives import Objectives, attainment
from loadtest.plan import PlannedRequest
from loadtest.record import Outcome, RequestRecord
from loadtest.reuse import fit_prefill, reuse_by_tier
from loadtest.verify import Verification
from traces import token_hit_rate

PERCENTILES = (50, 90, 99)
_PARTS = ("queue_s", "load_s", "prefill_s")


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """{p50, p90, p99} of the finite values, null of none."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return dict.fromkeys((f"p{p}" for p in PERCENTILES), None)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(finite, PERCENTILES), strict=True)}


def summarise(
    records: Sequence[RequestRecord],
    requests: Mapping[int, PlannedRequest],
    *,
    tokens_per_block: int,
    objectives: Objectives,
    history: ClusterHistory,
    verification: Verification | None,
) -> dict[str, Any]:
    """The figures of report.json. `requests`: all that were planned, by index; `records`: those that were sent."""
    completed = [r for r in records if r.outcome is Outcome.COMPLETED]
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
        **{outcome.value: ended[outcome] for outcome in Outcome},
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
    """From the first request sent to the last end."""
    ends = [r.end_s for r in records if math.isfinite(r.end_s)]
    return max(ends) - min(r.sent_s for r in records) if ends else 0.0


def ideal_hit_rate(
    records: Sequence[RequestRecord], requests: Mapping[int, PlannedRequest], tokens_per_block: int
) -> float:
    """Share of these requests' prompt tokens that an infinite cache would have had, in order of arrival: full blocks of
    the trace as they were sent, each request's inserted at its arrival, the last prompt token always computed."""
    prompts = [requests[r.index] for r in sorted(records, key=lambda r: (r.due_s, r.index))]
    return token_hit_rate(((p.block_ids, len(p.prompt)) for p in prompts), tokens_per_block)


def reasons(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Why requests were rejected or failed, the most frequent first."""
    counted = Counter((r.outcome.value, r.reason) for r in records if r.reason)
    ordered = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    return [{"outcome": outcome, "reason": reason, "count": count} for (outcome, reason), count in ordered]


def _extension(records: Sequence[RequestRecord], key: str) -> list[float]:
    values = [r.extension.get(key) for r in records]
    return [float(v) for v in values if isinstance(v, int | float)]


def _attempts(record: RequestRecord) -> int:
    attempts = record.extension.get("attempts", 1)
    return attempts if isinstance(attempts, int) else 1

"""Results of a benchmark by vLLM's definitions: metrics, the JSON file with vLLM's keys, and the terminal table.

TTFT: from sending to the first event with a choice. ITL: between successive such events. E2EL: from sending to the
last of them. TPOT: (E2EL - TTFT) / (n - 1) for an answer of n > 1 tokens. All are computed over completed requests, in
milliseconds; standard deviations are population standard deviations. Token counts are the server's. The table has the
labels of vLLM's command, which scripts may parse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.bench.config import BenchConfig
from loadtest.bench.runner import BenchResult
from loadtest.errors import OutputUnwritable, SettingInvalid
from loadtest.record import RequestRecord, SendOutcome
from loadtest.report import finite


@dataclass(frozen=True)
class Latencies:
    """Latencies of one completed request, in seconds."""

    ttft_s: float
    tpot_s: float
    e2el_s: float
    itl_s: tuple[float, ...]

    def of(self, metric: str) -> float:
        """Return the metric with that vLLM name, in seconds. Raises KeyError."""
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}[metric]


def latencies_of(record: RequestRecord) -> Latencies:
    """Return the latencies of a completed request. The TPOT of a one-token answer is 0, which meets every objective."""
    first, last = record.event_times[0], record.event_times[-1]
    tpot = (last - first) / (record.output_tokens - 1) if record.output_tokens > 1 else 0.0
    gaps = tuple(b - a for a, b in pairwise(record.event_times))
    return Latencies(first - record.sent_s, tpot, last - record.sent_s, gaps)


def meets(record: RequestRecord, goodput_ms: Mapping[str, float]) -> bool:
    """Return True if a request was completed within each objective."""
    if record.outcome is not SendOutcome.COMPLETED:
        return False
    found = latencies_of(record)
    return all(found.of(metric) * 1000 <= bound for metric, bound in goodput_ms.items())


def bench_figures(
    records: Sequence[RequestRecord],
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Return the result under vLLM's keys; latencies are None if no request was completed.

    As in vLLM, `failed` counts all requests that were not completed; `rejected` counts those with HTTP 429 among them.
    """
    completed = [r for r in records if r.outcome is SendOutcome.COMPLETED]
    seconds = duration_s(records)
    prompt_tokens, output_tokens = sum(r.prompt_tokens for r in completed), sum(r.output_tokens for r in completed)
    found = [latencies_of(r) for r in completed]
    samples = {
        "ttft": [x.ttft_s for x in found],
        "tpot": [x.tpot_s for x, r in zip(found, completed, strict=True) if r.output_tokens > 1],
        "itl": [gap for x in found for gap in x.itl_s],
        "e2el": [x.e2el_s for x in found],
    }
    return {
        "duration": seconds,
        "completed": len(completed),
        "failed": len(records) - len(completed),
        "rejected": sum(r.outcome is SendOutcome.REJECTED for r in records),
        "retries": sum(max(r.attempts - 1, 0) for r in records),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _per(len(completed), seconds),
        "request_goodput": _per(sum(meets(r, goodput_ms) for r in completed), seconds) if goodput_ms else None,
        "output_throughput": _per(output_tokens, seconds),
        "total_token_throughput": _per(prompt_tokens + output_tokens, seconds),
        "max_output_tokens_per_s": busiest_second(completed),
        "max_concurrent_requests": most_at_once(completed),
        **{key: value for name in metrics for key, value in _spread(name, samples[name], percentiles).items()},
    }


def detailed(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Return vLLM's per-request lists, in order of sending; an unanswered request has zeros and its error."""
    found = [latencies_of(r) if r.outcome is SendOutcome.COMPLETED else None for r in records]
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "ttfts": [x.ttft_s if x else 0.0 for x in found],
        "itls": [list(x.itl_s) if x else [] for x in found],
        "latencies": [x.e2el_s if x else 0.0 for x in found],
        "start_times": [r.sent_s for r in records],
        "queue_times": [r.held_s for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.reason for r in records],
    }


def duration_s(records: Sequence[RequestRecord]) -> float:
    """Return the seconds from the clock's start, before the first request's arrival, to the end of the last request."""
    return max((r.end_s for r in records if math.isfinite(r.end_s)), default=0.0)


def busiest_second(completed: Sequence[RequestRecord]) -> float:
    """Return the largest number of events in one second, in whole seconds since the first request was sent."""
    if not completed:
        return 0.0
    first = min(r.sent_s for r in completed)
    return float(np.bincount([int(t - first) for r in completed for t in r.event_times]).max())


def most_at_once(completed: Sequence[RequestRecord]) -> int:
    """Return the maximum number of concurrent requests; a request lasts from its sending to its last event."""
    steps = [(r.sent_s, 1) for r in completed] + [(r.event_times[-1], -1) for r in completed]
    # Sorted tuples put an end before a start at the same time.
    return max(np.cumsum([step for _, step in sorted(steps)]).tolist(), default=0)


def percentile_name(percentile: float) -> str:
    """Return a name such as p99 or p99.9."""
    return f"p{percentile:g}"


def _spread(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    words = ["mean", "median", "std", *map(percentile_name, percentiles)]
    found: list[float] | list[None] = [None] * len(words)
    if values:
        ms = np.array(values) * 1000
        found = [float(v) for v in (ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, list(percentiles)))]
    return {f"{word}_{name}_ms": value for word, value in zip(words, found, strict=True)}


def _per(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Saving:
    """Destination of the results. An empty `filename` is generated from the run's settings, as in vLLM."""

    save: bool = False
    append: bool = False
    detailed: bool = False
    folder: Path = Path()
    filename: str = ""
    label: str = ""
    metadata: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Validate the metadata. Raises SettingInvalid."""
        for pair in self.metadata:
            if "=" not in pair:
                raise SettingInvalid(f"--metadata is {pair!r}; expected KEY=VALUE")


def result_of(result: BenchResult, config: BenchConfig, saving: Saving, now: datetime) -> dict[str, Any]:
    """Return all keys of the result, including the per-request lists if `saving.detailed` is set."""
    tokenizer = config.tokenizer
    figures = bench_figures(
        result.records,
        metrics=config.percentile_metrics,
        percentiles=config.metric_percentiles,
        goodput_ms=config.goodput,
    )
    return {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": config.backend,
        "backend": config.backend,
        "label": saving.label or None,
        "model_id": result.model,
        "tokenizer_id": str(tokenizer) if tokenizer else None,
        "num_prompts": config.num_prompts,
        **{key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in saving.metadata)},
        "request_rate": config.request_rate if math.isfinite(config.request_rate) else "inf",
        "burstiness": config.burstiness if math.isfinite(config.burstiness) else "inf",
        "max_concurrency": config.max_concurrency,
        "valid": not result.invalid_reasons,
        "invalid_reasons": list(result.invalid_reasons),
        "interrupted": result.interrupted,
        "senders": result.senders,
        **figures,
        **(detailed(result.records) if saving.detailed else {}),
    }


def save(figures: Mapping[str, Any], config: BenchConfig, saving: Saving) -> Path | None:
    """Write the result if requested and return its path, else None. Raises OutputUnwritable."""
    if not saving.save and not saving.append:
        return None
    path = saving.folder / (saving.filename or default_name(figures, config, saving))
    text = json.dumps(finite(dict(figures)), allow_nan=False, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if saving.append else "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise OutputUnwritable(f"cannot write the result to {path}: {error}") from error
    return path


def default_name(figures: Mapping[str, Any], config: BenchConfig, saving: Saving) -> str:
    """Return vLLM's file name, label-RATEqps[-concurrencyN]-model-date.json; an invalid run's starts with INVALID."""
    invalid = "" if figures["valid"] else "INVALID-"
    limit = f"-concurrency{config.max_concurrency}" if config.max_concurrency is not None else ""
    model = str(figures["model_id"]).rsplit("/", 1)[-1]
    rate = float(config.request_rate)
    return f"{invalid}{saving.label or config.backend}-{rate}qps{limit}-{model}-{figures['date']}.json"


_WIDTH = 50
_TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_COUNTS = (
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
)


def table(result: Mapping[str, Any], config: BenchConfig) -> str:
    """Return the result table; the title of an invalid run starts with INVALID."""
    title = "Serving Benchmark Result" if result["valid"] else "INVALID Serving Benchmark Result"
    lines = [f" {title} ".center(_WIDTH, "=")]
    lines += [_row("Successful requests:", result["completed"]), _row("Failed requests:", result["failed"])]
    if result["rejected"]:
        lines.append(_row("of them rejected (HTTP 429):", result["rejected"]))
    if result["retries"]:
        lines.append(_row("Sent again after a rejection:", result["retries"]))
    if config.max_concurrency is not None:
        lines.append(_row("Maximum request concurrency:", config.max_concurrency))
    if math.isfinite(config.request_rate):
        lines.append(_row("Request rate configured (RPS):", config.request_rate))
    lines += [_row(label, result[key]) for label, key in _COUNTS if result[key] is not None]
    for metric in config.percentile_metrics:
        lines += _section(metric, result, config.metric_percentiles)
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def _section(metric: str, result: Mapping[str, Any], percentiles: Sequence[float]) -> list[str]:
    short, title = _TITLES[metric]
    words = ["mean", "median", *map(percentile_name, percentiles)]
    rows = [_row(f"{word.capitalize()} {short} (ms):", result[f"{word}_{metric}_ms"]) for word in words]
    return [title.center(_WIDTH, "-"), *rows]


def _row(label: str, value: float | None) -> str:
    shown = "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()

"""The results on the terminal, under the labels that users (and their scripts) know from vLLM's command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.bench.config import BenchConfig
from loadtest.bench.figures import percentile_name

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
    """The whole table; the word INVALID in its headline where the run is."""
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

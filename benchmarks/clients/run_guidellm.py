"""Comparison of guidellm's closed loop over synthetic prompts with the frontend's metrics."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.clients.comparison import Allowed, Comparison, Row
from benchmarks.clients.context import Context, run_tool
from benchmarks.clients.environments import Environment
from benchmarks.clients.errors import ToolFailed
from benchmarks.clients.served import ServedTotals, read_served

REQUESTS = 40
STREAMS = 2
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 32
_METRICS = "/metrics, same run"


def run_guidellm(context: Context, environment: Environment) -> list[Row]:
    """Run guidellm against each endpoint and compare. Raises ToolFailed, ToolMissing."""
    return [
        row
        for endpoint in ("/v1/completions", "/v1/chat/completions")
        for row in _rows(endpoint, *_benchmark(context, environment, endpoint))
    ]


def _benchmark(context: Context, environment: Environment, endpoint: str) -> tuple[dict[str, Any], ServedTotals]:
    report = context.work / f"guidellm{endpoint.replace('/', '-')}.json"
    groups = {
        "backend": f"kind=openai_http,target={context.url},model={context.name},request_format={endpoint}",
        "profile": f"kind=concurrent,streams={STREAMS}",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={context.model}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "output": f"kind=json,path={report}",
    }
    report.unlink(missing_ok=True)
    before = read_served(context.url)
    pairs = [part for name, value in groups.items() for part in (f"--{name}", value)]
    log = run_tool(context, environment, "run", *pairs, "--disable-progress")
    served = read_served(context.url) - before
    if not report.is_file():
        raise ToolFailed(f"guidellm wrote no {report}; see {log}")
    benchmark: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]
    return benchmark["metrics"], served


def _rows(endpoint: str, metrics: dict[str, Any], served: ServedTotals) -> list[Row]:
    client = f"guidellm {endpoint}"

    def of(name: str, key: str = "mean") -> float | None:
        value = metrics[name]["successful"][key]
        return None if value is None else float(value)

    def row(name: str, theirs: float | None, ours: float, unit: str = "", **allowed: float) -> Comparison:
        return Comparison(client, name, theirs, ours, _METRICS, unit, Allowed(**allowed))

    latency_s = of("request_latency")
    latency_ms = None if latency_s is None else latency_s * 1e3
    our_ttft_ms, our_latency_ms, our_interval_ms = (
        served.mean_s(f"{name}_seconds") * 1e3
        for name in ("time_to_first_token", "e2e_request_latency", "inter_token_latency")
    )
    prompt, output = served.count("prompt_tokens_total"), served.count("generation_tokens_total")
    return [
        row("requests", float(metrics["request_totals"]["successful"]), served.completed),
        row("failed requests", float(metrics["request_totals"]["errored"]), served.failed),
        row("prompt tokens", of("prompt_token_count", "total_sum"), prompt),
        row("output tokens", of("output_token_count", "total_sum"), output),
        row("TTFT, mean", of("time_to_first_token_ms"), our_ttft_ms, "ms", share=0.25, slack=40.0),
        row("request latency, mean", latency_ms, our_latency_ms, "ms", share=0.25, slack=40.0),
        row("time between tokens, mean", of("inter_token_latency_ms"), our_interval_ms, "ms", share=0.25, slack=2.0),
    ]

"""Comparison of NVIDIA's aiperf on a scaled Mooncake trace with the frontend's metrics and `moonpool replay`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.clients.comparison import Allowed, Comparison, Row
from benchmarks.clients.context import RUN_S, Context, run_tool
from benchmarks.clients.environments import Environment
from benchmarks.clients.errors import ToolFailed
from benchmarks.clients.hub import store_tokenizer
from benchmarks.clients.served import read_served
from benchmarks.clients.workload import TOKENS_PER_BLOCK, write_workload

REQUESTS = 120
SPEED = 20.0
MAX_PROMPT_TOKENS = 1500
_METRICS = "/metrics, same run"
_REPLAY = "moonpool replay, same trace"


def run_aiperf(context: Context, environment: Environment) -> list[Row]:
    """Run both load generators in sequence and compare them. Raises ToolFailed, ToolMissing."""
    scaled, ours = write_workload(context.work, requests=REQUESTS, speed=SPEED, max_prompt_tokens=MAX_PROMPT_TOKENS)
    replayed = _replay(context, ours)
    before = read_served(context.url)
    theirs = _profile(context, environment, scaled)
    served = read_served(context.url) - before

    def row(name: str, figure: float | None, our: float, source: str, unit: str = "", **allowed: float) -> Comparison:
        return Comparison("aiperf", name, figure, our, source, unit, Allowed(**allowed))

    def of(name: str, key: str = "avg") -> float | None:
        value = theirs.get(name, {}).get(key)
        return None if value is None else float(value)

    sent, good = of("completed_request_count"), of("request_count")
    failed = None if sent is None or good is None else sent - good
    usage_prompt, usage_output = of("total_usage_prompt_tokens"), of("total_usage_completion_tokens")
    cached = of("total_usage_prompt_cache_read_tokens")
    prompt, output = served.count("prompt_tokens_total"), served.count("generation_tokens_total")
    ttft_ms, latency_ms, interval_ms = (
        served.mean_s(f"{name}_seconds") * 1e3
        for name in ("time_to_first_token", "e2e_request_latency", "inter_token_latency")
    )
    replayed_p50_ms = float(replayed["ttft_s"]["p50"]) * 1e3
    return [
        row("requests", good, served.completed, _METRICS),
        row("failed requests", failed, served.failed, _METRICS),
        row("prompt tokens, by its tokenizer", of("total_isl"), prompt - REQUESTS, _METRICS + ", less one BOS each"),
        row("prompt tokens, by usage", usage_prompt, prompt, _METRICS),
        row("output tokens, by usage", usage_output, output, _METRICS),
        row("output tokens, by its tokenizer", of("total_output_tokens"), output, _METRICS, share=0.05),
        row("cached tokens", cached, served.count("prefix_cache_hits_total"), _METRICS),
        row("TTFT, mean", of("time_to_first_token"), ttft_ms, _METRICS, "ms", share=0.25, slack=40.0),
        row("request latency, mean", of("request_latency"), latency_ms, _METRICS, "ms", share=0.25, slack=40.0),
        row("time between tokens, mean", _mean_interval(theirs), interval_ms, _METRICS, "ms", share=0.25, slack=2.0),
        row("requests", good, float(replayed["completed"]), _REPLAY),
        row("output tokens", usage_output, float(replayed["output_tokens"]), _REPLAY),
        row("prompt tokens", usage_prompt, float(replayed["prompt_tokens"]), _REPLAY, share=0.02),
        row("cached tokens", cached, float(replayed["cached_tokens"]), _REPLAY, share=0.1),
        row("throughput", of("request_throughput"), replayed["request_rps"], _REPLAY, "requests/s", share=0.1),
        row("TTFT, p50", of("time_to_first_token", "p50"), replayed_p50_ms, _REPLAY, "ms", share=0.5, slack=40.0),
    ]


def _profile(context: Context, environment: Environment, trace: Path) -> dict[str, Any]:
    out = context.work / "aiperf"
    flags = {
        "model": context.name,
        "url": context.url,
        "endpoint-type": "completions",
        "input-file": str(trace),
        "custom-dataset-type": "mooncake_trace",
        "isl-block-size": str(TOKENS_PER_BLOCK),
        "tokenizer": store_tokenizer(context.home, context.model),
        "extra-inputs": "ignore_eos:true",
        "request-timeout-seconds": "120",
        "random-seed": "1",
        "workers-max": "2",
        "record-processors": "1",
        "ui": "none",
        "artifact-dir": str(out),
    }
    pairs = [part for name, value in flags.items() for part in (f"--{name}", value)]
    log = run_tool(context, environment, "profile", "--streaming", "--fixed-schedule", "--no-gpu-telemetry", *pairs)
    report = out / "profile_export_aiperf.json"
    if not report.is_file():
        raise ToolFailed(f"aiperf wrote no {report}; see {log}")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if isinstance(value, dict) and "avg" in value}


def _mean_interval(theirs: dict[str, Any]) -> float | None:
    """Return aiperf's mean over all intervals, like ours; its reported mean is over requests."""
    latency, first, tokens = (
        theirs.get(name) for name in ("request_latency", "time_to_first_token", "total_usage_completion_tokens")
    )
    if not latency or not first or not tokens:
        return None
    return float((latency["sum"] - first["sum"]) / (tokens["avg"] - latency["count"]))


def _replay(context: Context, trace: Path) -> dict[str, Any]:
    out = context.work / "replay"
    command = [sys.executable, "-m", "moonpool", "replay", str(trace), f"--url={context.url}", f"--out={out}"]
    options = [f"--tokens-per-block={TOKENS_PER_BLOCK}", "--no-unloaded", f"--model-path={context.model}"]
    with (context.work / "replay.log").open("wb") as log:
        status = subprocess.run(
            [*command, *options], stdout=log, stderr=subprocess.STDOUT, timeout=RUN_S, check=False
        ).returncode
    if status:
        raise ToolFailed(f"moonpool replay ended with exit code {status}; see {context.work / 'replay.log'}")
    found: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return found

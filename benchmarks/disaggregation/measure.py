"""Replay against one cluster shape: its figures and the CPU seconds of the cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.clients.cluster import running_cluster
from benchmarks.clients.errors import ToolFailed

TOKENS_PER_BLOCK = 8
REPLAY_S = 1800.0
SHAPES = {
    "1 prefill + 1 decode": ("--prefill-nodes=1", "--decode-nodes=1"),
    "2 aggregated": ("--aggregated=2",),
}
# One thread per engine, so that both shapes compute on as many cores; a large --max-queue avoids rejections.
COMMON = (f"--block-tokens={TOKENS_PER_BLOCK}", "--threads=1", "--pool-nodes=1", "--pool-bytes=2GiB", "--max-queue=600")


@dataclass(frozen=True)
class Workload:
    """Part of the conversation trace that is replayed, and the objectives."""

    families: float
    duration_s: float
    ttft_slo_s: float
    tbt_slo_s: float


@dataclass(frozen=True)
class Run:
    """Figures of one replay; times in seconds, None if nothing was measured."""

    shape: str
    speed: float
    repeat: int
    figures: dict[str, float | None]
    load_average: float
    """One-minute load average of the machine at the start of the replay."""
    notices: tuple[str, ...]
    invalid_reasons: tuple[str, ...]
    """Why the replay's figures cannot be trusted; empty for a valid run."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_shape(shape: str, repeat: int, speeds: tuple[float, ...], workload: Workload, out: Path) -> list[Run]:
    """Start a fresh cluster of `shape` and replay at each speed. Raises ClusterFailed, ToolFailed."""
    folder = out / f"{repeat}-{shape.replace(' ', '')}"
    with running_cluster(folder / "serve.log", *COMMON, *SHAPES[shape]) as cluster:
        return [
            _replay(shape, repeat, speed, workload, cluster.url, cluster.supervisor_pid, folder / f"speed-{speed:g}")
            for speed in speeds
        ]


def _replay(shape: str, repeat: int, speed: float, workload: Workload, url: str, supervisor_pid: int, out: Path) -> Run:
    flags = {
        "url": url,
        "out": out,
        "speed": speed,
        "sample-families": workload.families,
        "duration": workload.duration_s,
        "tokens-per-block": TOKENS_PER_BLOCK,
        "ttft-slo": workload.ttft_slo_s,
        "tbt-slo": workload.tbt_slo_s,
    }
    command = [sys.executable, "-m", "moonpool", "replay", "conversation", "--no-unloaded"]
    load, before_s = os.getloadavg()[0], cpu_seconds(supervisor_pid)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "replay.log").open("wb") as log:
        status = subprocess.run(
            [*command, *(f"--{name}={value}" for name, value in flags.items())],
            stdout=log, stderr=subprocess.STDOUT, timeout=REPLAY_S, check=False,
        ).returncode  # fmt: skip
    spent_s = cpu_seconds(supervisor_pid) - before_s
    if not (out / "report.json").is_file():
        raise ToolFailed(f"the replay ended with exit code {status} and wrote no report; see {out / 'replay.log'}")
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text(encoding="utf-8").splitlines()]
    figures = {**figures_of(report, records), "cpu_s": spent_s}
    return Run(shape, speed, repeat, figures, load, tuple(report["notices"]), tuple(report["invalid_reasons"]))


def figures_of(report: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the figures of the table from a replay's report and its requests."""
    return {
        "requests": report["requests"],
        "completed": report["completed"],
        "rejected": report["rejected"],
        "failed": report["failed"],
        **{f"ttft_{p}_s": report["ttft_s"][p] for p in ("p50", "p90", "p99")},
        **{f"tbt_{p}_s": report["tbt_s"][p] for p in ("p50", "p99")},
        **{f"tpot_p{p}_s": value for p, value in zip((50, 99), tpot_percentiles(records, (50, 99)), strict=True)},
        "request_rps": report["request_rps"],
        "output_tps": report["output_tokens"] / report["duration_s"] if report["duration_s"] else None,
        "goodput_rps": report["goodput_rps"],
        "prefix_hit_rate": report["prefix_hit_rate"],
        "send_lateness_p99_s": report["send_lateness_s"]["p99"],
    }


def tpot_percentiles(records: list[dict[str, Any]], percentiles: tuple[int, ...]) -> list[float | None]:
    """Return percentiles of the completed requests' mean seconds per output token after the first."""
    times = [r["token_times_s"] for r in records if r["outcome"] == "completed" and len(r["token_times_s"]) > 1]
    if not times:
        return [None] * len(percentiles)
    return [float(v) for v in np.percentile([(t[-1] - t[0]) / (len(t) - 1) for t in times], percentiles)]


def cpu_seconds(supervisor_pid: int) -> float:
    """Return the total user and system time of all processes of the cluster, in seconds."""
    root = psutil.Process(supervisor_pid)
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        try:
            spent = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += spent.user + spent.system
    return total

"""Live run of one admission mode under a load: replay and outcome; and the table of all modes."""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.frontend.overload_load import TOKENS_PER_BLOCK
from benchmarks.frontend.overload_outcome import OverloadObjectives, counted
from benchmarks.frontend.processes import BUNDLED, Served, cluster

MODES = ("none", "early", "predicted-uniform", "predicted")


def options(description: str | None, *, seconds: float, uncounted: float) -> argparse.ArgumentParser:
    """Return a parser with the options that all comparisons of modes share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=seconds, help="duration of the arrivals")
    parser.add_argument("--uncounted", type=float, default=uncounted, help="initial seconds excluded from the figures")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    return parser


def given(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse and validate the command line; exits the program on errors."""
    args = parser.parse_args()
    if not 0 <= args.uncounted < args.seconds:
        parser.error(f"--uncounted must be at least 0 and below --seconds ({args.seconds:g}), got {args.uncounted:g}")
    return args


def each_mode(
    args: argparse.Namespace,
    work: Path,
    trace: Path,
    flags: Sequence[str],
    objectives: OverloadObjectives,
    *,
    verified: int,
) -> dict[str, dict[str, Any]]:
    """Run the trace under each mode in a fresh cluster with `flags`; print and return the results."""
    found = {}
    slo = ("--ttft-slo", str(objectives.ttft_s), "--tbt-slo", str(objectives.tbt_s))
    for mode in args.modes:
        with cluster(BUNDLED, work / mode, *flags, *slo, "--admission-mode", mode) as served:
            span = {"from_s": args.uncounted, "until_s": args.seconds}
            found[mode] = run(served, trace, work / mode / "replay", objectives, **span, verified=verified)
        print(mode, json.dumps(found[mode]), flush=True)
    return found


def run(
    served: Served,
    trace: Path,
    out: Path,
    objectives: OverloadObjectives,
    *,
    from_s: float,
    until_s: float,
    verified: int,
) -> dict[str, Any]:
    """Replay the trace, verify `verified` answers, and summarise the requests due between `from_s` and `until_s`."""
    report, records, cores_used = replayed(served, trace, out, objectives, verified)
    reasons: Counter[str] = Counter()
    for each in report["reasons"]:
        reasons[re.sub(r"[0-9.]+ s", "… s", each["reason"])[:80]] += each["count"]
    planned, late = (
        summed_metric(served, name) for name in ("paced_planned_seconds_total", "paced_late_seconds_total")
    )
    return {
        **counted(records, objectives, from_s=from_s, until_s=until_s),
        "failed": report["failed"],
        "wrong_tokens": report["wrong_tokens"],
        "reasons": reasons,
        "send_valid": report["valid"],
        "late_share": late / planned if planned else 0.0,
        "cores_used": cores_used,
    }


def replayed(
    served: Served,
    trace: Path,
    out: Path,
    objectives: OverloadObjectives,
    verified: int,
) -> tuple[dict[str, Any], list[dict[str, Any]], float]:
    """Replay the trace; return its report and records, and the mean number of CPU cores used by all processes."""
    command = [sys.executable, "-m", "moonpool", "replay", str(trace), "--url", served.url, "--out", str(out)]
    command += ["--tokens-per-block", str(TOKENS_PER_BLOCK)]
    command += [
        "--ttft-slo",
        str(objectives.ttft_s),
        "--tbt-slo",
        str(objectives.tbt_s),
        "--no-unloaded",
        "--max-send-lag",
        "5",
    ]
    command += ["--verify", "--verify-sample", str(verified)]
    began_s, used_s = time.monotonic(), sum(served.cpu_s().values()) + _children_cpu_s()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if not (out / "report.json").exists():
        raise SystemExit(f"the replay failed:\n{done.stdout}{done.stderr}")
    took_s = time.monotonic() - began_s
    used_s = sum(served.cpu_s().values()) + _children_cpu_s() - used_s
    report = json.loads((out / "report.json").read_text())
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    return report, records, used_s / took_s


def _children_cpu_s() -> float:
    """Return the CPU seconds of ended child processes: replays and earlier clusters."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summed_metric(served: Served, name: str) -> float:
    """Return a counter summed over all nodes."""
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^moonpool:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))


def show(title: str, modes: dict[str, dict[str, Any]]) -> None:
    """Print a table with a row per mode."""
    table = Table(title=title)
    columns = ("goodput_rps", "slo_attainment", "rejected", "failed", "wasted_share", "ttft_p90_s", "late_share")
    for heading in ("mode", *columns, "cores_used"):
        table.add_column(heading)
    for mode, row in modes.items():
        table.add_row(mode, *(f"{row[column]:.3g}" for column in (*columns, "cores_used")))
    Console().print(table)

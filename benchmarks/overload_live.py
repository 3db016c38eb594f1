"""Admission modes under overload, live: the real protocol at 8P+8D with paced engines, one mode after another.

    python -m benchmarks.overload_live [--load 2.0] [--seconds 45] [--nodes 8] [--modes none early ...]

Each mode gets a fresh cluster and the very same requests at the very same times: Mooncake's conversation trace, at
`--load` times what its prefill nodes could compute without reuse. The profile is slow enough for one small machine
to keep its pace; how far it did is told (`late_share`), and so is every wrong token. One JSON line at the end.

What a request cost in vain: prompt tokens that were computed for requests that then missed an objective.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.front_door.processes import BUNDLED, Served, cluster
from replay.plan import scaled_prompt_tokens
from traces import first_requests, load_trace
from worker.paced.profiles import profile_of
from worker.policy.cost_profile import CostProfile, save_profile

TOKENS_PER_BLOCK = 32
MAX_LEN = 2048
TTFT_S, TBT_S = 6.0, 0.4
MODES = ("none", "early", "predicted-uniform", "predicted")


def slow_profile() -> CostProfile:
    """Some 2 s for a prompt of the trace, and steps that grow out of their objective with some 7 sequences."""
    instant = profile_of("instant")
    prefill = replace(instant.prefill, fixed_s=0.05, per_token_s=0.0025)
    decode = replace(instant.decode, fixed_s=0.15, per_sequence_s=0.03)
    return replace(instant, name="overload", prefill=prefill, decode=decode)


def speed_of(load: float, nodes: int, profile: CostProfile, seconds: float) -> tuple[float, int]:
    """(the factor on the trace's pace that makes `load` times what the prefill nodes can do, requests in `seconds`)"""
    trace = load_trace("conversation")
    prompts = (scaled_prompt_tokens(row.input_length, trace.block_tokens, TOKENS_PER_BLOCK) for row in trace)
    capacity = nodes / fmean(profile.prefill_s(min(tokens, MAX_LEN)) for tokens in prompts)
    count = round(load * capacity * seconds)
    return first_requests(trace, count).duration_s / seconds, count


def run(served: Served, out: Path, speed: float, count: int) -> dict[str, Any]:
    """Replay, and what came of it."""
    command = [sys.executable, "-m", "moonpool", "replay", "conversation", "--url", served.url, "--out", str(out)]
    command += ["--speed", str(speed), "--limit", str(count), "--tokens-per-block", str(TOKENS_PER_BLOCK)]
    command += ["--slo-ttft", str(TTFT_S), "--slo-tbt", str(TBT_S), "--no-unloaded", "--max-send-lag", "5"]
    command += ["--verify", "--verify-sample", "100000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if not (out / "report.json").exists():
        raise SystemExit(f"the replay failed:\n{done.stdout}{done.stderr}")
    report = json.loads((out / "report.json").read_text())
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    computed = wasted = 0
    for record in records:
        if record["outcome"] == "completed":
            new = record["prompt_tokens"] - record["cached_tokens"]
            computed += new
            in_time = record["ttft_s"] <= TTFT_S and (record["tbt_worst10_s"] or 0.0) <= TBT_S
            wasted += 0 if in_time else new
    reasons: Counter[str] = Counter()
    for each in report["reasons"]:
        reasons[re.sub(r"[0-9.]+ s", "… s", each["reason"])[:80]] += each["count"]
    planned, late = (_sum(served, name) for name in ("paced_planned_seconds_total", "paced_late_seconds_total"))
    keys = ("goodput_rps", "slo_attainment", "slo_ttft_attainment", "slo_tbt_attainment", "completed", "rejected")
    return {
        **{key: report[key] for key in keys},
        "requests": len(records),
        "failed": report["failed"],
        "wrong_tokens": report["wrong_tokens"],
        "reasons": reasons,
        "computed_prompt_tokens": computed,
        "wasted_share": wasted / computed if computed else 0.0,
        "ttft_p50_s": report["ttft_s"]["p50"],
        "ttft_p90_s": report["ttft_s"]["p90"],
        "send_valid": report["valid"],
        "late_share": late / planned if planned else 0.0,
    }


def _sum(served: Served, name: str) -> float:
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^moonpool:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=45.0, help="of arrivals")
    parser.add_argument("--nodes", type=int, default=8, help="prefill nodes, and as many decode nodes")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        profile = slow_profile()
        save_profile(profile, work / "slow.json")
        speed, count = speed_of(args.load, args.nodes, profile, args.seconds)
        flags = ["--prefill-nodes", str(args.nodes), "--decode-nodes", str(args.nodes), "--paced-kv-bytes", "256"]
        flags += ["--paced-profile", str(work / "slow.json"), "--capacity-tokens", "32768", "--max-batch", "16"]
        flags += ["--cost-profile", f"moonpool={work / 'slow.json'}", "--pool-bytes", "128MiB"]
        flags += ["--ttft-slo", str(TTFT_S), "--tbt-slo", str(TBT_S)]
        for mode in args.modes:
            with cluster(BUNDLED, work / mode, *flags, "--admission-mode", mode) as served:
                found[mode] = run(served, work / mode / "replay", speed, count)
            print(mode, json.dumps(found[mode]), flush=True)
    table = Table(title=f"{args.load:g}x load at {args.nodes}P+{args.nodes}D, {count} requests in {args.seconds:g} s")
    columns = ("goodput_rps", "slo_attainment", "rejected", "failed", "wasted_share", "ttft_p90_s", "late_share")
    for heading in ("mode", *columns):
        table.add_column(heading)
    for mode, row in found.items():
        table.add_row(mode, *(f"{row[column]:.3g}" for column in columns))
    Console().print(table)
    print(json.dumps({"load": args.load, "nodes": args.nodes, "requests": count, "modes": found}))


if __name__ == "__main__":
    main()

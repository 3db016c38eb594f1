"""Admission modes under overload, live: the real protocol at 8P+8D with paced engines, one mode after another.

    python -m benchmarks.overload_live [--load 2.0] [--seconds 360] [--uncounted 90] [--nodes 8] [--modes none ...]

Each mode gets a fresh cluster and the very same requests at the very same times (`front_door/overload_load.py`): those
of Mooncake's conversation trace as a Poisson stream, at `--load` times what the nodes can do. The profile is slow
enough for one small machine to keep its pace; how far it did is told (`late_share`), with the processor time that all
processes had, and so is every wrong token. One JSON line at the end.

What a request cost in vain: prompt tokens that were computed for requests that then missed an objective. A cluster that
has just begun has lengths and margins to learn: the requests of the first `--uncounted` seconds are in no figure but
`good_by_window`, which shows them.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.front_door.overload_load import (
    MAX_BATCH,
    TBT_S,
    TOKENS_PER_BLOCK,
    TTFT_S,
    overload_load,
    slow_profile,
)
from benchmarks.front_door.overload_outcome import counted
from benchmarks.front_door.overload_picture import draw
from benchmarks.front_door.processes import BUNDLED, Served, cluster
from worker.policy.cost_profile import save_profile

MODES = ("none", "early", "predicted-uniform", "predicted")


def run(served: Served, trace: Path, out: Path, *, from_s: float, until_s: float) -> dict[str, Any]:
    """Replay, and what came of it."""
    command = [sys.executable, "-m", "moonpool", "replay", str(trace), "--url", served.url, "--out", str(out)]
    command += ["--tokens-per-block", str(TOKENS_PER_BLOCK)]
    command += ["--slo-ttft", str(TTFT_S), "--slo-tbt", str(TBT_S), "--no-unloaded", "--max-send-lag", "5"]
    command += ["--verify", "--verify-sample", "100000"]
    began_s, used_s = time.monotonic(), sum(served.cpu_s().values()) + _children_cpu_s()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if not (out / "report.json").exists():
        raise SystemExit(f"the replay failed:\n{done.stdout}{done.stderr}")
    took_s = time.monotonic() - began_s
    used_s = sum(served.cpu_s().values()) + _children_cpu_s() - used_s
    report = json.loads((out / "report.json").read_text())
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    reasons: Counter[str] = Counter()
    for each in report["reasons"]:
        reasons[re.sub(r"[0-9.]+ s", "… s", each["reason"])[:80]] += each["count"]
    planned, late = (_sum(served, name) for name in ("paced_planned_seconds_total", "paced_late_seconds_total"))
    return {
        **counted(records, from_s=from_s, until_s=until_s),
        "failed": report["failed"],
        "wrong_tokens": report["wrong_tokens"],
        "reasons": reasons,
        "send_valid": report["valid"],
        "late_share": late / planned if planned else 0.0,
        "cores_used": used_s / took_s,
        "took_s": took_s,
    }


def _children_cpu_s() -> float:
    """Of the processes that have ended: replays and earlier clusters."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _sum(served: Served, name: str) -> float:
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^moonpool:{name}\{{.*\}} (\S+)$", text, re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=360.0, help="of arrivals")
    parser.add_argument("--uncounted", type=float, default=90.0, help="of these, at the beginning")
    parser.add_argument("--nodes", type=int, default=8, help="prefill nodes, and as many decode nodes")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--plot", type=Path, help="a picture of the result: SVG or PNG")
    args = parser.parse_args()
    if not 0 <= args.uncounted < args.seconds:
        parser.error(f"--uncounted {args.uncounted:g} leaves none of --seconds {args.seconds:g}: give less")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        profile = slow_profile()
        save_profile(profile, work / "slow.json")
        load = overload_load(args.load, args.nodes, profile, args.seconds)
        load.write(work / "trace.jsonl")
        flags = ["--prefill-nodes", str(args.nodes), "--decode-nodes", str(args.nodes), "--paced-kv-bytes", "256"]
        flags += ["--paced-profile", str(work / "slow.json"), "--capacity-tokens", "32768"]
        flags += ["--max-batch", str(MAX_BATCH)]
        flags += ["--cost-profile", f"moonpool={work / 'slow.json'}", "--pool-bytes", "128MiB"]
        flags += ["--ttft-slo", str(TTFT_S), "--tbt-slo", str(TBT_S)]
        for mode in args.modes:
            with cluster(BUNDLED, work / mode, *flags, "--admission-mode", mode) as served:
                trace, out = work / "trace.jsonl", work / mode / "replay"
                found[mode] = run(served, trace, out, from_s=args.uncounted, until_s=args.seconds)
            print(mode, json.dumps(found[mode]), flush=True)
    result = {
        "load": args.load,
        "nodes": args.nodes,
        "seconds": args.seconds,
        "uncounted_s": args.uncounted,
        "requests": len(load.rows),
        "prefill_rps": load.prefill_rps,
        "decode_rps": load.decode_rps,
        "modes": found,
    }
    title = f"{args.load:g}x load at {args.nodes}P+{args.nodes}D, {len(load.rows)} requests in {args.seconds:g} s"
    table = Table(title=title)
    columns = ("goodput_rps", "slo_attainment", "rejected", "failed", "wasted_share", "ttft_p90_s", "late_share")
    for heading in ("mode", *columns, "cores_used"):
        table.add_column(heading)
    for mode, row in found.items():
        table.add_row(mode, *(f"{row[column]:.3g}" for column in (*columns, "cores_used")))
    Console().print(table)
    if args.plot is not None:
        draw(result, args.plot)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Live comparison of admission modes under overload on a small cluster: one prefill and one decode node with real
engines and the bundled model, all on this machine.

    python -m benchmarks.overload_small [--load 2.0] [--capacity R] [--seconds 90] [--uncounted 30] [--modes none ...]

The cluster's capacity is measured first, by a flood of requests. Each mode then gets a fresh cluster and the same
requests at the same times, at `--load` times the measured capacity. Nodes, frontend and load generator share the CPU
cores, so the results apply only to such a machine. The last line of output is JSON.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.frontend.overload_load import poisson_rows, write_rows
from benchmarks.frontend.overload_outcome import OverloadObjectives
from benchmarks.frontend.overload_run import each_mode, given, options, replayed, show
from benchmarks.frontend.processes import BUNDLED, cluster
from traces import load_trace

OBJECTIVES = OverloadObjectives(ttft_s=1.0, tbt_s=0.05)
FLAGS = ("--prefill-nodes", "1", "--decode-nodes", "1", "--max-batch", "16")
_FLOOD = 150  # requests
_VERIFIED = 40  # verified answers per mode; verifying takes as long as computing


def capacity_rps(work: Path) -> float:
    """Return the completed requests per second under a flood of requests."""
    rows = load_trace("conversation").rows[:_FLOOD]
    write_rows(poisson_rows(rows, rate=1000.0), work / "flood.jsonl")
    with cluster(BUNDLED, work / "flood", *FLAGS, "--admission-mode", "none") as served:
        _, records, _ = replayed(served, work / "flood.jsonl", work / "flood" / "replay", OBJECTIVES, _VERIFIED)
    done = [float(record["end_s"]) for record in records if record["outcome"] == "completed"]
    return len(done) / max(done)


def main() -> None:
    parser = options(__doc__, seconds=90.0, uncounted=30.0)
    parser.add_argument("--capacity", type=float, help="capacity in requests/s; measured if not given")
    args = given(parser)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        capacity = args.capacity or capacity_rps(work)
        rate = args.load * capacity
        rows = poisson_rows(load_trace("conversation").rows[: round(rate * args.seconds)], rate)
        write_rows(rows, work / "trace.jsonl")
        found = each_mode(args, work, work / "trace.jsonl", FLAGS, OBJECTIVES, verified=_VERIFIED)
    show(f"{args.load:g}x load at 1P+1D, {len(rows)} requests in {args.seconds:g} s", found)
    told = {"load": args.load, "seconds": args.seconds, "uncounted_s": args.uncounted, "requests": len(rows)}
    print(json.dumps({**told, "capacity_rps": capacity, "modes": found}))


if __name__ == "__main__":
    main()

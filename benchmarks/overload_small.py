"""Admission modes under overload on a small live cluster as it is: one prefill and one decode node, real engines, the
bundled model, all processes on this machine.

    python -m benchmarks.overload_small [--load 2.0] [--capacity R] [--seconds 90] [--uncounted 30] [--modes none ...]

What the cluster can do is measured first, by a flood of requests at once. Each mode then gets a fresh cluster and the
very same requests at the very same times, `--load` times as many a second as were completed of the flood. Nodes, front
door and the load itself share the processors: what a mode is worth here holds for such a machine. One JSON line at the
end.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.front_door.overload_load import poisson_rows, write_rows
from benchmarks.front_door.overload_outcome import OverloadObjectives
from benchmarks.front_door.overload_run import each_mode, given, options, replayed, show
from benchmarks.front_door.processes import BUNDLED, cluster
from traces import load_trace

OBJECTIVES = OverloadObjectives(ttft_s=1.0, tbt_s=0.05)
FLAGS = ("--prefill-nodes", "1", "--decode-nodes", "1", "--max-batch", "16")
_FLOOD = 150  # requests
_VERIFIED = 40  # answers of each mode: each takes as long as to compute it again


def capacity_rps(work: Path) -> float:
    """Requests per second that are completed while there is always more to do."""
    rows = load_trace("conversation").rows[:_FLOOD]
    write_rows(poisson_rows(rows, rate=1000.0), work / "flood.jsonl")
    with cluster(BUNDLED, work / "flood", *FLAGS, "--admission-mode", "none") as served:
        _, records, _ = replayed(served, work / "flood.jsonl", work / "flood" / "replay", OBJECTIVES, _VERIFIED)
    done = [float(record["end_s"]) for record in records if record["outcome"] == "completed"]
    return len(done) / max(done)


def main() -> None:
    parser = options(__doc__, seconds=90.0, uncounted=30.0)
    parser.add_argument("--capacity", type=float, help="requests/s that the cluster can do; else a flood tells")
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

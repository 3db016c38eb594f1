"""Live comparison of admission modes under overload: the real protocol at 8P+8D with paced engines.

    python -m benchmarks.overload_live [--load 2.0] [--seconds 240] [--uncounted 90] [--nodes 8] [--modes none ...]

Each mode gets a fresh cluster and the same requests at the same times (`frontend/overload_load.py`): those of
Mooncake's conversation trace as a Poisson stream, at `--load` times the nodes' capacity. The profile is slow enough for
one small machine to keep pace; `late_share` is the lateness of the steps, and the CPU time of all processes and all
wrong tokens are reported, too. The last line of output is JSON.

Wasted tokens are prompt tokens computed for requests that then missed an objective. A fresh cluster has to learn answer
lengths and prediction margins: requests of the first `--uncounted` seconds are included only in `good_by_window`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from benchmarks.frontend.overload_load import (
    MAX_BATCH,
    TBT_S,
    TTFT_S,
    overload_load,
    slow_profile,
    write_rows,
)
from benchmarks.frontend.overload_outcome import OverloadObjectives
from benchmarks.frontend.overload_picture import draw
from benchmarks.frontend.overload_run import each_mode, given, options, show
from worker.policy.cost_profile import save_profile


def main() -> None:
    parser = options(__doc__, seconds=240.0, uncounted=90.0)
    parser.add_argument("--nodes", type=int, default=8, help="number of prefill nodes and of decode nodes")
    parser.add_argument("--plot", type=Path, help="file for a picture of the result: SVG or PNG")
    args = given(parser)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        profile = slow_profile()
        save_profile(profile, work / "slow.json")
        load = overload_load(args.load, args.nodes, profile, args.seconds)
        write_rows(load.rows, work / "trace.jsonl")
        flags = [
            "--engine",
            "paced",
            "--prefill-nodes",
            str(args.nodes),
            "--decode-nodes",
            str(args.nodes),
            "--paced-kv-bytes",
            "256",
        ]
        flags += ["--paced-profile", str(work / "slow.json"), "--capacity-tokens", "32768"]
        flags += ["--max-batch", str(MAX_BATCH)]
        flags += ["--cost-profile", f"moonpool={work / 'slow.json'}", "--pool-bytes", "128MiB"]
        found = each_mode(
            args, work, work / "trace.jsonl", flags, OverloadObjectives(TTFT_S, TBT_S), verified=len(load.rows)
        )
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
    show(f"{args.load:g}x load at {args.nodes}P+{args.nodes}D, {len(load.rows)} requests in {args.seconds:g} s", found)
    if args.plot is not None:
        draw(result, args.plot)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

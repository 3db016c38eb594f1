"""Prefill and decode on separate nodes against aggregated workers, live: paced engines of the bundled 70B profile.

    python -m benchmarks.frontier_live [--seeds N] [--shapes NAME ...] [--store]

The live side of `benchmarks/frontier.py`, for its workload of long prompts with long answers: each shape gets a fresh
cluster of four workers and the same requests at the same times. Prompts have a sixteenth of the simulation's tokens and
the profile takes sixteen times as long for each; all times are `SLOWER` times those of the profile, so that one small
machine keeps pace (`late_share`: lateness of the steps). Chunks are whole blocks, of 512 of the simulation's tokens. A
step with both a chunk and decoding takes the sum of both times. Nothing is rejected. Times in the result are divided by
`SLOWER` again. The last line of output is JSON: for each shape, the share of the requests that meet the TTFT objective
and each objective of the time between tokens (mean of a request's longest tenth).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

from benchmarks.copies_live import hot_rows
from benchmarks.frontend.overload_load import MAX_LEN, TOKENS_PER_BLOCK, scaled_profile, write_rows
from benchmarks.frontend.overload_outcome import OverloadObjectives
from benchmarks.frontend.overload_run import replayed, summed_metric
from benchmarks.frontend.processes import BUNDLED, cluster
from benchmarks.frontier import TBT_OBJECTIVES_S, WORKLOADS
from benchmarks.stored import store
from simulator.serving.confidence import mean_of
from simulator.serving.hot_prefixes import HotPrefixes
from traces import BLOCK_TOKENS
from worker.policy.cost_profile import save_profile

SLOWER: Final = 2.0
_WORKLOAD: Final = "long prompts, long answers"
_SCALE: Final = BLOCK_TOKENS // TOKENS_PER_BLOCK  # tokens of the simulation's prompts per token of the replay's
_PREFIXES: Final = 16  # each is requested once, with a short answer, before the counted requests
_KV_BYTES: Final = 2048  # per token
_MAX_BATCH: Final = 64
SHAPES: Final[dict[str, tuple[str, ...]]] = {
    "3P+1D": ("--prefill-nodes=3", "--decode-nodes=1"),
    **{
        f"4 aggregated, {tokens}": ("--aggregated=4", f"--prefill-chunk-tokens={tokens // _SCALE}")
        for tokens in (512, 2048)
    },
}
"""Compared clusters; the number is the most prompt tokens of a step, in tokens of the simulation."""


def main() -> None:
    args = _arguments()
    workload = WORKLOADS[_WORKLOAD]
    assert workload.hot is not None
    # The replay divides the lengths of answers by the scale of the prompts.
    hot = replace(workload.hot, num_prefixes=_PREFIXES, answer_tokens=workload.hot.answer_tokens * _SCALE)
    runs: dict[str, list[dict[str, Any]]] = {shape: [] for shape in args.shapes}
    for seed in range(args.seeds):
        for shape in args.shapes:
            runs[shape].append(_run(shape, hot, seed, args.rate, workload.duration_s, workload.ttft_s))
            print(shape, json.dumps(runs[shape][-1]), flush=True)
    result = {
        "workload": asdict(workload),
        "tbt_objectives_s": TBT_OBJECTIVES_S,
        "rate_per_s": args.rate,
        "slower": SLOWER,
        "scale": _SCALE,
        "seeds": args.seeds,
        "shares": {
            shape: [mean_of(each).mean for each in zip(*(run["shares"] for run in found), strict=True)]
            for shape, found in runs.items()
        },
        "runs": runs,
    }
    if args.store:
        store("frontier-live", result)
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rate", type=float, default=1.4, help="requests per second of the profile's time")
    parser.add_argument("--store", action="store_true", help="store the result in benchmarks/results")
    return parser.parse_args()


def _run(
    shape: str, hot: HotPrefixes, seed: int, rate_per_s: float, duration_s: float, ttft_s: float
) -> dict[str, Any]:
    rows, from_s = hot_rows(hot, seed, rate_per_s / SLOWER, duration_s * SLOWER)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        rows = [replace(row, output_length=_SCALE) if row.timestamp_ms < 1e3 * from_s else row for row in rows]
        write_rows(rows, work / "trace.jsonl")
        profile = scaled_profile(_SCALE, slower=SLOWER, max_len=MAX_LEN, max_batch=_MAX_BATCH)
        save_profile(profile, work / "profile.json")
        flags = ["--engine", "paced", "--paced-profile", str(work / "profile.json"), "--paced-kv-bytes", str(_KV_BYTES)]
        flags += ["--block-tokens", str(TOKENS_PER_BLOCK), "--capacity-tokens", "65536", "--max-batch", str(_MAX_BATCH)]
        flags += ["--cost-profile", f"moonpool={work / 'profile.json'}", "--pool-bytes", "128MiB"]
        flags += ["--admission-mode", "none", "--max-queue", "600", *SHAPES[shape]]
        objectives = OverloadObjectives(SLOWER * ttft_s, SLOWER * TBT_OBJECTIVES_S[-1])
        with cluster(BUNDLED, work, *flags) as served:
            report, records, cores_used = replayed(
                served, work / "trace.jsonl", work / "replay", objectives, verified=20
            )
            planned, late = (summed_metric(served, f"paced_{name}_seconds_total") for name in ("planned", "late"))
    counted = [each for each in records if each["due_s"] >= from_s]
    served_in_time = [
        each["tbt_worst10_s"] / SLOWER
        for each in counted
        if each["outcome"] == "completed" and each["ttft_s"] <= SLOWER * ttft_s
    ]
    ttfts = [each["ttft_s"] / SLOWER for each in counted if each["outcome"] == "completed"]
    return {
        "seed": seed,
        "requests": len(counted),
        "failed": report["failed"],
        "wrong_tokens": report["wrong_tokens"],
        "shares": _shares(served_in_time, len(counted)),
        "ttft_p50_s": quantiles(ttfts, n=10)[4],
        "ttft_p90_s": quantiles(ttfts, n=10)[8],
        "late_share": late / planned,
        "cores_used": cores_used,
    }


def _shares(tbts_s: Sequence[float], requests: int) -> list[float]:
    return [sum(tbt_s <= most_s for tbt_s in tbts_s) / requests for most_s in TBT_OBJECTIVES_S]


if __name__ == "__main__":
    main()

"""Prefill and decode on separate nodes against aggregated workers, live with paced engines of the 70B profile.

    python -m benchmarks.frontier_live [--workloads NAME ...] [--seeds N] [--add] [--store]

Every shape gets one fresh cluster, which serves the same requests at the same times, drawn as in
`benchmarks/frontier.py`, one replay per seed. The figures are the shares of requests that meet TTFT and each objective
of the time between tokens (mean of a request's longest tenth). A paced step with a prompt's chunk takes the sum of the
chunk's and the decode step's time. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.copies_live import hot_rows
from benchmarks.frontend.overload_load import write_rows
from benchmarks.frontend.overload_outcome import OverloadObjectives
from benchmarks.frontend.overload_run import replayed, summed_metric
from benchmarks.frontend.processes import Served, cluster, long_folder
from benchmarks.frontier import TBT_OBJECTIVES_S
from benchmarks.stored import latest, store
from simulator.serving.confidence import mean_of
from simulator.serving.hot_prefixes import HotPrefixes
from traces import BLOCK_TOKENS
from worker.policy.cost_profile import MOONCAKE

_MAX_LEN: Final = 65536


@dataclass(frozen=True, slots=True)
class LiveWorkload:
    """Requests, their rate, the objective of TTFT, and the flags of each compared cluster."""

    hot: HotPrefixes
    rate_per_s: float
    seconds: float
    ttft_s: float
    shapes: dict[str, tuple[str, ...]]


def _shapes(nodes: int, prefill_nodes: int, chunk_tokens: Sequence[int]) -> dict[str, tuple[str, ...]]:
    decode_nodes = nodes - prefill_nodes
    split = ("--prefill-nodes", str(prefill_nodes), "--decode-nodes", str(decode_nodes))
    return {
        f"{prefill_nodes}P+{decode_nodes}D": split,
        **{
            f"{nodes} aggregated, {tokens}": ("--aggregated", str(nodes), "--prefill-chunk-tokens", str(tokens))
            for tokens in chunk_tokens
        },
    }


WORKLOADS: Final = {
    "long prompts, 2 nodes": LiveWorkload(
        HotPrefixes(num_prefixes=8, prefix_tokens=1024, question_tokens=6144, answer_tokens=192),
        rate_per_s=0.8,
        seconds=35.0,
        ttft_s=8.0,
        shapes=_shapes(2, 1, (512,)),
    ),
    "long prompts, 4 nodes": LiveWorkload(
        HotPrefixes(num_prefixes=8, prefix_tokens=1024, question_tokens=6144, answer_tokens=192),
        rate_per_s=1.6,
        seconds=40.0,
        ttft_s=8.0,
        shapes=_shapes(4, 2, (512,)),
    ),
    "short prompts, 2 nodes": LiveWorkload(
        HotPrefixes(num_prefixes=8, prefix_tokens=1024, question_tokens=512, answer_tokens=64),
        rate_per_s=14.0,
        seconds=20.0,
        ttft_s=1.0,
        shapes=_shapes(2, 1, (512,)),
    ),
}


def main() -> None:
    args = _arguments()
    found: dict[str, Any] = latest("frontier-live")[0]["workloads"] if args.add else {}
    result: dict[str, Any] = {}
    for name in args.workloads:
        workload = WORKLOADS[name]
        runs = {shape: _runs(workload, flags, args.seeds) for shape, flags in workload.shapes.items()}
        found[name] = {**asdict(workload), "runs": runs, "shapes": summary(runs)}
        for shape, row in found[name]["shapes"].items():
            shares = " ".join(f"{each['mean']:.2f}" for each in row["shares"])
            print(f"{name}, {shape}: TTFT {row['ttft_mean_s']['mean']:.2f} s, shares {shares}", flush=True)
        result = {"tbt_objectives_s": TBT_OBJECTIVES_S, "seeds": args.seeds, "workloads": found}
        if args.store:
            store("frontier-live", result)
    print(json.dumps(result))


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the means of all figures over the seeds, and the paired differences to the first shape in shares."""
    first = next(iter(runs.values()))
    return {
        shape: {
            "shares": [asdict(mean_of(each)) for each in zip(*(run["shares"] for run in these), strict=True)],
            "shares_below_first": [
                asdict(mean_of([a - b for a, b in zip(over, under, strict=True)]))
                for over, under in zip(
                    zip(*(run["shares"] for run in first), strict=True),
                    zip(*(run["shares"] for run in these), strict=True),
                    strict=True,
                )
            ],
            **{
                name: asdict(mean_of([run[name] for run in these]))
                for name in ("ttft_mean_s", "tbt_mean_s", "late_share", "wrong_tokens", "failed")
            },
        }
        for shape, these in runs.items()
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="keep the other workloads of the latest stored result")
    parser.add_argument("--store", action="store_true", help="store the result after every workload")
    return parser.parse_args()


def _runs(workload: LiveWorkload, flags: Sequence[str], seeds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        model = long_folder(work / "model", _MAX_LEN)
        own = ["--engine", "paced", "--paced-profile", "mooncake-70b-8xa800", "--paced-kv-bytes", "256"]
        own += ["--cost-profile", f"model={MOONCAKE}", "--capacity-tokens", "262144", "--max-batch", "128"]
        own += ["--admission-mode", "none", "--max-queue", "600", "--pool-bytes", "256MiB", "--block-tokens", "64"]
        with cluster(model, work / "cluster", *own, *flags) as served:
            return [_run(served, workload, seed, work / f"seed-{seed}") for seed in range(seeds)]


def _run(served: Served, workload: LiveWorkload, seed: int, folder: Path) -> dict[str, Any]:
    rows, from_s = hot_rows(workload.hot, seed, workload.rate_per_s, workload.seconds)
    folder.mkdir()
    write_rows(rows, folder / "trace.jsonl")
    names = ("paced_planned_seconds_total", "paced_late_seconds_total")
    before = [summed_metric(served, name) for name in names]
    report, records, cores_used = replayed(
        served,
        folder / "trace.jsonl",
        folder / "replay",
        OverloadObjectives(workload.ttft_s, TBT_OBJECTIVES_S[-1]),
        verified=20,
        tokens_per_block=BLOCK_TOKENS,
        seed=seed,
    )
    planned, late = (summed_metric(served, name) - earlier for name, earlier in zip(names, before, strict=True))
    counted = [each for each in records if each["due_s"] >= from_s]
    served_ones = [each for each in counted if each["outcome"] == "completed"]
    in_time = [each["tbt_worst10_s"] for each in served_ones if each["ttft_s"] <= workload.ttft_s]
    return {
        "seed": seed,
        "requests": len(counted),
        "failed": report["failed"],
        "wrong_tokens": report["wrong_tokens"],
        "shares": [sum(tbt_s <= most_s for tbt_s in in_time) / len(counted) for most_s in TBT_OBJECTIVES_S],
        "ttft_mean_s": sum(each["ttft_s"] for each in served_ones) / len(served_ones),
        "tbt_mean_s": sum(each["tbt_worst10_s"] for each in served_ones) / len(served_ones),
        "late_share": late / planned,
        "cores_used": cores_used,
    }


if __name__ == "__main__":
    main()

"""Comparison with and without colocated prefill on simulated clusters, on the same arrivals.

The clusters are those of `moonpool simulate overload`, with a bundled trace and the bundled 70B profile. For each load:
goodput, TTFT and TBT of both, and the mean of per-seed differences with its 95 % confidence interval. The last line of
output is JSON.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.simulated import simulated_spec  # noqa: E402
from settings.conductor import AdmissionMode  # noqa: E402
from simulator.serving.confidence import mean_of  # noqa: E402
from simulator.serving.runs import RunSpec, ServingRun, run_all, worker_pool  # noqa: E402

FIGURES = (
    "goodput",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "tbt_p50_s",
    "tbt_p90_s",
    "missed_ttft",
    "missed_tbt",
    "rejected",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 5.5, 8.0], help="arrivals per second")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--ttft", type=float, default=30.0)
    parser.add_argument("--tbt", type=float, default=0.1, help="objective in seconds; the admission margin is learned")
    parser.add_argument("--mode", default="predicted-uniform", choices=get_args(AdmissionMode))
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    spec = simulated_spec(given, given.mode)
    loads = []
    for rate in given.rates:
        with worker_pool(given.processes) as pool:
            runs = run_all([each for seed in range(given.seeds) for each in _both(spec, seed, rate)], pool)
        loads.append({"rate_per_s": rate, **_summary(runs[0::2], runs[1::2])})
        print(json.dumps(loads[-1], indent=1), flush=True)
    print(json.dumps({"settings": vars(given), "loads": loads}))


def _both(spec: RunSpec, seed: int, rate: float) -> list[RunSpec]:
    drawn = replace(spec, seed=seed, rate_per_s=rate)
    return [replace(drawn, policy=replace(spec.policy, colocated_prefill=mode)) for mode in ("off", "act")]


def _summary(off: list[ServingRun], act: list[ServingRun]) -> dict[str, Any]:
    found: dict[str, Any] = {"undivided_share": asdict(mean_of([run.outcome.undivided_share for run in act]))}
    for name in FIGURES:
        before, after = ([getattr(run.outcome, name) for run in runs] for runs in (off, act))
        found[name] = {
            "off": mean_of(before).mean,
            "act": mean_of(after).mean,
            "difference": asdict(mean_of([b - a for a, b in zip(before, after, strict=True)])),
        }
    return found


if __name__ == "__main__":
    main()

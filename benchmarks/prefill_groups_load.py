"""Effect of prefill groups by load, on simulated clusters with the same arrivals for every group size.

Uses the bundled conversation trace and the bundled 70B profile. Loads are relative to the capacity without groups: the
highest rate at which, without rejections, 90 % of the requests meet both objectives. Per load and size: TTFT, goodput,
and the mean of per-seed differences with its 95 % confidence interval. The last line of output is JSON.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.simulated import simulated_spec  # noqa: E402
from simulator.serving.capacity import find_capacity  # noqa: E402
from simulator.serving.confidence import mean_of  # noqa: E402
from simulator.serving.runs import RunSpec, ServingRun, run_all, worker_pool  # noqa: E402

FIGURES = ("goodput", "attainment", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "tbt_p90_s", "grouped_share")
COLOURS = {1: "#7f7f7f", 2: "#1f77b4", 4: "#d62728", 8: "#9467bd"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=500, help="approximate number per run")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9, 1.2])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="maximum group sizes, starting with 1")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--ttft", type=float, default=10.0)
    parser.add_argument("--tbt", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=0.0, help="capacity in requests/s; 0: find it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="SVG file for a plot")
    given = parser.parse_args()
    spec = simulated_spec(given, "predicted-uniform")
    with worker_pool(given.processes) as pool:
        capacity = given.rate
        if not capacity:
            found = find_capacity(spec, 2, lambda specs: run_all(specs, pool), lambda rate, good: print(rate, good))
            capacity = found.rate_per_s
        loads = []
        for load in given.loads:
            specs = [_sized(spec, size, seed, load * capacity) for seed in range(given.seeds) for size in given.sizes]
            runs = run_all(specs, pool)
            by_size = {size: runs[at :: len(given.sizes)] for at, size in enumerate(given.sizes)}
            loads.append({"load": load, "rate_per_s": load * capacity, "sizes": _summary(by_size)})
            print(json.dumps(loads[-1]), flush=True)
    if given.plot is not None:
        _plot(loads, given.plot)
    settings = {**vars(given), "plot": None, "capacity_per_s": capacity}
    print(json.dumps({"settings": settings, "loads": loads}))


def _sized(spec: RunSpec, size: int, seed: int, rate: float) -> RunSpec:
    return replace(spec, seed=seed, rate_per_s=rate, policy=replace(spec.policy, prefill_group_size=size))


def _summary(runs: dict[int, list[ServingRun]]) -> dict[int, dict[str, Any]]:
    alone = next(iter(runs.values()))
    found: dict[int, dict[str, Any]] = {}
    for size, these in runs.items():
        found[size] = {}
        for name in FIGURES:
            values = [getattr(run.outcome, name) for run in these]
            differences = [value - getattr(run.outcome, name) for value, run in zip(values, alone, strict=True)]
            found[size][name] = {**asdict(mean_of(values)), "difference": asdict(mean_of(differences))}
    return found


def _plot(loads: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    panels = (
        ("ttft_p90_s", "TTFT P90, s"),
        ("ttft_mean_s", "TTFT mean, s"),
        ("attainment", "good, of all arrived"),
    )
    for axis, (name, title) in zip(axes, panels, strict=True):
        for size in loads[0]["sizes"]:
            points = [each["sizes"][size][name] for each in loads]
            middle = [point["mean"] for point in points]
            bars = [[m - p["low"] for m, p in zip(middle, points, strict=True)]]
            bars.append([p["high"] - m for m, p in zip(middle, points, strict=True)])
            label = "one node" if size == 1 else f"up to {size}"
            xs = [each["load"] for each in loads]
            axis.errorbar(xs, middle, bars, label=label, color=COLOURS.get(size), marker="o", capsize=3)
        axis.set_title(title)
        axis.set_xlabel("load relative to the capacity without groups")
        if name != "attainment":
            axis.set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()

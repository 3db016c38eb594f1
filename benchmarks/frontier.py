"""Prefill and decode on separate nodes against aggregated workers: requests per second under objectives, simulated.

    python benchmarks/frontier.py [--workloads NAME ...] [--seeds N] [--store]

The conductor's own policy places the same arrivals on the same number of nodes of the bundled 70B profile: separate
prefill and decode nodes in several splits, and aggregated workers, which compute chunks of prompts beside their
answers, with several chunk sizes. The time of a step with both is bounded from above by the sum of both parts and from
below by the longer one; every aggregated cluster runs with each. Nothing is rejected.

The capacity of a cluster is the highest rate at which `SHARE` of the requests meet both objectives: TTFT, and the time
between tokens (mean of a request's longest tenth), which is swept. The best split is compared with the best chunk size
at each objective. Ratios are geometric means of pairs with the same seed, with 95 % confidence intervals. The last line
of output is JSON.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.simulated import simulated_spec  # noqa: E402
from benchmarks.stored import latest, store  # noqa: E402
from simulator.serving.clock import NS  # noqa: E402
from simulator.serving.cluster import SimulatedCluster  # noqa: E402
from simulator.serving.confidence import mean_of, ratio_of  # noqa: E402
from simulator.serving.hot_prefixes import HotPrefixes  # noqa: E402
from simulator.serving.runs import WARM_UP, RunSpec, worker_pool, workload_of  # noqa: E402
from simulator.serving.settings import MergedSteps  # noqa: E402
from worker.policy.cost_profile import load_profile  # noqa: E402

SHARE: Final = 0.9
TBT_OBJECTIVES_S: Final = (0.03, 0.04, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.5, 0.8, 1.2)
CHUNK_TOKENS: Final = (128, 512, 2048)
"""Most prompt tokens of a step of an aggregated worker."""
NODES: Final = 8
_POOL_BLOCKS: Final = 3000  # of each node; of hosts without a pool node, the others have them


@dataclass(frozen=True, slots=True)
class FrontierWorkload:
    """Requests, the splits of the nodes, and the rates to try."""

    hot: HotPrefixes | None  # None: conversations of the bundled trace
    prefill_nodes: tuple[int, ...]  # per split; the others decode
    ttft_s: float  # objective
    rates_per_s: tuple[float, ...]  # ascending
    duration_s: float  # of the arrivals


WORKLOADS: Final = {
    "long prompts, long answers": FrontierWorkload(
        HotPrefixes(prefix_tokens=1024, question_tokens=12288, answer_tokens=512),
        prefill_nodes=(4, 5, 6),
        ttft_s=15.0,
        rates_per_s=(0.5, 1.0, 2.0, 3.0, 4.0, 5.0),
        duration_s=60.0,
    ),
    "conversations": FrontierWorkload(
        None,
        prefill_nodes=(4, 5, 6),
        ttft_s=15.0,
        rates_per_s=(0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
        duration_s=60.0,
    ),
    "short prompts": FrontierWorkload(
        HotPrefixes(prefix_tokens=1024, question_tokens=512, answer_tokens=128),
        prefill_nodes=(4, 5, 6),
        ttft_s=1.0,
        rates_per_s=(5.0, 20.0, 35.0, 50.0, 65.0, 80.0, 95.0, 110.0),
        duration_s=8.0,
    ),
}


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """How the nodes are used: `prefill_nodes` of them for prompts only, or all of them for both."""

    name: str
    prefill_nodes: int = 0  # 0: aggregated
    chunk_tokens: int = 8192
    merged_steps: MergedSteps = "sum"


Shares = tuple[float, ...]
"""Share of the requests that meet both objectives, per TBT objective."""


def main() -> None:
    args = _arguments()
    if args.merge:
        result: dict[str, Any] = latest("frontier")[0]
    else:
        result = {"workloads": {}}
    spec = simulated_spec(args, "none")
    spec = replace(spec, policy=replace(spec.policy, max_queue_s=1e6))
    with worker_pool(args.processes) as pool:
        for name in args.workloads:
            workload = WORKLOADS[name]
            found = _measured(spec, workload, args.seeds, pool)
            result["workloads"][name] = {**asdict(workload), "seeds": args.seeds, **found}
            _show(name, result["workloads"][name])
    result |= {
        "nodes": NODES,
        "share": SHARE,
        "tbt_objectives_s": TBT_OBJECTIVES_S,
        "settings": {**vars(args), "seeds": args.seeds},
    }
    if args.store:
        store("frontier", result)
    print(json.dumps(result))


def shapes(workload: FrontierWorkload) -> list[ClusterShape]:
    """Return the compared clusters of a workload."""
    split = [ClusterShape(f"{count}P+{NODES - count}D", count) for count in workload.prefill_nodes]
    aggregated = [
        ClusterShape(f"{NODES} aggregated, {tokens}, {merged}", 0, tokens, merged)
        for tokens in CHUNK_TOKENS
        for merged in ("sum", "longest")
    ]
    return [*split, *aggregated]


def capacity_per_s(rates_per_s: Sequence[float], shares: Sequence[float]) -> float:
    """Return the highest rate up to which at least `SHARE` of the requests meet the objectives.

    `shares` [rates]: those at the ascending rates. Interpolated linearly; 0 if the lowest rate is too high.
    """
    if shares[0] < SHARE:
        return 0.0
    for before, after in pairwise(range(len(shares))):
        if shares[after] < SHARE:
            part = (shares[before] - SHARE) / (shares[before] - shares[after])
            return rates_per_s[before] + part * (rates_per_s[after] - rates_per_s[before])
    return rates_per_s[-1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="store the result in benchmarks/results")
    parser.add_argument("--merge", action="store_true", help="keep the other workloads of the latest stored result")
    parser.set_defaults(trace="conversation", prefill=8, decode=8, requests=1, ttft=30.0, tbt=0.1)
    return parser.parse_args()


def _measured(spec: RunSpec, workload: FrontierWorkload, seeds: int, pool: ProcessPoolExecutor) -> dict[str, Any]:
    clusters = shapes(workload)
    sweeps = {
        shape.name: [
            pool.submit(
                sweep, [_run(spec, workload, shape, seed, rate) for rate in workload.rates_per_s], workload.ttft_s
            )
            for seed in range(seeds)
        ]
        for shape in clusters
    }
    by_shape = {name: [future.result() for future in futures] for name, futures in sweeps.items()}
    # [shape][seed][objective], per second and node.
    capacities = {
        name: [
            [
                capacity_per_s(workload.rates_per_s, [shares[at] for shares in by_rate]) / NODES
                for at in range(len(TBT_OBJECTIVES_S))
            ]
            for by_rate in by_seed
        ]
        for name, by_seed in by_shape.items()
    }
    return {
        "shares": {
            name: [[mean_of(each).mean for each in zip(*at, strict=True)] for at in zip(*found, strict=True)]
            for name, found in by_shape.items()
        },
        "capacity_per_node": {
            name: [asdict(mean_of(each)) for each in zip(*by_seed, strict=True)] for name, by_seed in capacities.items()
        },
        "best": [_best(clusters, capacities, at) for at in range(len(TBT_OBJECTIVES_S))],
    }


def _best(clusters: Sequence[ClusterShape], capacities: Mapping[str, list[list[float]]], at: int) -> dict[str, Any]:
    """Return the best split, the best chunk size for each bound of merged steps, and the ratios of capacities."""

    def best_of(names: Sequence[str]) -> str:
        return max(names, key=lambda name: sum(by_objective[at] for by_objective in capacities[name]))

    split = best_of([shape.name for shape in clusters if shape.prefill_nodes])
    found: dict[str, Any] = {"split": split}
    for merged in ("sum", "longest"):
        name = best_of([shape.name for shape in clusters if not shape.prefill_nodes and shape.merged_steps == merged])
        over, under = ([by_objective[at] for by_objective in capacities[each]] for each in (split, name))
        found[merged] = name
        is_positive = min(over) > 0 and min(under) > 0
        found[f"split_over_{merged}"] = asdict(ratio_of(over, under)) if is_positive else None
    return found


def _run(spec: RunSpec, workload: FrontierWorkload, shape: ClusterShape, seed: int, rate: float) -> RunSpec:
    hosts = shape.prefill_nodes or NODES
    settings = replace(
        spec.settings,
        prefill_nodes=shape.prefill_nodes or NODES // 2,
        decode_nodes=NODES - (shape.prefill_nodes or NODES // 2),
        is_aggregated=not shape.prefill_nodes,
        merged_steps=shape.merged_steps,
        chunk_tokens=shape.chunk_tokens,
        pool_blocks=_POOL_BLOCKS * NODES // hosts,
    )
    if workload.hot is not None:
        settings = replace(settings, max_new_tokens=workload.hot.answer_tokens)
    requests = round(rate * workload.duration_s)
    return replace(spec, settings=settings, seed=seed, rate_per_s=rate, requests=requests, hot=workload.hot)


def sweep(specs: Sequence[RunSpec], ttft_s: float) -> list[Shares]:
    """Simulate the runs of ascending rates, and return their shares of requests that meet both objectives.

    Those of rates beyond the capacity for the longest objective are 0 and not simulated.
    """
    found: list[Shares] = []
    for spec in specs:
        is_beyond = bool(found) and found[-1][-1] < SHARE
        found.append((0.0,) * len(TBT_OBJECTIVES_S) if is_beyond else attained(spec, ttft_s))
    return found


def attained(spec: RunSpec, ttft_s: float) -> Shares:
    """Simulate one run and return the shares of requests that meet the TTFT and each TBT objective."""
    cluster = SimulatedCluster(spec.settings, spec.policy, load_profile(spec.profile), workload_of(spec), spec.seed)
    cluster.run()
    from_ns = WARM_UP * spec.requests / spec.rate_per_s * NS
    works = [work for work in cluster.works if work.job.arrival_ns >= from_ns]
    in_time = [work.tbt_s for work in works if work.end == "finished" and work.ttft_s <= ttft_s]
    return tuple(sum(tbt_s <= most_s for tbt_s in in_time) / len(works) for most_s in TBT_OBJECTIVES_S)


def _show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: requests/s and node with {SHARE:.0%} within {found['ttft_s']:g} s and the objective of TBT")
    print(f"  {'ms':28}" + "".join(f"{1e3 * tbt_s:9.0f}" for tbt_s in TBT_OBJECTIVES_S))
    for shape, row in found["capacity_per_node"].items():
        print(f"  {shape:28}" + "".join(f"{each['mean']:9.3f}" for each in row))
    for merged in ("sum", "longest"):
        ratios = [each[f"split_over_{merged}"] for each in found["best"]]
        print(f"  split / {merged:20}" + "".join(f"{each['mean']:9.2f}" if each else f"{'–':>9}" for each in ratios))
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Mean time to first token by placement, and what copies of hot prefixes save, on simulated clusters.

    python benchmarks/scheduling.py [--seeds N] [--requests N] [--store]

The conductor's own policy object places the same arrivals on the same 8 prefill and 8 decode nodes (the bundled 70B
profile), once per placement: `random`, `load-balance` (shortest queue), `cache-aware` (least TTFT by the prefix in each
node's own pool), `algorithm1` (that of the Mooncake paper, as printed) and `moonpool`; the last also on 16 aggregated
workers, which compute prompts in chunks beside their answers. Arrivals: conversations of the bundled trace at its own
rate, per network; and questions behind popular prefixes, with and without copies. Ratios are geometric means of pairs
with the same seed, with 95 % confidence intervals. The last line of output is JSON; it repeats the stored figures of
`admission.py`, `agents.py` and `dialogues_live.py`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, get_args

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.simulated import simulated_spec  # noqa: E402
from benchmarks.stored import latest, store  # noqa: E402
from settings.conductor import BLIND_PLACEMENTS, Placement  # noqa: E402
from simulator.serving.confidence import mean_of, ratio_of  # noqa: E402
from simulator.serving.hot_prefixes import HotPrefixes  # noqa: E402
from simulator.serving.runs import RunSpec, ServingRun, run_all, worker_pool  # noqa: E402
from traces import load_trace  # noqa: E402
from worker.policy.cost_profile import MOONCAKE, CostProfile, load_profile, save_profile  # noqa: E402

PAPER_TTFT_S: Final = {"random": 19.65, "load-balance": 5.27, "cache-aware": 3.58, "algorithm1": 3.07}
"""Mean TTFT in the Mooncake paper (FAST'25): conversation trace, 16 nodes; its global cache is `algorithm1`."""
PLACEMENTS: Final[tuple[Placement, ...]] = get_args(Placement)
NETWORKS: Final = {"87 GB/s": 87e9, "12.5 GB/s": 12.5e9, "3 GB/s": 3e9}
"""Bytes per second between two hosts: 4 x 200 Gbps as in the profile, 100 Gbps, and 25 Gbps."""
POPULARITIES: Final = {
    "even": HotPrefixes(prefix_tokens=32768, skew=0.0),
    "skewed": HotPrefixes(prefix_tokens=32768, skew=1.2),
    "shifting": HotPrefixes(prefix_tokens=32768, skew=1.2, shift_s=20.0),
}
AGGREGATED: Final = {"aggregated, 8192": 8192, "aggregated, 2048": 2048}
"""Prompt tokens of a step on 16 aggregated workers, placed as by `moonpool`."""
Metric = Callable[[ServingRun], float]
Runs = dict[str, list[ServingRun]]


def main() -> None:
    args = _arguments()
    spec = simulated_spec(args, "none")
    trace = load_trace(args.trace)
    span_s = (trace.rows[-1].timestamp_ms - trace.rows[0].timestamp_ms) / 1000
    # No objective and no bound of the queue: every placement serves every request.
    spec = replace(spec, rate_per_s=args.rate or len(trace) / span_s, policy=replace(spec.policy, max_queue_s=1e6))
    with worker_pool(args.processes) as pool:
        networks: dict[str, Any] = {}
        for network, bytes_per_s in NETWORKS.items():
            # Blind placements move no KV between hosts before the first token, so the network does not matter to them.
            names: list[str] = [name for name in PLACEMENTS if name not in BLIND_PLACEMENTS or not networks]
            names += () if networks else AGGREGATED
            with _profile(bytes_per_s) as profile:
                runs = _by_name(replace(spec, profile=profile), {name: name for name in names}, args.seeds, pool)
            networks[network] = _placements(runs)
            _show(f"conversations at {spec.rate_per_s:.2f} requests/s, {network}", networks[network]["placements"])
        popular = {}
        for name, hot in POPULARITIES.items():
            these = replace(spec, hot=hot, rate_per_s=args.hot_rate, requests=args.hot_requests)
            choices = {"without copies": "", "algorithm1": "algorithm1", "moonpool": "moonpool"}
            popular[name] = _replication(_by_name(these, choices, args.hot_seeds, pool))
            _show(f"{name} popularity at {args.hot_rate:g} requests/s", popular[name]["placements"])
    first = networks[next(iter(NETWORKS))]
    result = {
        "algorithm1_vs_cache_aware": first["vs_cache_aware"]["algorithm1"],
        "moonpool_vs_cache_aware": first["vs_cache_aware"]["moonpool"],
        "moonpool_vs_algorithm1": first["moonpool_vs_algorithm1"],
        "replication_gain": popular["skewed"]["gain"],
        "replication_gain_shifting": popular["shifting"]["gain"],
        **_stored_parts(),
        "settings": {**vars(args), "rate": spec.rate_per_s},
        "paper_ttft_s": PAPER_TTFT_S,
        "conversations": networks,
        "popular": {name: {**asdict(POPULARITIES[name]), **found} for name, found in popular.items()},
    }
    if args.store:
        store("scheduling", result)
    print(json.dumps(result))


_PARTS: Final = {
    "admission": ("default_vs_best_mode", "useful_vs_uniform", "rejected_vs_baseline", "share_of_oracle_goodput"),
    "agents": ("agent_completion_ratio",),
    "dialogues-live": ("dialogue_reuse",),
}
"""Figures of scheduling that longer benchmarks measure, by the name of their stored result."""


def _stored_parts() -> dict[str, Any]:
    """Return the latest stored figures of these benchmarks, and the files that they are from."""
    found: dict[str, Any] = {"stored": []}
    for name, figures in _PARTS.items():
        result, file = latest(name)
        found |= {figure: result[figure] for figure in figures}
        found["stored"].append(file)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--seeds", type=int, default=14)
    parser.add_argument("--requests", type=int, default=400, help="approximate number per run")
    parser.add_argument("--rate", type=float, default=0.0, help="conversations' requests per second; 0: as recorded")
    parser.add_argument("--hot-seeds", type=int, default=8)
    parser.add_argument("--hot-requests", type=int, default=900)
    parser.add_argument("--hot-rate", type=float, default=15.0, help="requests per second behind popular prefixes")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="store the result in benchmarks/results")
    parser.set_defaults(ttft=30.0, tbt=0.1)
    return parser.parse_args()


@contextmanager
def _profile(bytes_per_s: float) -> Iterator[Path]:
    """Yield the file of the bundled profile with another bandwidth between hosts."""
    found = load_profile(MOONCAKE)
    paths = {path: replace(found.transfers[path], per_byte_s=1 / bytes_per_s) for path in ("fetch", "push")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        profile: CostProfile = replace(found, transfers={**found.transfers, **paths})
        save_profile(profile, path)
        yield path


def _placed(spec: RunSpec, placement: str) -> RunSpec:
    """Return the run under a placement, or on aggregated workers; "": Moonpool's placement without copies."""
    policy = spec.policy
    match placement:
        case "":
            policy = replace(policy, max_copies=0)
        case "algorithm1":  # as printed: copies are neither counted nor dropped
            policy = replace(
                policy, placement="algorithm1", max_copies=1024, max_copies_per_pool=1024, replica_idle_s=86400.0
            )
        case _ if placement in AGGREGATED:
            settings = spec.settings
            hosts = settings.prefill_nodes + settings.decode_nodes
            blocks = settings.pool_blocks * settings.prefill_nodes // hosts  # the same memory, over twice the hosts
            chunk_tokens = AGGREGATED[placement]
            settings = replace(settings, is_aggregated=True, chunk_tokens=chunk_tokens, pool_blocks=blocks)
            return replace(spec, settings=settings)
        case _:
            policy = replace(policy, placement=placement)  # type: ignore[arg-type]  # from PLACEMENTS
    return replace(spec, policy=policy)


def _by_name(spec: RunSpec, placements: dict[str, str], seeds: int, pool: ProcessPoolExecutor) -> Runs:
    """Return the runs of every placement on the same seeds."""
    specs = [_placed(replace(spec, seed=seed), each) for seed in range(seeds) for each in placements.values()]
    found = run_all(specs, pool)
    return {name: found[at :: len(placements)] for at, name in enumerate(placements)}


def _ttft_s(run: ServingRun) -> float:
    return run.outcome.ttft_mean_s


def _ratio(over: Sequence[ServingRun], under: Sequence[ServingRun]) -> dict[str, float]:
    """Return the ratio of the mean TTFTs, paired by seed."""
    return asdict(ratio_of([_ttft_s(run) for run in over], [_ttft_s(run) for run in under]))


_METRICS: Final[dict[str, Metric]] = {
    "ttft_mean_s": _ttft_s,
    "ttft_p90_s": lambda run: run.outcome.ttft_p90_s,
    "tbt_p90_s": lambda run: run.outcome.tbt_p90_s,
    "hit_rate": lambda run: run.outcome.reused_share,
    "copied_gb": lambda run: run.copied_bytes / 1e9,
    "fetched_gb": lambda run: run.fetched_bytes / 1e9,
}


def _summary(runs: Runs) -> dict[str, Any]:
    return {
        name: {metric: asdict(mean_of([of(run) for run in these])) for metric, of in _METRICS.items()}
        for name, these in runs.items()
    }


def _placements(runs: Runs) -> dict[str, Any]:
    return {
        "placements": _summary(runs),
        "vs_cache_aware": {name: _ratio(these, runs["cache-aware"]) for name, these in runs.items()},
        "moonpool_vs_algorithm1": _ratio(runs["moonpool"], runs["algorithm1"]),
    }


def _replication(runs: Runs) -> dict[str, Any]:
    return {
        "placements": _summary(runs),
        "gain": _ratio(runs["without copies"], runs["moonpool"]),
        "gain_of_algorithm1": _ratio(runs["without copies"], runs["algorithm1"]),
    }


def _show(title: str, rows: dict[str, Any]) -> None:
    print(title)
    for name, row in rows.items():
        print(
            f"  {name:17}TTFT {row['ttft_mean_s']['mean']:6.2f} s ({row['ttft_mean_s']['low']:.2f} to "
            f"{row['ttft_mean_s']['high']:.2f}), P90 {row['ttft_p90_s']['mean']:6.2f} s, TBT P90 "
            f"{row['tbt_p90_s']['mean'] * 1e3:.0f} ms, hits "
            f"{row['hit_rate']['mean']:.1%}, copied {row['copied_gb']['mean']:,.0f} GB, fetched "
            f"{row['fetched_gb']['mean']:,.0f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()

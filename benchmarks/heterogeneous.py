"""Prediction errors and goodput in a pool of two GPU kinds and two degrees of tensor parallelism, simulated.

    python benchmarks/heterogeneous.py [--seeds N] [--requests N] [--store]

The conductor's own policy object places conversations of the bundled trace on 8 prefill and 8 decode nodes, two of each
kind in `KINDS`; halfway, a prefill and a decode node of known kinds join. The same arrivals are run with a slowdown
factor for each node and with one cost model for all nodes. Regressions that learn from load metrics, as llm-d's
predicted-latency routing does, predict the requests of the first of these runs online, one for all nodes or one per
kind. Errors are |predicted - measured| / measured. The last line of output is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.figures.clusters import draw_heterogeneous  # noqa: E402
from benchmarks.latency_predictors import BoostedTrees, LinearModel, Observation, predict_online  # noqa: E402
from benchmarks.simulated import simulated_spec  # noqa: E402
from benchmarks.stored import PICTURES, store  # noqa: E402
from simulator.serving.clock import NS  # noqa: E402
from simulator.serving.cluster import SimulatedCluster  # noqa: E402
from simulator.serving.confidence import mean_of, ratio_of  # noqa: E402
from simulator.serving.elastic import ElasticWorkers  # noqa: E402
from simulator.serving.outcome import is_good  # noqa: E402
from simulator.serving.requests import RequestEnd, SimulatedRequest, draw_workload  # noqa: E402
from simulator.serving.runs import WARM_UP, RunSpec  # noqa: E402
from traces import load_trace  # noqa: E402
from worker.policy.analytic_costs import MOONCAKE_SETTING, analytic_profile  # noqa: E402
from worker.policy.cost_profile import CostProfile, load_profile  # noqa: E402

GPUS: Final = {"A800": (312e12, 2.039e12, 80e9), "H20": (148e12, 4.0e12, 96e9)}
"""Dense 16-bit flops per second, bytes per second and bytes of memory of one GPU, by data sheet."""
KINDS: Final = tuple((gpu, count) for gpu in GPUS for count in (8, 4))
"""GPUs of a node, over which the model is split by tensor parallelism."""
NUM_PREFILL: Final = 8
NUM_DECODE: Final = 8
HOSTS: Final = tuple(KINDS[i % len(KINDS)] for count in (NUM_PREFILL, NUM_DECODE) for i in range(count))
"""Kind of the node of each host at the start: prefill nodes, then decode nodes."""
JOINING: Final = (("H20", 4), ("A800", 4))
"""Kinds of the prefill and of the decode node that join halfway."""
_NEW: Final = 30  # requests of a node that has just joined
PREDICTORS: Final[dict[str, tuple[type[LinearModel] | type[BoostedTrees], bool]]] = {
    "linear": (LinearModel, False),
    "trees": (BoostedTrees, False),
    "trees per kind": (BoostedTrees, True),
}


@dataclass(slots=True)
class Placed:
    """A placed request with the load of its nodes at that time: features of TTFT and of TBT."""

    work: SimulatedRequest
    placed_ns: int
    ttft_features: tuple[float, ...]
    tbt_features: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HeterogeneousRun:
    """Placed requests of a run in order, and the share and rate of good ones among those that arrived."""

    placed: list[Placed]
    goodput: float
    missed: float


def main() -> None:
    args = _arguments()
    spec = simulated_spec(args, "predicted-uniform", output_scale=args.output_scale)
    spec = replace(spec, rate_per_s=args.rate)
    errors: dict[str, list[dict[str, Any]]] = {}
    goodput: dict[str, list[float]] = {"per node": [], "one model": []}
    missed: dict[str, list[float]] = {"per node": [], "one model": []}
    for seed in range(args.seeds):
        runs = {name: run(spec, seed, per_node=name == "per node") for name in goodput}
        for name, found in runs.items():
            goodput[name].append(found.goodput)
            missed[name].append(found.missed)
            errors.setdefault(name, []).append(_errors(found.placed, _policy_predictions(found.placed)))
        for name, (regression, is_per_kind) in PREDICTORS.items():
            placed = runs["per node"].placed
            predictions = regressed(placed, regression, is_per_kind=is_per_kind)
            errors.setdefault(name, []).append(_errors(placed, predictions))
        for name, these in errors.items():
            _show(seed, name, these[-1])
        print(f"  goodput {goodput['per node'][-1]:.2f} per node, {goodput['one model'][-1]:.2f} one model", flush=True)
    result = {
        "errors": {name: _means(these) for name, these in errors.items()},
        "goodput": {name: asdict(mean_of(values)) for name, values in goodput.items()},
        "missed": {name: asdict(mean_of(values)) for name, values in missed.items()},
        "goodput_per_node_vs_one": asdict(ratio_of(goodput["per node"], goodput["one model"])),
        **{
            f"{what}_error_vs_{name.replace(' ', '_')}": asdict(
                ratio_of([e[what]["all"]["p50"] for e in errors["per node"]], [e[what]["all"]["p50"] for e in these])
            )
            for what in ("ttft", "tbt")
            for name, these in errors.items()
            if name != "per node"
        },
        "kinds": [kind_name(kind) for kind in KINDS],
        "settings": vars(args),
    }
    if args.store:
        store("heterogeneous", result)
        draw_heterogeneous(result, PICTURES / "heterogeneous.svg")
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=3000, help="approximate number per run")
    parser.add_argument("--rate", type=float, default=3.5, help="requests per second")
    parser.add_argument("--output-scale", type=float, default=4.0, help="factor on the answers' lengths")
    parser.add_argument("--store", action="store_true", help="store the result in benchmarks/results")
    parser.set_defaults(prefill=NUM_PREFILL, decode=NUM_DECODE, ttft=30.0, tbt=0.1)
    return parser.parse_args()


def kind_name(kind: tuple[str, int]) -> str:
    """Return a label such as "A800 x 8"."""
    return f"{kind[0]} x {kind[1]}"


def kind_profile(kind: tuple[str, int]) -> CostProfile:
    """Return the analytic profile of the bundled 70B model on these GPUs; overheads and shares are the bundled ones."""
    (flops, bytes_per_s, memory_bytes), count = GPUS[kind[0]], kind[1]
    return analytic_profile(
        replace(
            MOONCAKE_SETTING,
            name=kind_name(kind),
            hardware=kind_name(kind),
            flops_per_s=count * flops,
            memory_bytes_per_s=count * bytes_per_s,
            memory_bytes=count * memory_bytes,
        )
    )


def run(spec: RunSpec, seed: int, *, per_node: bool) -> HeterogeneousRun:
    """Simulate one run, with a slowdown factor for each node or one cost model for all."""
    hosts = (*HOSTS, *JOINING)
    kinds = {f"node-{i}": kind_profile(kind) for i, kind in enumerate(hosts)}
    workload = draw_workload(
        load_trace(spec.trace),
        seed=seed,
        rate_per_s=spec.rate_per_s,
        requests=spec.requests,
        output_scale=spec.output_scale,
        longest_answer=spec.settings.max_new_tokens,
    )
    policy = replace(spec.policy, per_node_costs=per_node)
    settings = replace(spec.settings, hosts=len(hosts))
    cluster = SimulatedCluster(settings, policy, load_profile(spec.profile), workload, seed, kinds)
    workers, placed = ElasticWorkers(cluster), list[Placed]()
    cluster.on_place = lambda work: placed.append(_observed(cluster, work))
    more = {"prefill": NUM_PREFILL + 1, "decode": NUM_DECODE + 1}
    cluster.clock.at(round(workload.duration_s / 2 * NS), lambda: workers.resize(more))
    cluster.run()
    from_ns = WARM_UP * workload.duration_s * NS
    arrived = [work for work in cluster.works if work.job.arrival_ns >= from_ns]
    good = sum(is_good(work, settings) for work in arrived)
    window_s = (1 - WARM_UP) * workload.duration_s
    return HeterogeneousRun(placed, good / window_s, 1 - good / len(arrived))


def _observed(cluster: SimulatedCluster, work: SimulatedRequest) -> Placed:
    prompt, cached = work.job.prompt_tokens, work.reused_tokens
    prefill = cluster.prefill[work.prefill_node].observed_load()
    decode = cluster.decode[work.decode_node or work.prefill_node].observed_load()
    ttft = (prefill.kv_share, prompt, cached / prompt, prefill.num_waiting, prefill.num_running, prefill.prefill_tokens)
    tbt = (decode.kv_share, prompt, decode.num_waiting, decode.num_running)
    return Placed(work, cluster.clock.now_ns, tuple(map(float, ttft)), tuple(map(float, tbt)))


def _kind_of(node_id: str) -> str:
    return kind_name((*HOSTS, *JOINING)[_number(node_id)])


def _number(node_id: str) -> int:
    return int(node_id.rpartition("-")[2])


def _policy_predictions(placed: Sequence[Placed]) -> tuple[list[float], list[float]]:
    return [one.work.predicted_ttft_s for one in placed], [one.work.predicted_tbt_s for one in placed]


def regressed(
    placed: Sequence[Placed], regression: type[LinearModel] | type[BoostedTrees], *, is_per_kind: bool
) -> tuple[list[float], list[float]]:
    """Return the predictions of TTFT and TBT by regressions that learn online, one for all nodes or one per kind.

    0 where there is none.
    """

    def predicted(node_of: Callable[[Placed], str], observation: Callable[[Placed], Observation]) -> list[float]:
        found = [0.0] * len(placed)
        of_kind = [_kind_of(node_of(one)) if is_per_kind else "" for one in placed]
        for kind in sorted(set(of_kind)):
            chosen = [i for i, name in enumerate(of_kind) if name == kind and _is_measured(placed[i])]
            for i, value in zip(
                chosen, predict_online([observation(placed[i]) for i in chosen], regression), strict=True
            ):
                found[i] = value
        return found

    return (
        predicted(
            lambda one: one.work.prefill_node,
            lambda one: Observation(one.placed_ns, one.work.first_token_ns, one.ttft_features, one.work.ttft_s),
        ),
        predicted(
            lambda one: one.work.decode_node,
            lambda one: Observation(one.placed_ns, one.work.end_ns, one.tbt_features, one.work.mean_tbt_s),
        ),
    )


def _is_measured(one: Placed) -> bool:
    return one.work.end is RequestEnd.FINISHED and bool(one.work.intervals)


def _errors(placed: Sequence[Placed], predictions: tuple[list[float], list[float]]) -> dict[str, Any]:
    """Return P50 and P90 of the relative errors of TTFT and TBT: of all nodes, of each kind, and of new nodes."""
    from_ns = placed[-1].placed_ns * WARM_UP
    found: dict[str, Any] = {}
    for what, predicted in zip(("ttft", "tbt"), predictions, strict=True):
        groups: dict[str, list[float]] = {"all": []}
        new: dict[str, list[float]] = {}
        for one, prediction in zip(placed, predicted, strict=True):
            if not prediction or not _is_measured(one):
                continue
            work = one.work
            measured = work.ttft_s if what == "ttft" else work.mean_tbt_s
            node = work.prefill_node if what == "ttft" else work.decode_node
            error = abs(prediction - measured) / measured
            if _number(node) >= len(HOSTS):
                new.setdefault(node, []).append(error)
            if one.placed_ns >= from_ns:
                groups["all"].append(error)
                groups.setdefault(_kind_of(node), []).append(error)
        groups["new node"] = [error for errors in new.values() for error in errors[:_NEW]]
        found[what] = {
            name: {"p50": float(np.quantile(errors, 0.5)), "p90": float(np.quantile(errors, 0.9)), "num": len(errors)}
            for name, errors in groups.items()
            if errors
        }
    return found


def _means(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over the seeds with their 95 % intervals."""
    return {
        what: {
            group: {
                quantile: asdict(mean_of([run[what][group][quantile] for run in runs if group in run[what]]))
                for quantile in ("p50", "p90")
            }
            for group in sorted({name for run in runs for name in run[what]})
        }
        for what in ("ttft", "tbt")
    }


def _show(seed: int, name: str, errors: dict[str, Any]) -> None:
    parts = [
        f"{what} {group} {row['p50']:.2f}/{row['p90']:.2f}"
        for what in ("ttft", "tbt")
        for group, row in errors[what].items()
    ]
    print(f"seed {seed} {name:14} " + ", ".join(parts), flush=True)


if __name__ == "__main__":
    main()

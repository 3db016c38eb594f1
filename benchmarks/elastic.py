"""Autoscaling and role switches in a closed loop on simulated clusters, against static splits and clairvoyant ones.

    python benchmarks/elastic.py [--seeds N] [--parts diurnal phases] [--store]

*diurnal*: the rate of conversations follows a cosine over a day of `--day` seconds. The number of nodes follows the
conductor's rules through the autoscaler's own function, one change at a time as `serve` makes them, every node loading
its model for 60 s. *phases*: long prompts with short answers alternate with short prompts with long answers, on a fixed
number of nodes whose roles follow the conductor's switches. A clairvoyant cluster knows the load of the next minutes. A
request is missed if it was not served within both objectives. Ratios are geometric means of pairs with the same seed,
with 95 % confidence intervals. The last line of output is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.figures.clusters import draw_elastic  # noqa: E402
from benchmarks.heterogeneous import kind_profile  # noqa: E402
from benchmarks.simulated import simulated_spec  # noqa: E402
from benchmarks.stored import PICTURES, latest, store  # noqa: E402
from moonpool.config import ModelEntry  # noqa: E402
from moonpool.plan import WorkerGroup  # noqa: E402
from moonpool.scaling.autoscaler import EVERY_S, Bounds, autoscaled  # noqa: E402
from simulator.serving.clock import NS  # noqa: E402
from simulator.serving.cluster import MODEL, SimulatedCluster  # noqa: E402
from simulator.serving.confidence import mean_of, ratio_of  # noqa: E402
from simulator.serving.elastic import ROLES, ElasticWorkers, WorkerRole, num_reversals  # noqa: E402
from simulator.serving.outcome import is_good  # noqa: E402
from simulator.serving.requests import SimulatedRequest, SimulatedWorkload, draw_workload  # noqa: E402
from simulator.serving.runs import RunSpec  # noqa: E402
from simulator.serving.varying_load import alternating, diurnal, merged, thinned  # noqa: E402
from traces import load_trace  # noqa: E402

GPUS_PER_NODE: Final = 4
BOUNDS: Final[dict[str, Bounds]] = {role: Bounds(1, 12) for role in ROLES}
GROUPS: Final[dict[str, WorkerGroup]] = {
    role: WorkerGroup(role, role, ModelEntry(MODEL, Path("/model"))) for role in ROLES
}
REVERSAL_S: Final = 600.0  # a change in the other direction within this time counts as a reversal
MOST_MISSED: Final = 0.01  # share of requests that a static split may miss
Split = tuple[int, int]
Floats = NDArray[np.float64]
Follow = Callable[[SimulatedCluster, ElasticWorkers], None]
"""Begins to change the nodes of a cluster that is about to run."""


@dataclass(frozen=True, slots=True)
class ElasticRun:
    """Result of one run."""

    missed: float
    node_hours: float
    reversals: int
    changes: tuple[tuple[float, str, int], ...]  # (time in seconds, role, nodes)
    num_switches: int
    works: Sequence[SimulatedRequest]


def main() -> None:
    args = _arguments()
    spec = _spec(args)
    result: dict[str, Any] = latest("elastic")[0] if args.keep else {}
    result |= {"gpus_per_node": GPUS_PER_NODE, "reversal_s": REVERSAL_S}
    for part in args.parts:
        result[part] = {**PARTS[part](spec, args), "settings": vars(args)}
    if args.store:
        store("elastic", result)
        draw_elastic(result, PICTURES / "elastic.svg")
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("diurnal", "phases"), default=["diurnal"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--day", type=float, default=7200.0, help="virtual seconds")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second at the peak")
    parser.add_argument("--static", type=_splits, default=_splits("5:5,5:6"), help="prefill:decode nodes, ...")
    parser.add_argument("--nodes", type=int, default=8, help="nodes of the part phases")
    parser.add_argument("--phase", type=float, default=900.0, help="virtual seconds")
    parser.add_argument("--phase-splits", type=_splits, default=_splits("4:4,5:3"))
    parser.add_argument("--prompts-rate", type=float, default=3.2, help="requests per second of long prompts")
    parser.add_argument("--answers-rate", type=float, default=2.4, help="requests per second of long answers")
    parser.add_argument("--keep", action="store_true", help="keep the other part of the stored result")
    parser.add_argument("--store", action="store_true", help="store the result in benchmarks/results")
    parser.set_defaults(trace="conversation", requests=1, prefill=1, decode=1, ttft=30.0, tbt=0.1)
    return parser.parse_args()


def _splits(text: str) -> list[Split]:
    found = [each.split(":") for each in text.split(",")]
    return [(int(prefill), int(decode)) for prefill, decode in found]


def _spec(args: argparse.Namespace) -> RunSpec:
    """Return the run on nodes of four A800, whose capacity the settings take from their profile."""
    spec = simulated_spec(args, "predicted-uniform")
    engine = kind_profile(("A800", GPUS_PER_NODE)).engine
    settings = replace(
        spec.settings, capacity_tokens=int(engine["capacity_tokens"]), max_batch=int(engine["max_batch"])
    )
    return replace(spec, settings=settings)


def _drawn(
    args: argparse.Namespace, seed: int, rate: float, duration_s: float, *, scale: float, prompt: int, answer: int
) -> SimulatedWorkload:
    return draw_workload(
        load_trace(args.trace),
        seed=seed,
        rate_per_s=rate,
        requests=round(rate * duration_s),
        output_scale=scale,
        longest_prompt=prompt,
        longest_answer=answer,
    )


def run(spec: RunSpec, workload: SimulatedWorkload, split: Split, seed: int, follow: Follow | None) -> ElasticRun:
    """Simulate one run that begins with `split`, and whose nodes `follow` changes."""
    settings = replace(
        spec.settings,
        prefill_nodes=split[0],
        decode_nodes=split[1],
        hosts=sum(bounds.most for bounds in BOUNDS.values()),
    )
    profile = kind_profile(("A800", GPUS_PER_NODE))
    cluster = SimulatedCluster(settings, spec.policy, profile, workload, seed)
    workers = ElasticWorkers(cluster)
    if follow is not None:
        follow(cluster, workers)
    cluster.run()
    changes = tuple((change.time_s, change.role, change.nodes) for change in workers.changes)
    return ElasticRun(
        missed=1 - sum(is_good(work, settings) for work in cluster.works) / len(cluster.works),
        node_hours=workers.node_s() / 3600,
        reversals=num_reversals(workers.changes, REVERSAL_S),
        changes=changes,
        num_switches=workers.num_switches,
        works=cluster.works,
    )


def autoscaling(cluster: SimulatedCluster, workers: ElasticWorkers) -> None:
    """Follow the conductor's numbers as `serve --autoscale` does: look, change, and look again when that is done."""

    def look() -> None:
        counts: dict[str, int] = dict(workers.counts().items())
        reports: dict[str, dict[str, int]] = {}
        for model, role, wanted in cluster.conductor.desired_nodes():
            reports.setdefault(model, {})[role] = wanted
        wanted_counts = autoscaled(BOUNDS, GROUPS, counts, [reports])
        changes = {role: count for role, count in wanted_counts.items() if count != counts[role]}
        if changes:
            workers.resize(changes, later)
        else:
            later()

    def later() -> None:
        cluster.clock.after(round(EVERY_S * NS), look)

    later()


def foresight(loads: Mapping[WorkerRole, Floats], step_s: float) -> Follow:
    """Return a clairvoyant scaling by known loads [steps of `step_s`], the busy nodes of each role.

    It starts nodes so that they serve when they are needed, and drains those that are not needed while one starts.
    """

    def follow(cluster: SimulatedCluster, workers: ElasticWorkers) -> None:
        ahead = ceil(cluster.settings.start_s / step_s) + 2

        def look(step: int) -> None:
            wanted: dict[str, int] = {
                role: min(BOUNDS[role].most, max(1, ceil(load[step : step + ahead].max(initial=0.0))))
                for role, load in loads.items()
            }
            workers.resize(wanted)
            if step + 1 < len(loads["prefill"]):
                cluster.clock.after(round(step_s * NS), lambda: look(step + 1))

        cluster.clock.after(1, lambda: look(0))

    return follow


def switching_ahead(loads: Mapping[WorkerRole, Floats], step_s: float, num_nodes: int) -> Follow:
    """Return clairvoyant role switches: to the best split for the loads of the next two steps."""

    def follow(cluster: SimulatedCluster, workers: ElasticWorkers) -> None:
        def look(step: int) -> None:
            prefill, decode = (float(loads[role][step : step + 3].mean()) for role in ROLES)
            best = min(range(1, num_nodes), key=lambda n: max(prefill / n, decode / (num_nodes - n)))
            counts = workers.counts()
            to: WorkerRole = "prefill" if best > counts["prefill"] else "decode"
            for _ in range(abs(best - counts["prefill"]) if workers.is_at_rest() else 0):
                workers.switch(workers.idlest("decode" if to == "prefill" else "prefill"), to)
            if step + 1 < len(loads["prefill"]):
                cluster.clock.after(round(step_s * NS), lambda: look(step + 1))

        cluster.clock.after(1, lambda: look(0))

    return follow


def loads_of(
    works: Sequence[SimulatedRequest], capacity_tokens: int, duration_s: float, step_s: float, window_s: float
) -> dict[WorkerRole, Floats]:
    """Return the nodes that a finished run's requests kept busy [steps], as means over `window_s` around each step.

    Of prefill, their computation, counted at their arrival; of decode, their reserved pages until they ended.
    """
    steps = ceil(duration_s / step_s)
    prefill, decode = np.zeros(steps), np.zeros(steps)
    for work in works:
        if not work.first_token_ns:
            continue
        at = int(work.job.arrival_ns / NS / step_s)
        if at < steps:
            prefill[at] += work.prefill_s / step_s
        first, last = (int(ns / NS / step_s) for ns in (work.first_token_ns, work.end_ns))
        decode[first : last + 1] += work.committed_tokens / capacity_tokens
    width = max(1, round(window_s / step_s)) | 1
    edge = np.pad(np.stack([prefill, decode]), ((0, 0), (width // 2, width // 2)), mode="edge")
    smooth = [np.convolve(row, np.ones(width) / width, mode="valid") for row in edge]
    return {"prefill": smooth[0], "decode": smooth[1]}


_STEP_S: Final = 30.0
_WINDOW_S: Final = 150.0
_BUSY: Final = 0.85  # utilisation for which a clairvoyant cluster is sized


def _diurnal(spec: RunSpec, args: argparse.Namespace) -> dict[str, Any]:
    answer = 6000
    spec = replace(spec, settings=replace(spec.settings, max_new_tokens=answer))
    runs: dict[str, list[ElasticRun]] = {}
    for seed in range(args.seeds):
        workload = _drawn(args, seed, args.rate, args.day, scale=3.0, prompt=32768, answer=answer)
        workload = thinned(workload, diurnal(args.day, 0.1), seed)
        scaled = run(spec, workload, (1, 1), seed, autoscaling)
        loads = loads_of(scaled.works, spec.settings.capacity_tokens, args.day, _STEP_S, _WINDOW_S)
        sized = {role: load / _BUSY for role, load in loads.items()}
        these = {"autoscaled": scaled, "clairvoyant": run(spec, workload, (1, 1), seed, foresight(sized, _STEP_S))}
        these |= {_name(split): run(spec, workload, split, seed, None) for split in args.static}
        _add(runs, these, seed)
    statics = [_name(split) for split in args.static]
    fit = [name for name in statics if _mean(runs[name], lambda run: run.missed) <= MOST_MISSED]
    best = min(fit or statics, key=lambda name: _mean(runs[name], lambda run: run.node_hours))
    return {
        **_summary(runs),
        "best_static": best,
        "gpu_hours_vs_best_static": _vs(runs["autoscaled"], runs[best]),
        "gpu_hours_vs_clairvoyant": _vs(runs["autoscaled"], runs["clairvoyant"]),
        "missed_less_best_static": _less(runs["autoscaled"], runs[best]),
        "reversals": sum(run.reversals for run in runs["autoscaled"]),
        "load": _load_curve(runs["autoscaled"][0].works, args.day),
    }


def _phases(spec: RunSpec, args: argparse.Namespace) -> dict[str, Any]:
    answer, duration_s = 3000, 4 * args.phase
    spec = replace(spec, settings=replace(spec.settings, max_new_tokens=answer))
    switching = replace(spec, policy=replace(spec.policy, role_switching="act"))
    runs: dict[str, list[ElasticRun]] = {}
    for seed in range(args.seeds):
        prompts = _drawn(args, seed, args.prompts_rate, duration_s, scale=0.15, prompt=32768, answer=answer)
        answers = _drawn(args, seed + 1000, args.answers_rate, duration_s, scale=6.0, prompt=4096, answer=answer)
        workload = merged(
            [
                thinned(prompts, alternating(args.phase, is_first=True, low=0.05), seed),
                thinned(answers, alternating(args.phase, is_first=False, low=0.05), seed),
            ]
        )
        start = (args.nodes // 2, args.nodes - args.nodes // 2)
        switched = run(switching, workload, start, seed, lambda cluster, workers: None)
        loads = loads_of(switched.works, spec.settings.capacity_tokens, duration_s, _STEP_S, _WINDOW_S)
        ahead = switching_ahead(loads, _STEP_S, args.nodes)
        these = {"switched": switched, "clairvoyant": run(spec, workload, start, seed, ahead)}
        these |= {_name(split): run(spec, workload, split, seed, None) for split in args.phase_splits}
        _add(runs, these, seed)
    statics = [_name(split) for split in args.phase_splits]
    best = min(statics, key=lambda name: _mean(runs[name], lambda run: run.missed))
    return {
        **_summary(runs),
        "best_static": best,
        "missed_vs_best_static": asdict(
            ratio_of(*([max(run.missed, 1e-4) for run in runs[name]] for name in ("switched", best)))
        ),
        "missed_less_best_static": _less(runs["switched"], runs[best]),
        "missed_less_clairvoyant": _less(runs["switched"], runs["clairvoyant"]),
        "switches": [run.num_switches for run in runs["switched"]],
        "reversals": sum(run.reversals for run in runs["switched"]),
        "load": _load_curve(runs["switched"][0].works, duration_s),
    }


def _name(split: Split) -> str:
    return f"{split[0]} + {split[1]}"


def _add(runs: dict[str, list[ElasticRun]], these: Mapping[str, ElasticRun], seed: int) -> None:
    for name, found in these.items():
        runs.setdefault(name, []).append(found)
        print(
            f"seed {seed} {name:12} missed {found.missed:.2%}, {found.node_hours:.2f} node hours, "
            f"{found.reversals} reversals, {found.num_switches} switches",
            flush=True,
        )


def _mean(runs: Sequence[ElasticRun], of: Callable[[ElasticRun], float]) -> float:
    return mean_of([of(run) for run in runs]).mean


def _vs(over: Sequence[ElasticRun], under: Sequence[ElasticRun]) -> dict[str, float]:
    return asdict(ratio_of([run.node_hours for run in over], [run.node_hours for run in under]))


def _less(over: Sequence[ElasticRun], under: Sequence[ElasticRun]) -> dict[str, float]:
    return asdict(mean_of([a.missed - b.missed for a, b in zip(over, under, strict=True)]))


def _summary(runs: Mapping[str, Sequence[ElasticRun]]) -> dict[str, Any]:
    """Return the figures of each cluster, and the nodes over time of the first seed."""
    return {
        "clusters": {
            name: {
                "missed": asdict(mean_of([run.missed for run in these])),
                "node_hours": asdict(mean_of([run.node_hours for run in these])),
                "gpu_hours": asdict(mean_of([run.node_hours * GPUS_PER_NODE for run in these])),
                "reversals": [run.reversals for run in these],
            }
            for name, these in runs.items()
        },
        "nodes": {name: [list(change) for change in these[0].changes] for name, these in runs.items()},
    }


def _load_curve(works: Sequence[SimulatedRequest], duration_s: float) -> list[tuple[float, float, float]]:
    """Return (time, prompt tokens per second, answer tokens per second) of the arrivals, once a minute."""
    minutes = ceil(duration_s / 60)
    tokens = np.zeros((2, minutes))
    for work in works:
        minute = min(minutes - 1, int(work.job.arrival_ns / NS / 60))
        tokens[:, minute] += work.job.prompt_tokens, work.job.output_tokens
    return [(60.0 * minute, *(tokens[:, minute] / 60).round(1).tolist()) for minute in range(minutes)]


PARTS: Final = {"diurnal": _diurnal, "phases": _phases}


if __name__ == "__main__":
    main()

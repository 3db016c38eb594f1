"""Benchmark of admission: what each mode makes of the same overload, and how far it is from what is possible.

    python benchmarks/admission.py [--scenarios 1.2x,2x,...] [--seeds N] [--requests N] [--processes N] [--store]

Simulated clusters of 8 prefill and 8 decode nodes (`moonpool simulate overload`, the bundled 70B profile) receive the
same arrivals in all admission modes. `unpriced` is `predicted-uniform` as it was before expensive requests left room
to cheaper ones; `oracle` is `predicted` with clients whose `max_tokens` is the exact length of each answer. Scenarios:
1.2, 2 and 4 times the capacity; the trace's own, shorter answers, with which prefill is scarce; answers twice as long;
answers whose length quadruples during the run; bursts. Per mode: good requests and useful prompt tokens per second,
wasted prefill, rejections, and the regret: how much lower goodput is than the bound of an admission that knows all
requests in advance (`simulator.serving.offline_bound`). Ratios are geometric means of pairs with the same seed, with
95 % confidence intervals. At twice the capacity, a sample of the default mode's rejections is evaluated in forks of
the run. The last line of output is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.simulated import simulated_spec  # noqa: E402
from benchmarks.stored import store  # noqa: E402
from settings.conductor import AdmissionMode, PolicyConfig  # noqa: E402
from simulator.serving.confidence import mean_of, ratio_of, share_of  # noqa: E402
from simulator.serving.offline_bound import offline_bound  # noqa: E402
from simulator.serving.outcome import ServingOutcome  # noqa: E402
from simulator.serving.runs import (  # noqa: E402
    WARM_UP,
    RunSpec,
    ServingRun,
    run_all,
    worker_pool,
    workload_of,
)
from simulator.serving.settings import KnownLengths  # noqa: E402
from simulator.serving.variation import Variation  # noqa: E402
from traces import CONVERSATION  # noqa: E402
from worker.policy.cost_profile import load_profile  # noqa: E402


@dataclass(frozen=True)
class Scenario:
    """Arrivals per second, the factor on the trace's answers, their maximum length, and changes over time."""

    rate_per_s: float
    output_scale: float = 4.0
    longest_answer: int = 4096
    variation: Variation | None = None


CAPACITY: Final = 5.780723
"""Requests per second of which 90 % are good without rejections, with answers four times as long, as measured by
`moonpool simulate overload` when this benchmark began: a constant, so that results can be compared."""
SCENARIOS: Final[dict[str, Scenario]] = {
    "1.2x": Scenario(1.2 * CAPACITY),
    "2x": Scenario(2 * CAPACITY),
    "4x": Scenario(4 * CAPACITY),
    "short": Scenario(15.0, 1.0, 2048),
    "long": Scenario(CAPACITY, 8.0, 8192),
    "drift": Scenario(1.5 * CAPACITY, variation=Variation(answers_from=0.5, answers_to=2.0)),
    "bursts": Scenario(1.2 * CAPACITY, variation=Variation(burst_period_s=60.0)),
}
MODES: Final[dict[str, tuple[AdmissionMode, KnownLengths]]] = {
    "none": ("none", "prompt"),
    "load": ("load", "prompt"),
    "early": ("early", "prompt"),
    "unpriced": ("predicted-uniform", "prompt"),
    "predicted-uniform": ("predicted-uniform", "dialogue"),
    "predicted": ("predicted", "dialogue"),
    "oracle": ("predicted", "oracle"),
}
DEFAULT: Final = PolicyConfig().admission_mode
UNPRICED: Final = "unpriced"
OVERLOAD: Final = "2x"
"""The scenario whose rejections are evaluated and compared with those of the paper's baseline."""
FIRST_SEED: Final = 100
"""The rule and its constants were chosen on the seeds 0 to 2."""
LOOK_INTO: Final = 0.25
"""Share of the default mode's rejections that are evaluated there."""
Runs = dict[str, list[ServingRun]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=3000, help="approximate number per run")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--store", action="store_true", help="store the figures in benchmarks/results")
    parser.set_defaults(trace=CONVERSATION, prefill=8, decode=8, ttft=30.0, tbt=0.05)
    args = parser.parse_args()
    names = [name for name in args.scenarios.split(",") if name]
    if unknown := sorted(set(names) - set(SCENARIOS)):
        parser.error(f"unknown scenario {unknown[0]!r}: choose from {', '.join(SCENARIOS)}")
    found: dict[str, Any] = {}
    for name in names:
        found[name] = _summary(*_run(args, name))
        _show(name, found[name])
    result = {**_conclusions(found), "settings": vars(args), "default": DEFAULT, "scenarios": found}
    if args.store:
        store("admission", result)
    print(json.dumps(result))


def _run(given: argparse.Namespace, name: str) -> tuple[Runs, list[float]]:
    """Return the runs of all modes on the same seeds, and each seed's bound of goodput."""
    load = SCENARIOS[name]
    spec = simulated_spec(given, DEFAULT, output_scale=load.output_scale, longest_answer=load.longest_answer)
    spec = replace(spec, rate_per_s=load.rate_per_s, variation=load.variation)
    seeds = [replace(spec, seed=FIRST_SEED + number) for number in range(given.seeds)]
    specs = [_in_mode(each, mode, name) for mode in MODES for each in seeds]
    with worker_pool(given.processes) as pool:
        runs = run_all(specs, pool, lambda done, total: print(f"{name}: {done} of {total} runs", file=sys.stderr))
    at = {mode: runs[number * given.seeds :][: given.seeds] for number, mode in enumerate(MODES)}
    return at, [_bound(each) for each in seeds]


def _in_mode(spec: RunSpec, mode: str, scenario: str) -> RunSpec:
    admission, lengths = MODES[mode]
    look_into = LOOK_INTO if mode == DEFAULT and scenario == OVERLOAD else 0.0
    settings, policy = replace(spec.settings, lengths=lengths), replace(spec.policy, admission_mode=admission)
    if mode == UNPRICED:
        policy = replace(policy, ttft_reserve=0.0, tbt_reserve=0.0)
    return replace(spec, settings=settings, policy=policy, look_into=look_into)


def _bound(spec: RunSpec) -> float:
    workload = workload_of(spec)
    return offline_bound(workload, spec.settings, load_profile(spec.profile), from_s=WARM_UP * workload.duration_s)


Metric = Callable[[ServingOutcome], float]
_METRICS: Final[dict[str, Metric]] = {
    "good_per_s": lambda one: one.goodput,
    "useful_tokens_per_s": lambda one: one.useful_tokens_per_s,
    "wasted_tokens": lambda one: one.wasted_tokens,
    "rejected_share": lambda one: _rejected(one) / max(1, one.arrived),
    "missed_share": lambda one: (one.missed_ttft + one.missed_tbt) / max(1, one.arrived),
}


def _rejected(one: ServingOutcome) -> int:
    """Return the number of rejections, at arrival or after the prefill."""
    return one.rejected + one.withheld


def _summary(runs: Runs, bounds: Sequence[float]) -> dict[str, Any]:
    modes = {}
    for mode, these in runs.items():
        outcomes = [run.outcome for run in these]
        figures: dict[str, Any] = {
            name: asdict(mean_of([float(of(one)) for one in outcomes])) for name, of in _METRICS.items()
        }
        regrets = [1 - one.goodput / bound for one, bound in zip(outcomes, bounds, strict=True)]
        tried = sum(run.rejects_tried for run in these)
        share = share_of(sum(run.rejects_false for run in these), tried)
        modes[mode] = {
            **figures,
            "regret": asdict(mean_of(regrets)),
            "false_rejects": {"judged": tried, "share": asdict(share)} if share is not None else None,
            "over_unpriced": {
                name: _ratio(these, runs[UNPRICED], _METRICS[name]) for name in ("good_per_s", "useful_tokens_per_s")
            },
            "over_oracle": _ratio(these, runs["oracle"], _METRICS["good_per_s"]),
            "rejected_over_load": _ratio(these, runs["load"], _rejected),
        }
    blind = {mode: _ratio(runs[DEFAULT], runs[mode], _METRICS["good_per_s"]) for mode in runs if mode != "oracle"}
    del blind[DEFAULT]
    return {"bound_good_per_s": asdict(mean_of(bounds)), "modes": modes, "default_over": blind}


def _ratio(over: Sequence[ServingRun], under: Sequence[ServingRun], of: Metric) -> dict[str, float]:
    """Return the ratio of a figure, paired by seed; what is 0 counts as a thousandth of a request or token."""
    values = [[max(1e-3, of(run.outcome)) for run in runs] for runs in (over, under)]
    return asdict(ratio_of(*values))


def _conclusions(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that the aims are about, of the scenarios that were run."""
    ratios = [
        {"scenario": name, "mode": mode, **ratio}
        for name, one in found.items()
        for mode, ratio in one["default_over"].items()
    ]
    figures: dict[str, Any] = {"default_vs_best_mode": min(ratios, key=lambda ratio: ratio["high"])}
    if OVERLOAD in found:
        default = found[OVERLOAD]["modes"][DEFAULT]
        figures |= {
            "useful_vs_uniform": default["over_unpriced"]["useful_tokens_per_s"],
            "rejected_vs_baseline": default["rejected_over_load"],
            "share_of_oracle_goodput": default["over_oracle"],
            "false_rejects": default["false_rejects"],
        }
    return figures


def _show(name: str, summary: dict[str, Any]) -> None:
    print(f"{name}: at most {summary['bound_good_per_s']['mean']:.2f} good requests/s")
    for mode, one in summary["modes"].items():
        over = one["over_unpriced"]["good_per_s"]
        print(
            f"  {mode:18}good {one['good_per_s']['mean']:6.2f}/s, {over['mean']:.3f} ({over['low']:.3f} to "
            f"{over['high']:.3f}) of unpriced, useful {one['useful_tokens_per_s']['mean'] / 1e3:5.1f} k tokens/s, "
            f"wasted {one['wasted_tokens']['mean'] / 1e6:5.2f} M, rejected {one['rejected_share']['mean']:.1%}, missed "
            f"{one['missed_share']['mean']:.1%}, regret {one['regret']['mean']:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()

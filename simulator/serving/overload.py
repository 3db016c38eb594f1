"""Comparison of admission modes under overload: the same arrivals for each, over seeds, with confidence intervals."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from conductor.decision_log.codec import config_to_json
from settings.conductor import AdmissionMode
from simulator.errors import BadSetting
from simulator.serving.capacity import Capacity, find_capacity
from simulator.serving.confidence import Estimate, mean_of, share_of
from simulator.serving.runs import RunSpec, ServingRun, run_all, with_mode, worker_pool

MODES: tuple[AdmissionMode, ...] = get_args(AdmissionMode)
_PROBE_REQUESTS = 3000  # of a run of the capacity search
_PROBE_SEEDS = 2


@dataclass(frozen=True, slots=True)
class ModeSummary:
    """Results of one mode over all seeds. Shares are of the requests that arrived; tokens are millions of prompt
    tokens unless noted."""

    mode: AdmissionMode
    goodput: Estimate
    goodput_over_best: Estimate  # paired by seed: this mode's over the reference mode's, minus 1
    attainment: Estimate
    rejected: Estimate
    withheld: Estimate
    missed_ttft: Estimate
    missed_tbt: Estimate
    useful_tokens: Estimate  # computed for good requests, thousands per second
    wasted_tokens: Estimate
    wasted_withheld: Estimate
    wasted_share: Estimate  # of the tokens computed
    false_rejects: Estimate | None  # of the evaluated rejections; None if none was evaluated
    rejects_tried: int
    false_accepts: Estimate  # of the admitted requests: those that were not good
    prefill_swing: Estimate
    decode_swing: Estimate
    lag_correlation: Estimate
    lag_s: Estimate
    ttft_mean_s: Estimate
    ttft_p90_s: Estimate
    tbt_p90_s: Estimate
    sibling_share: Estimate  # of the served prompts' tokens
    quality_loss: Estimate  # mean over the served


@dataclass(frozen=True, slots=True)
class Overload:
    """Result of the comparison. `runs` are ordered by mode, then seed."""

    spec: RunSpec
    load: float
    capacity: Capacity | None
    summaries: tuple[ModeSummary, ...]
    runs: tuple[ServingRun, ...]

    def to_json(self, *, series: bool = False) -> dict[str, Any]:
        """Return all results. With `series`, the load series of the first seed are included."""
        found = asdict(self)
        found["spec"] = {**found["spec"], "profile": self.spec.profile.name, "policy": config_to_json(self.spec.policy)}
        for run in found["runs"]:
            if not series or run["seed"] != self.runs[0].seed:
                del run["prefill_load"], run["decode_load"]
        return found


def modes_of(text: str) -> list[AdmissionMode]:
    """Parse comma-separated mode names. Raises BadSetting."""
    found = {mode: mode for mode in MODES}
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in found]:
        raise BadSetting(f"unknown admission mode {unknown[0]!r}; choose from {', '.join(MODES)}")
    return [found[name] for name in dict.fromkeys(names)]  # type: ignore[index]


def compare_modes(
    spec: RunSpec,
    *,
    modes: Sequence[AdmissionMode],
    seeds: int,
    load: float,
    rate_per_s: float | None,
    processes: int,
    on_progress: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Overload:
    """Run every mode on the same `seeds` workloads, at `load` times the capacity, or at `rate_per_s` if given.

    All modes are compared with the last of `modes`. Raises BadSetting and the errors of `run_one`.
    """
    if seeds < 1 or not modes:
        raise BadSetting(f"at least one seed and one mode are needed, got {seeds} seeds and {len(modes)} modes")
    if not 0 < load < 1000 or processes < 1:
        raise BadSetting(
            f"the load must be above 0 and below 1000 and the processes at least 1, got a load of {load} and "
            f"{processes} processes"
        )
    capacity = None
    with worker_pool(processes) as pool:
        if rate_per_s is None:
            capacity = find_capacity(
                replace(spec, requests=min(spec.requests, _PROBE_REQUESTS)),
                _PROBE_SEEDS,
                lambda specs: run_all(specs, pool),
                lambda rate, attainment: on_progress(
                    f"{rate:.2f} requests/s without rejections: {attainment:.1%} meet the objectives"
                ),
            )
            rate_per_s = load * capacity.rate_per_s
            on_progress(f"capacity {capacity.rate_per_s:.2f} requests/s; running at {rate_per_s:.2f}")
        spec = replace(spec, rate_per_s=rate_per_s)
        specs = [replace(with_mode(spec, mode), seed=seed) for seed in range(seeds) for mode in modes]
        found = run_all(specs, pool, progress)
    return summarised(spec, modes, load, capacity, found)


def summarised(
    spec: RunSpec, modes: Sequence[AdmissionMode], load: float, capacity: Capacity | None, found: Sequence[ServingRun]
) -> Overload:
    """Compare runs of all `modes` on the same seeds, ordered by seed."""
    runs = {mode: [run for run in found if run.mode == mode] for mode in modes}
    summaries = tuple(_summary(mode, runs[mode], runs[modes[-1]]) for mode in modes)
    return Overload(spec, load, capacity, summaries, tuple(run for mode in modes for run in runs[mode]))


def _summary(mode: AdmissionMode, runs: Sequence[ServingRun], reference: Sequence[ServingRun]) -> ModeSummary:
    outcomes = [run.outcome for run in runs]

    def share(of: Callable[[Any], float]) -> Estimate:
        return mean_of([of(one) / max(1, one.arrived) for one in outcomes])

    def mean(of: Callable[[Any], float]) -> Estimate:
        return mean_of([of(one) for one in outcomes])

    pairs = zip(outcomes, (run.outcome for run in reference), strict=True)
    return ModeSummary(
        mode=mode,
        goodput=mean(lambda one: one.goodput),
        goodput_over_best=mean_of(
            [mine.goodput / other.goodput - 1 if other.goodput else 0.0 for mine, other in pairs]
        ),
        attainment=mean(lambda one: one.attainment),
        rejected=share(lambda one: one.rejected),
        withheld=share(lambda one: one.withheld),
        missed_ttft=share(lambda one: one.missed_ttft),
        missed_tbt=share(lambda one: one.missed_tbt),
        useful_tokens=mean(lambda one: one.useful_tokens_per_s / 1e3),
        wasted_tokens=mean(lambda one: one.wasted_tokens / 1e6),
        wasted_withheld=mean(lambda one: one.wasted_withheld / 1e6),
        wasted_share=mean(lambda one: one.wasted_tokens / max(1, one.computed_tokens)),
        false_rejects=share_of(sum(run.rejects_false for run in runs), sum(run.rejects_tried for run in runs)),
        rejects_tried=sum(run.rejects_tried for run in runs),
        false_accepts=mean(lambda one: 1 - one.good / max(1, one.arrived - one.rejected - one.withheld)),
        prefill_swing=mean(lambda one: one.swing.prefill_std),
        decode_swing=mean(lambda one: one.swing.decode_std),
        lag_correlation=mean(lambda one: one.swing.lag_correlation),
        lag_s=mean(lambda one: one.swing.lag_s),
        ttft_mean_s=mean(lambda one: one.ttft_mean_s),
        ttft_p90_s=mean(lambda one: one.ttft_p90_s),
        tbt_p90_s=mean(lambda one: one.tbt_p90_s),
        sibling_share=mean(lambda one: one.sibling_share),
        quality_loss=mean(lambda one: one.quality_loss),
    )

"""Comparison of objectives and node splits under the same arrivals, varying one setting of a base at a time."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from simulator.errors import BadSetting
from simulator.serving.confidence import Estimate, mean_of
from simulator.serving.runs import RunSpec, ServingRun, run_all, worker_pool

Varied = Literal["ttft", "tbt", "split"]


@dataclass(frozen=True, slots=True)
class TuningPoint:
    """Results of one setting over all seeds. Shares are of the requests that arrived. `is_base`: unchanged settings."""

    varied: Varied
    is_base: bool
    prefill_nodes: int
    decode_nodes: int
    ttft_objective_s: float
    tbt_objective_s: float
    goodput: Estimate  # requests per second that met both objectives
    good: Estimate
    rejected: Estimate
    missed: Estimate  # served, but missed an objective
    ttft_p90_s: Estimate  # of the served requests
    tbt_p90_s: Estimate


@dataclass(frozen=True, slots=True)
class Tuning:
    """Result of a comparison."""

    spec: RunSpec
    seeds: int
    points: tuple[TuningPoint, ...]

    def of(self, varied: Varied) -> list[TuningPoint]:
        """Return the points of one varied setting, in ascending order of its value."""
        return [point for point in self.points if point.varied == varied]

    def to_json(self) -> dict[str, Any]:
        settings = self.spec.settings
        return {
            "trace": self.spec.trace,
            "profile": self.spec.profile.name,
            "rate_per_s": self.spec.rate_per_s,
            "requests": self.spec.requests,
            "seeds": self.seeds,
            "prefill_nodes": settings.prefill_nodes,
            "decode_nodes": settings.decode_nodes,
            "points": [asdict(point) for point in self.points],
        }


def tune(
    spec: RunSpec,
    *,
    ttft_s: Sequence[float],
    tbt_s: Sequence[float],
    prefill_nodes: Sequence[int],
    seeds: int,
    processes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tuning:
    """Run `spec` with each of these objectives, and with each of these numbers of its nodes for prefill.

    The points of each varied setting include the base. Raises BadSetting and the errors of `run_one`.
    """
    if seeds < 1 or processes < 1:
        raise BadSetting(f"at least one seed and one process are needed, got {seeds} seeds and {processes} processes")
    settings, spec = spec.settings, replace(spec, seed=0)
    total = settings.prefill_nodes + settings.decode_nodes
    if wrong := [count for count in prefill_nodes if not 0 < count < total]:
        raise BadSetting(
            f"{wrong[0]} of {total} nodes for prefill leaves {total - wrong[0]} for decode; both need at least one"
        )
    if wrong_s := [value for value in (*ttft_s, *tbt_s) if not 0 < value < 86400]:
        raise BadSetting(f"an objective must be above 0 s and below a day, got {wrong_s[0]:g} s")
    varied: list[tuple[Varied, RunSpec]] = [
        *(
            ("ttft", _objectives(spec, each, settings.tbt_objective_s))
            for each in _with(settings.ttft_objective_s, ttft_s)
        ),
        *(
            ("tbt", _objectives(spec, settings.ttft_objective_s, each))
            for each in _with(settings.tbt_objective_s, tbt_s)
        ),
        *(("split", _split(spec, count)) for count in _with(settings.prefill_nodes, prefill_nodes)),
    ]
    # The base is a point of each varied setting, but runs only once.
    others = [one for _, one in varied if one != spec]
    wanted = [replace(one, seed=seed) for one in (spec, *others) for seed in range(seeds)]
    with worker_pool(processes) as pool:
        found = run_all(wanted, pool, progress)
    runs = [found[start : start + seeds] for start in range(0, len(found), seeds)]
    after_base = iter(runs[1:])
    points = [_point(kind, one == spec, one, runs[0] if one == spec else next(after_base)) for kind, one in varied]
    return Tuning(spec, seeds, tuple(points))


def _with(base: Any, values: Sequence[Any]) -> list[Any]:
    """Return the sorted values including the base's; empty if there are no values."""
    return sorted({base, *values}) if values else []


def _split(spec: RunSpec, prefill_nodes: int) -> RunSpec:
    settings = spec.settings
    total = settings.prefill_nodes + settings.decode_nodes
    split = replace(settings, prefill_nodes=prefill_nodes, decode_nodes=total - prefill_nodes)
    return replace(spec, settings=split)


def _objectives(spec: RunSpec, ttft_s: float, tbt_s: float) -> RunSpec:
    return replace(
        spec,
        settings=replace(spec.settings, ttft_objective_s=ttft_s, tbt_objective_s=tbt_s),
        policy=replace(spec.policy, ttft_slo_s=ttft_s, tbt_slo_s=tbt_s),
    )


def _point(varied: Varied, is_base: bool, spec: RunSpec, runs: Sequence[ServingRun]) -> TuningPoint:
    outcomes = [run.outcome for run in runs]
    arrived = [max(1, one.arrived) for one in outcomes]
    rejected = [(one.rejected + one.withheld) / count for one, count in zip(outcomes, arrived, strict=True)]
    missed = [(one.missed_ttft + one.missed_tbt) / count for one, count in zip(outcomes, arrived, strict=True)]
    return TuningPoint(
        varied=varied,
        is_base=is_base,
        prefill_nodes=spec.settings.prefill_nodes,
        decode_nodes=spec.settings.decode_nodes,
        ttft_objective_s=spec.settings.ttft_objective_s,
        tbt_objective_s=spec.settings.tbt_objective_s,
        goodput=mean_of([one.goodput for one in outcomes]),
        good=mean_of([one.attainment for one in outcomes]),
        rejected=mean_of(rejected),
        missed=mean_of(missed),
        ttft_p90_s=mean_of([one.ttft_p90_s for one in outcomes]),
        tbt_p90_s=mean_of([one.tbt_p90_s for one in outcomes]),
    )

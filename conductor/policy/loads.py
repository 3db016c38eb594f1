"""Load of each model's prefill and decode nodes and its fluctuation, for metrics; decisions do not use it.

Load is defined as in the Mooncake paper (section 6.1): predicted latency over its objective, here of all nodes of a
role instead of one request. Admission by the present decode load makes the two loads oscillate in anti-phase (section
6.2), which shows in their deviation.
"""

from dataclasses import dataclass
from math import exp, sqrt
from typing import Final

from conductor.policy.costs import ModelCosts
from conductor.policy.events import NS
from conductor.policy.nodes import ModelNodes
from conductor.policy.placement.decode import mean_load
from conductor.policy.state import ClusterState

__all__ = ["LoadSeries", "NodeLoads", "loads_of"]

_SPAN_S: Final = 60.0  # time constant of mean and variance
_UNLOADED_PROMPT: Final = 1024  # prompt tokens for which objectives relative to the unloaded value are evaluated


@dataclass(slots=True)
class LoadSeries:
    """Exponentially weighted mean and standard deviation of a series, over about a minute."""

    mean: float = 0.0
    variance: float = 0.0
    at_ns: int = -1
    last: float = 0.0

    def add(self, now_ns: int, value: float) -> None:
        """Add a value; a `now_ns` before the last one counts as the same time."""
        passed_s = max(0, now_ns - self.at_ns) / NS
        part = 1.0 if self.at_ns < 0 else 1.0 - exp(-passed_s / _SPAN_S)
        off = value - self.mean
        self.mean += part * off
        self.variance = 0.0 if self.at_ns < 0 else (1.0 - part) * (self.variance + part * off * off)
        self.at_ns, self.last = max(now_ns, self.at_ns), value

    @property
    def deviation(self) -> float:
        """Standard deviation, in the unit of the values."""
        return sqrt(self.variance)


class NodeLoads:
    """Load of the prefill and the decode nodes of each model with objectives, as of the last tick."""

    def __init__(self) -> None:
        self.prefill: dict[str, LoadSeries] = {}
        self.decode: dict[str, LoadSeries] = {}

    def pass_time(self, now_ns: int, state: ClusterState) -> None:
        """Measure the load of all models at `now_ns`."""
        for model in sorted(state.costs):
            for series, load in zip((self.prefill, self.decode), loads_of(now_ns, state, model), strict=True):
                if load is None:
                    series.pop(model, None)
                else:
                    series.setdefault(model, LoadSeries()).add(now_ns, load)


def loads_of(now_ns: int, state: ClusterState, model: str) -> tuple[float | None, float | None]:
    """Return (mean prefill queue time / TTFT objective, mean present TBT / TBT objective); None without objective."""
    nodes, costs = state.nodes.model(model), state.costs_of(model)
    if nodes is None:
        return None, None
    wanted = state.slo.resolve(model, "", "")
    ttft_s = wanted.ttft.bound_s(costs.prefill_cost_s(_UNLOADED_PROMPT))
    tbt_s = wanted.tbt.bound_s(costs.step_cost_s(1, _UNLOADED_PROMPT, 1))
    prefill = decode = None
    if ttft_s and len(nodes.prefill):
        prefill = float(state.tally(now_ns)["queued_ns"][nodes.prefill.slots].mean()) / NS / ttft_s
    if tbt_s and (step_s := _mean_step_s(now_ns, state, nodes, costs)) is not None:
        decode = step_s / tbt_s
    return prefill, decode


def _mean_step_s(now_ns: int, state: ClusterState, nodes: ModelNodes, costs: ModelCosts) -> float | None:
    """Return the mean duration of a decode step over all decoding nodes, in seconds; an idle node counts as 0."""
    loads = mean_load(now_ns, state, costs)
    steps = []
    for candidates, takes in ((nodes.decode, True), (nodes.prefill, False)):
        for i, slot in enumerate(candidates.slots.tolist()):
            if takes or candidates.is_aggregated[i]:
                batch, context = loads["sequences"].item(slot), loads["context"].item(slot)
                steps.append(costs.step_cost_s(batch, context, int(candidates.max_batch[i]), slot) if batch else 0.0)
    return sum(steps) / len(steps) if steps else None

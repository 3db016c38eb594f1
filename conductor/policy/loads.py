"""How loaded a model's prefill and decode nodes are, and how much that swings. Pure; no decision goes by it.

Load is Mooncake's: predicted latency over its objective (section 6.1), here of the pool, not of a request. Admission
that goes by decode load as it is now makes both swing in anti-phase (section 6.2), which is what the swing shows.
"""

from dataclasses import dataclass
from math import exp, sqrt
from typing import Final

import numpy as np

from conductor.policy.config import NS
from conductor.policy.costs import ModelCosts
from conductor.policy.nodes import ModelNodes
from conductor.policy.placement.decode import NOW, decode_kernels
from conductor.policy.state import ClusterState

__all__ = ["LoadSeries", "NodeLoads", "loads_of"]

_SPAN_S: Final = 60.0  # over which swings are seen
_UNLOADED_PROMPT: Final = 1024  # tokens of the prompt that relative objectives are taken for


@dataclass(slots=True)
class LoadSeries:
    """A series' mean and standard deviation over about a minute, the older values for less."""

    mean: float = 0.0
    variance: float = 0.0
    at_ns: int = -1
    last: float = 0.0

    def add(self, now_ns: int, value: float) -> None:
        """Take in a value; time that runs backwards counts as none."""
        passed_s = max(0, now_ns - self.at_ns) / NS
        part = 1.0 if self.at_ns < 0 else 1.0 - exp(-passed_s / _SPAN_S)
        off = value - self.mean
        self.mean += part * off
        self.variance = 0.0 if self.at_ns < 0 else (1.0 - part) * (self.variance + part * off * off)
        self.at_ns, self.last = max(now_ns, self.at_ns), value

    @property
    def deviation(self) -> float:
        """The standard deviation, in what the values are in."""
        return sqrt(self.variance)


class NodeLoads:
    """Per model with objectives: load of its prefill nodes and of its decode nodes, as of the last tick."""

    def __init__(self) -> None:
        self.prefill: dict[str, LoadSeries] = {}
        self.decode: dict[str, LoadSeries] = {}

    def pass_time(self, now_ns: int, state: ClusterState) -> None:
        """Measure all models."""
        for model in sorted(state.costs):
            for swings, load in zip((self.prefill, self.decode), loads_of(now_ns, state, model), strict=True):
                if load is None:
                    swings.pop(model, None)
                else:
                    swings.setdefault(model, LoadSeries()).add(now_ns, load)


def loads_of(now_ns: int, state: ClusterState, model: str) -> tuple[float | None, float | None]:
    """(mean wait for a prefill turn over the TTFT objective, mean TBT now over the TBT objective); None: without."""
    nodes, costs = state.nodes.model(model), state.costs_of(model)
    if nodes is None:
        return None, None
    wanted = state.slo.resolve(model, "", "")
    ttft_s = wanted.ttft.bound_s(costs.prefill_cost_s(_UNLOADED_PROMPT))
    tbt_s = wanted.tbt.bound_s(costs.step_cost_s(1, _UNLOADED_PROMPT, 1))
    prefill = decode = None
    if ttft_s and len(nodes.prefill):
        prefill = float(state.tally(now_ns)[nodes.prefill.slots, 0].mean()) / NS / ttft_s
    if tbt_s and (step_s := _mean_step_s(now_ns, state, nodes, costs)) is not None:
        decode = step_s / tbt_s
    return prefill, decode


def _mean_step_s(now_ns: int, state: ClusterState, nodes: ModelNodes, costs: ModelCosts) -> float | None:
    """Return the mean step of the nodes that decode, in seconds; a node without work counts as 0."""
    load = np.empty((state.nodes.num_slots, 3))
    requests, step_ns = state.requests, max(1, round(costs.typical_step_s * NS))
    decode_kernels().predict_load(
        requests.table, len(requests), now_ns, now_ns, NOW, -1, step_ns, state.lengths.curves, False, load
    )
    steps = []
    for candidates, takes in ((nodes.decode, True), (nodes.prefill, False)):
        for i, slot in enumerate(candidates.slots.tolist()):
            if takes or candidates.is_aggregated[i]:
                batch, context, _ = load[slot].tolist()
                steps.append(costs.step_cost_s(batch, context, int(candidates.max_batch[i]), slot) if batch else 0.0)
    return sum(steps) / len(steps) if steps else None

"""Demand and load of each model's nodes by role: role switches, pool sizes, and load metrics.

Role switching and pool sizing apply the rules of `roles` to the cluster's state. `NodeLoads` is for metrics only. It
defines load as the Mooncake paper does (section 6.1): predicted latency over its objective, here of all nodes of a role
instead of one request. Admission by the present decode load makes the two loads oscillate in anti-phase (section 6.2),
which shows in their deviation.
"""

from dataclasses import dataclass
from math import exp, sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from conductor.policy.costs import ModelCosts
from conductor.policy.costs import tbt_s as step_s
from conductor.policy.decisions import SwitchRole
from conductor.policy.events import NS, RequestArrived
from conductor.policy.nodes import Candidates, ModelNodes
from conductor.policy.placement.decode import mean_load
from conductor.policy.requests import NONE
from conductor.policy.roles import (
    Demand,
    ModelSizing,
    RoleLoad,
    Split,
    Switch,
    Switching,
    decode_spare,
    prefill_spare,
)
from conductor.policy.state import ClusterState

__all__ = [
    "LoadSeries",
    "NodeLoads",
    "answered",
    "arrived",
    "arrived_elsewhere",
    "loads_of",
    "plan_roles",
    "plan_sizes",
    "turned_away",
]

_MOST_ROOM: Final = 4096
_BACKLOG_S: Final = 60.0


def arrived(now_ns: int, state: ClusterState, request: RequestArrived, prefill_s: float, reserved_tokens: int) -> None:
    """Count a first attempt as demand, unless it is the retry of a request that was rejected recently.

    `prefill_s` is the predicted duration of its prefill on the node that it would go to, and `reserved_tokens` what its
    decode node would reserve.
    """
    demand = _switching(state, request.model).demand
    if not demand.comes_back(now_ns, request.prompt_key):
        demand.arrived(now_ns, prefill_s, request.prompt_tokens, reserved_tokens)


def turned_away(now_ns: int, state: ClusterState, request: RequestArrived) -> None:
    """Record that the request was rejected."""
    _switching(state, request.model).demand.turned_away(now_ns, request.prompt_key)


def arrived_elsewhere(
    now_ns: int, state: ClusterState, model: str, prefill_s: float, prompt_tokens: int, reserved_tokens: int
) -> None:
    """Count the demand of a request that another conductor placed and a worker reports."""
    _switching(state, model).demand.arrived(now_ns, prefill_s, prompt_tokens, reserved_tokens)


def answered(now_ns: int, state: ClusterState, model: str, tokens: int) -> None:
    """Count the answer of a request that has ended."""
    _switching(state, model).demand.answered(now_ns, tokens)


def plan_roles(now_ns: int, state: ClusterState) -> list[SwitchRole]:
    """Return the role switches that are due now."""
    due: list[SwitchRole] = []
    if state.config.role_switching == "off":
        return due
    for name in sorted(state.switching):
        model, switching = state.nodes.model(name), state.switching[name]
        if model is None:
            continue
        prefill = np.flatnonzero(~model.prefill.is_aggregated)
        if not len(prefill) or not len(model.decode) or not switching.demand.answers:
            continue  # the demand for decode is unknown until an answer has ended
        switch = switching.update(now_ns, _split(now_ns, state, name, model, switching.demand, len(prefill)))
        if switch is not None:
            nodes = model.prefill if switch.to == "decode" else model.decode
            among = prefill if switch.to == "decode" else np.arange(len(nodes))
            is_advice = state.config.role_switching == "advise"
            idlest = _idlest(now_ns, state, nodes, among, switch)
            due += [SwitchRole(node_id, switch.to, switch.reason, is_advice) for node_id in idlest]
    return due


def plan_sizes(now_ns: int, state: ClusterState) -> None:
    """Update `state.sizing`: the number of nodes that each role of each model should have."""
    config = state.config
    for name in sorted(state.costs):
        model = state.nodes.model(name)
        if model is None:  # no node serves it now: keep the last result
            continue
        sizing = state.sizing.get(name)
        if sizing is None:
            sizing = ModelSizing(round(config.size_grow_hold_s * NS), round(config.size_shrink_hold_s * NS))
            state.sizing[name] = sizing
        sizing.update(now_ns, _role_loads(now_ns, state, name, model))


def _role_loads(now_ns: int, state: ClusterState, name: str, model: ModelNodes) -> dict[str, RoleLoad]:
    """Return the load of each role. Aggregated nodes are counted only if there are no prefill and no decode nodes."""
    switching = state.switching.get(name)
    demand = switching.demand if switching is not None and switching.demand.answers else None
    both = int(np.count_nonzero(model.prefill.is_aggregated))
    prefill, decode = len(model.prefill) - both, len(model.decode)
    decoding = model.decode if decode else model.prefill
    if demand is None or not len(decoding):
        prefill_load, decode_load = RoleLoad(prefill, None), RoleLoad(decode, None)
    else:
        prefill_load = _prefill_load(now_ns, state, name, model, demand, prefill)
        decode_load = _decode_role_load(now_ns, state, name, decoding, demand, decode)
    if both and not prefill and not decode:
        return {"aggregated": _merged(both, prefill_load, decode_load)}
    return {"prefill": prefill_load, "decode": decode_load}


def _prefill_load(
    now_ns: int, state: ClusterState, name: str, model: ModelNodes, demand: Demand, nodes: int
) -> RoleLoad:
    busy, prefill_s = demand.prefill_load(now_ns), demand.mean_prefill_s
    ttft_s = state.slo.resolve(name, "", "").ttft.bound_s(prefill_s)
    spare = prefill_spare(busy, prefill_s, ttft_s)
    return RoleLoad(nodes, busy, spare, busy + _backlog(now_ns, state, model))


def _decode_role_load(
    now_ns: int, state: ClusterState, name: str, decoding: Candidates, demand: Demand, nodes: int
) -> RoleLoad:
    busy, room = _decode_load(now_ns, state, name, decoding, demand)
    return RoleLoad(nodes, busy, decode_spare(busy, room), busy)


def _merged(nodes: int, prefill: RoleLoad, decode: RoleLoad) -> RoleLoad:
    """Return the load of aggregated nodes, which do the work of both roles."""
    if prefill.busy is None or decode.busy is None:
        return RoleLoad(nodes, None)
    busy_now = prefill.busy_now + decode.busy_now
    return RoleLoad(nodes, prefill.busy + decode.busy, prefill.spare + decode.spare, busy_now)


def _backlog(now_ns: int, state: ClusterState, model: ModelNodes) -> float:
    """Return the number of nodes that would work off the prefill queue within a minute."""
    waiting_s = float(state.tally(now_ns)["queued_ns"][model.prefill.slots].sum()) / NS
    return waiting_s / _BACKLOG_S


def _switching(state: ClusterState, model: str) -> Switching:
    switching = state.switching.get(model)
    if switching is None:
        config = state.config
        switching = Switching(round(config.role_hold_s * NS), round(config.role_rest_s * NS), config.role_share)
        state.switching[model] = switching
    return switching


def _split(now_ns: int, state: ClusterState, name: str, model: ModelNodes, demand: Demand, prefill_nodes: int) -> Split:
    decode_load, room = _decode_load(now_ns, state, name, model.decode, demand)
    # Demand knows only the lengths of answers that have ended; longer ones show first in how many are running.
    decode_load = max(decode_load, _num_decoding(state, model.decode) / room)
    return Split(prefill_nodes, len(model.decode), demand.prefill_load(now_ns), decode_load)


def _num_decoding(state: ClusterState, nodes: Candidates) -> int:
    """Return the number of requests in the decode batches of `nodes`."""
    requests = state.requests.records
    return int(np.count_nonzero((requests["joined_ns"] != NONE) & np.isin(requests["decode_node"], nodes.slots)))


def _decode_load(now_ns: int, state: ClusterState, name: str, nodes: Candidates, demand: Demand) -> tuple[float, int]:
    """Return the number of `nodes` that the demand for decode keeps busy within the TBT objective, and the concurrent
    requests of a busy one.

    Each is assumed to have the smallest batch limit and capacity among them.
    """
    costs, context = state.costs_of(name), max(1.0, demand.mean_context)
    wanted = state.slo.resolve(name, "", "").tbt
    tbt_s = wanted.bound_s(_step_s(costs, 1, context))
    pages = int(int(nodes.capacity_tokens.min()) / max(context, demand.mean_reserved))
    room = _room(costs, context, tbt_s, min(pages, int(nodes.max_batch.min())))
    return demand.decode_load(now_ns, _step_s(costs, room, context), room), room


def _room(costs: ModelCosts, context: float, tbt_s: float, limit: int) -> int:
    """Return the number of concurrent requests of a decode node, by its batch and pages (`limit`) and the objective.

    `tbt_s`: the objective; 0: none.
    """
    most = max(1, min(limit, _MOST_ROOM))
    if not tbt_s:
        return most
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if _step_s(costs, middle, context) <= tbt_s:
            low = middle
        else:
            high = middle - 1
    return low


def _step_s(costs: ModelCosts, batch: int, context: float) -> float:
    """Return the seconds of a decode step of `batch` requests of `context` tokens, by the formula alone.

    The increase beyond the measured range would not do here: nodes that are too many have small batches only, so that
    it would make them seem too few.
    """
    return step_s(*costs.decode, batch, batch * context, batch)


def _idlest(now_ns: int, state: ClusterState, nodes: Candidates, among: NDArray[np.int64], switch: Switch) -> list[str]:
    """Return the nodes with the least work to finish; ties go to the ids that come first."""
    work = state.tally(now_ns)["queued_ns" if switch.to == "decode" else "committed"][nodes.slots[among]]
    order = np.argsort(work, kind="stable")[: switch.nodes]
    return [nodes.ids[int(among[at])] for at in order]


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

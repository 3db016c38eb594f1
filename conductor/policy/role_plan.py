"""Which node should change its role, and how many each role should have, by what the cluster knows: demand, nodes,
costs, objectives. Rules: `roles`, `sizing`.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from conductor.policy.config import NS
from conductor.policy.costs import ModelCosts
from conductor.policy.decisions import SwitchRole
from conductor.policy.events import RequestArrived
from conductor.policy.nodes import Candidates, ModelNodes
from conductor.policy.roles import Demand, ModelSizing, RoleLoad, Split, Switching
from conductor.policy.state import ClusterState

__all__ = ["answered", "arrived", "arrived_elsewhere", "plan_roles", "plan_sizes", "turned_away"]

_MOST_ROOM: Final = 4096
_BACKLOG_S: Final = 60.0


def arrived(now_ns: int, state: ClusterState, request: RequestArrived, prefill_s: float) -> None:
    """A request came for the first time; `prefill_s`: what its prefill takes where it would go. One that was rejected
    lately is no further demand when it comes back."""
    demand = _switching(state, request.model).demand
    if not demand.comes_back(now_ns, request.prompt_key):
        demand.arrived(now_ns, prefill_s, request.prompt_tokens)


def turned_away(now_ns: int, state: ClusterState, request: RequestArrived) -> None:
    """That request was rejected."""
    _switching(state, request.model).demand.turned_away(now_ns, request.prompt_key)


def arrived_elsewhere(now_ns: int, state: ClusterState, model: str, prefill_s: float, prompt_tokens: int) -> None:
    """A worker has a prompt to compute that another conductor placed."""
    _switching(state, model).demand.arrived(now_ns, prefill_s, prompt_tokens)


def answered(now_ns: int, state: ClusterState, model: str, tokens: int) -> None:
    """A request ended after so many tokens."""
    _switching(state, model).demand.answered(now_ns, tokens)


def plan_roles(now_ns: int, state: ClusterState) -> list[SwitchRole]:
    """The changes that are due now, at most one of each model."""
    due: list[SwitchRole] = []
    if state.config.role_switching == "off":
        return due
    for name in sorted(state.switching):
        model, switching = state.nodes.model(name), state.switching[name]
        if model is None:
            continue
        prefill = np.flatnonzero(~model.prefill.is_aggregated)
        if not len(prefill) or not len(model.decode) or not switching.demand.answers:
            continue  # how much the decode nodes have to do is not known before an answer has ended
        switch = switching.look(now_ns, _split(now_ns, state, name, model, switching.demand, len(prefill)))
        if switch is not None:
            nodes = model.prefill if switch.to == "decode" else model.decode
            among = prefill if switch.to == "decode" else np.arange(len(nodes))
            node_id = _idlest(now_ns, state, nodes, among, switch.to)
            due.append(SwitchRole(node_id, switch.to, switch.reason, state.config.role_switching == "advise"))
    return due


def plan_sizes(now_ns: int, state: ClusterState) -> None:
    """Bring `state.sizing` up to date: of each model, how many nodes every role should have."""
    config = state.config
    for name in sorted(state.costs):
        model = state.nodes.model(name)
        if model is None:  # nobody serves it now: what was wanted still is
            continue
        sizing = state.sizing.get(name)
        if sizing is None:
            sizing = ModelSizing(round(config.size_grow_hold_s * NS), round(config.size_shrink_hold_s * NS))
            state.sizing[name] = sizing
        sizing.look(now_ns, _role_loads(now_ns, state, name, model))


def _role_loads(now_ns: int, state: ClusterState, name: str, model: ModelNodes) -> dict[str, RoleLoad]:
    """By role. Where some nodes do both and others one phase, the former help out and are not counted."""
    switching = state.switching.get(name)
    demand = switching.demand if switching is not None and switching.demand.answers else None
    both = int(np.count_nonzero(model.prefill.is_aggregated))
    prefill, decode = len(model.prefill) - both, len(model.decode)
    decoding = model.decode if decode else model.prefill
    prefill_busy = decode_busy = None
    if demand is not None and len(decoding):
        prefill_busy = demand.prefill_load(now_ns) + _backlog(now_ns, state, model)
        decode_busy = _decode_load(now_ns, state, name, decoding, demand)
    if both and not prefill and not decode:
        busy = None if prefill_busy is None or decode_busy is None else prefill_busy + decode_busy
        return {"aggregated": RoleLoad(both, busy)}
    return {"prefill": RoleLoad(prefill, prefill_busy), "decode": RoleLoad(decode, decode_busy)}


def _backlog(now_ns: int, state: ClusterState, model: ModelNodes) -> float:
    """Nodes that would compute within a minute what already waits for prefill."""
    waiting_s = float(state.tally(now_ns)["queued_ns"][model.prefill.slots].sum()) / NS
    return waiting_s / _BACKLOG_S


def _switching(state: ClusterState, model: str) -> Switching:
    switching = state.switching.get(model)
    if switching is None:
        config = state.config
        switching = Switching(hold_ns=round(config.role_hold_s * NS), rest_ns=round(config.role_rest_s * NS))
        state.switching[model] = switching
    return switching


def _split(now_ns: int, state: ClusterState, name: str, model: ModelNodes, demand: Demand, prefill_nodes: int) -> Split:
    decode_load = _decode_load(now_ns, state, name, model.decode, demand)
    return Split(prefill_nodes, len(model.decode), demand.prefill_load(now_ns), decode_load)


def _decode_load(now_ns: int, state: ClusterState, name: str, nodes: Candidates, demand: Demand) -> float:
    """How many of those nodes, each as the least of them, the demand for decode keeps busy within the objective."""
    costs, context = state.costs_of(name), max(1.0, demand.mean_context)
    wanted = state.slo.resolve(name, "", "").tbt
    tbt_s = wanted.bound_s(costs.step_cost_s(1, context, 1))
    room = _room(costs, context, tbt_s, int(nodes.max_batch.min()), int(nodes.capacity_tokens.min()))
    return demand.decode_load(now_ns, costs.step_cost_s(room, room * context, room), room)


def _room(costs: ModelCosts, context: float, tbt_s: float, max_batch: int, capacity_tokens: int) -> int:
    """Requests that a decode node holds at once: by its batch, its pages, and the objective (0 = none)."""
    most = max(1, min(max_batch, int(capacity_tokens / context), _MOST_ROOM))
    if not tbt_s:
        return most
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if costs.step_cost_s(middle, middle * context, middle) <= tbt_s:
            low = middle
        else:
            high = middle - 1
    return low


def _idlest(now_ns: int, state: ClusterState, nodes: Candidates, among: NDArray[np.int64], to: str) -> str:
    """Return the node with the least work to finish; ties go to the id that comes first."""
    work = state.tally(now_ns)["queued_ns" if to == "decode" else "committed"][nodes.slots[among]]
    return nodes.ids[int(among[int(np.argmin(work))])]

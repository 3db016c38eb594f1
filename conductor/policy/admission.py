"""Is the predicted service good enough? Otherwise 429, and when to come back. docs/admission.md explains the modes."""

from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from conductor.policy.config import PolicyConfig
from conductor.policy.costs import ModelCosts
from conductor.policy.decisions import Reason, Reject
from conductor.policy.decode_choice import tbt_now_s, wait_for_tbt_s
from conductor.policy.events import DecodeAsked, RequestArrived
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.placement_plan import Plan
from conductor.policy.requests import NONE
from conductor.policy.retry import retry_after_s
from conductor.policy.state import ClusterState

__all__ = ["Judgement", "asks_again", "judge", "judge_after_prefill"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """`rejection` holds; `unwanted` is why the request would have been rejected, had that been enforced."""

    rejection: Reject | None = None
    unwanted: Reason | Literal[""] = ""


_ADMITTED: Final = Judgement()


def asks_again(config: PolicyConfig) -> bool:
    """Whether decode load is judged once the prefill has ended, and not before."""
    return config.admission_mode == "load" and config.admission != "off"


def judge(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    plan: Plan,
    objectives: EffectiveObjectives,
    costs: ModelCosts,
) -> Judgement:
    """Of a request that arrives, with what is predicted for it at its best place, and what it is to be held to. One
    whose client has tokens already is never rejected for load.

    Load is predicted latency over its objective (Mooncake §6.1), the larger of TTFT's and TBT's; more than 1 rejects.
    """
    if request.generated > 0:
        return _ADMITTED
    config = state.config
    unmet = None
    if config.admission != "off" and config.admission_mode != "none":
        unmet = _unmet(now_ns, state, request, plan, objectives, costs)
    if unmet is not None and config.admission == "enforce":
        return Judgement(unmet)
    waited_s = max(plan.queue_s, plan.room_wait_s)
    if waited_s > config.max_queue_s:
        message = f"predicted to wait {waited_s:.1f} s; the limit is {config.max_queue_s:g} s"
        return Judgement(_reject(request, "queue", message, waited_s - config.max_queue_s))
    return _ADMITTED if unmet is None else Judgement(unwanted=unmet.reason)


def judge_after_prefill(now_ns: int, state: ClusterState, event: DecodeAsked) -> Judgement:
    """Of a request whose prefill has ended and whose first token is withheld: decode load now (Mooncake's baseline)."""
    row = state.requests.find(event.request_id, event.attempt)
    if row is None or not asks_again(state.config):
        return _ADMITTED
    claim, requests = state.requests.claims[row], state.requests
    objective_s = _usable(claim.objectives.tbt_s)
    model = state.nodes.model(claim.model)
    slot = int(requests.column("decode_node")[row])
    if requests.column("generated")[row] > 0 or not objective_s or model is None or slot == NONE:
        return _ADMITTED
    costs = state.costs_of(claim.model)
    nodes = next((each for each in (model.all_decode, model.all_prefill) if slot in each.slots), None)
    if nodes is None:
        return _ADMITTED
    index = nodes.slots.tolist().index(slot)
    tbt_s = tbt_now_s(nodes, index, state, costs, now_ns, row)
    if tbt_s <= objective_s * (1 - state.tally_of(claim.model).margins.tbt.share):
        return _ADMITTED
    if state.config.admission != "enforce":
        return Judgement(unwanted="tbt")
    prompt_tokens = int(requests.column("prompt")[row])
    wait_s = wait_for_tbt_s(
        nodes, index, state, costs, now_ns=now_ns, prompt_tokens=prompt_tokens, objective_s=objective_s
    )
    message = f"after the prefill, {_message('time between tokens', tbt_s, objective_s)}"
    retry_s = retry_after_s(event.request_id, event.attempt, wait_s)
    return Judgement(Reject(event.request_id, event.attempt, "tbt", message, retry_s, after_prefill=True))


def _unmet(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    plan: Plan,
    objectives: EffectiveObjectives,
    costs: ModelCosts,
) -> Reject | None:
    ttft_objective_s, tbt_objective_s = _usable(objectives.ttft_s), _usable(objectives.tbt_s)
    if not ttft_objective_s and not tbt_objective_s:
        return None
    decode = plan.decode
    if decode is not None and decode.choice.free_tokens < plan.places.need_tokens:
        message = f"no decode node has room for {request.prompt_tokens + request.max_new_tokens} tokens of KV"
        return _reject(request, "decode_capacity", message, plan.room_wait_s)
    # Compared with what leaves room for the errors of predictions like this.
    margins = state.tally_of(request.model).margins
    ttft_bound_s = ttft_objective_s * (1 - margins.ttft.share)
    tbt_bound_s = tbt_objective_s * (1 - margins.tbt.share)
    ttft_load = plan.ttft_s / ttft_bound_s if ttft_objective_s else 0.0
    tbt_load = plan.tbt_s / tbt_bound_s if tbt_objective_s and not asks_again(state.config) else 0.0
    if max(ttft_load, tbt_load) <= 1:
        return None
    if ttft_load >= tbt_load:
        message = _message("time to first token", plan.ttft_s, ttft_objective_s)
        # Waiting shortens the queue and nothing else.
        wait_s = min(plan.ttft_s - ttft_objective_s, max(plan.queue_s, plan.room_wait_s))
        return _reject(request, "ttft", message, wait_s)
    assert decode is not None
    wait_s = wait_for_tbt_s(
        decode.nodes,
        decode.choice.index,
        state,
        costs,
        now_ns=now_ns,
        prompt_tokens=request.prompt_tokens,
        objective_s=tbt_objective_s,
    )
    return _reject(request, "tbt", _message("time between tokens", plan.tbt_s, tbt_objective_s), wait_s)


def _usable(objective_s: float) -> float:
    """0 for what bounds nothing; an absurd bound is none."""
    return objective_s if 0 < objective_s < inf else 0.0


def _message(what: str, predicted_s: float, objective_s: float) -> str:
    return f"{what} is predicted to be {predicted_s:.3g} s; the objective is {objective_s:.3g} s"


def _reject(request: RequestArrived, reason: Reason, message: str, wait_s: float) -> Reject:
    retry_s = retry_after_s(request.request_id, request.attempt, wait_s)
    return Reject(request.request_id, request.attempt, reason, message, retry_s)

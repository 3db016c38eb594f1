"""The load check at arrival: is the predicted service good enough? Otherwise 429, and when to come back."""

from dataclasses import dataclass
from math import ceil

from conductor.policy.costs import ModelCosts
from conductor.policy.decisions import Reason, Reject
from conductor.policy.decode_choice import wait_for_tbt_s
from conductor.policy.events import RequestArrived
from conductor.policy.nodes import Candidates
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.state import ClusterState

__all__ = ["Verdict", "judge"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is predicted for a request at its best place. Without a decode node, TBT and waits are 0."""

    ttft_s: float
    queue_s: float  # of it, behind other prefills
    tbt_s: float
    room_wait_s: float  # until the decode node has the pages
    has_room: bool
    decode_nodes: Candidates | None
    decode_index: int
    objectives: EffectiveObjectives  # what it is to be held to


def judge(
    now_ns: int, state: ClusterState, request: RequestArrived, found: Verdict, costs: ModelCosts
) -> Reject | None:
    """None admits. A request whose client has tokens already is never rejected for load.

    Load is predicted latency over its objective (Mooncake §6.1), the larger of TTFT's and TBT's; more than 1 rejects.
    """
    if request.generated > 0:
        return None
    config = state.config
    ttft_objective_s, tbt_objective_s = found.objectives.ttft_s, found.objectives.tbt_s
    if not found.has_room and (ttft_objective_s or tbt_objective_s):
        message = f"no decode node has room for {request.prompt_tokens + request.max_new_tokens} tokens of KV"
        return _reject(request, "decode_capacity", message, found.room_wait_s)
    waited_s = max(found.queue_s, found.room_wait_s)
    if waited_s > config.max_queue_s:
        message = f"predicted to wait {waited_s:.1f} s; the limit is {config.max_queue_s:g} s"
        return _reject(request, "queue", message, waited_s - config.max_queue_s)
    ttft_load = found.ttft_s / ttft_objective_s if ttft_objective_s else 0.0
    tbt_load = found.tbt_s / tbt_objective_s if tbt_objective_s else 0.0
    if max(ttft_load, tbt_load) <= 1:
        return None
    if ttft_load >= tbt_load:
        message = _message("time to first token", found.ttft_s, ttft_objective_s)
        # Waiting shortens the queue and nothing else.
        return _reject(request, "ttft", message, min(found.ttft_s - ttft_objective_s, waited_s))
    assert found.decode_nodes is not None
    wait_s = wait_for_tbt_s(
        found.decode_nodes,
        found.decode_index,
        state.requests,
        costs,
        now_ns=now_ns,
        prompt_tokens=request.prompt_tokens,
        objective_s=tbt_objective_s,
    )
    return _reject(request, "tbt", _message("time between tokens", found.tbt_s, tbt_objective_s), wait_s)


def _message(what: str, predicted_s: float, objective_s: float) -> str:
    return f"{what} is predicted to be {predicted_s:.3g} s; the objective is {objective_s:.3g} s"


def _reject(request: RequestArrived, reason: Reason, message: str, wait_s: float) -> Reject:
    return Reject(request.request_id, request.attempt, reason, message, float(max(1, ceil(wait_s))))

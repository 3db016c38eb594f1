"""What becomes of a plan: a Place and its row in the ledger, or a case for hindsight. Plain data is made here."""

from typing import Literal

from conductor.policy.admission import asks_again
from conductor.policy.admission.evaluation import Case
from conductor.policy.algorithm1 import holders
from conductor.policy.credible import to_ns
from conductor.policy.decisions import Place, Reason
from conductor.policy.events import RequestArrived
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.placement_plan import Plan
from conductor.policy.requests import NONE, Claim
from conductor.policy.state import ClusterState

__all__ = ["book", "case_of", "placed_by"]


def placed_by(
    state: ClusterState, request: RequestArrived, plan: Plan, considered: Considered, extrapolated: tuple[str, ...]
) -> Place:
    """The plan as a decision."""
    nodes, scores, decode = plan.places.prefill, plan.scores, plan.decode
    chosen = scores.chosen
    decodes_at = "" if decode is None or nodes.is_aggregated.item(chosen) else decode.node_id
    reserves = state.config.overrun_probability and decodes_at and not request.endless
    return Place(
        request.request_id,
        request.attempt,
        nodes.ids[chosen],
        decodes_at,
        scores.reuse_blocks.item(chosen),
        holders(nodes.pools[chosen], chosen, plan.prefixes, scores.fetches.item(chosen)),
        plan.ttft_s,
        plan.tbt_s,
        plan.seat.turn,
        considered,
        extrapolated,
        asks_again=decode is not None and not request.generated and asks_again(state.config),
        reserve_tokens=plan.places.need_tokens if reserves else 0,
        helpers=plan.group.helpers if plan.group is not None else (),
    )


def book(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    plan: Plan,
    placed: Place,
    objectives: EffectiveObjectives,
    unwanted: Reason | Literal[""],
) -> int:
    """What the placed request takes goes into the ledger; returns its row."""
    nodes, scores, need_tokens = plan.places.prefill, plan.scores, plan.places.need_tokens
    chosen, slot_of, is_endless = scores.chosen, state.nodes.slot, request.endless
    decodes_at = placed.decode or (placed.prefill if nodes.is_aggregated.item(chosen) else "")
    if plan.group is not None:
        state.helping.add(request.request_id, request.attempt, plan.group.helpers, to_ns(plan.group.share_s))
    claim = Claim(
        request.request_id,
        request.attempt,
        request.model,
        request.frontend_id,
        placed.predicted_ttft_s,
        placed.predicted_tbt_s,
        placed.prefill,
        decodes_at,
        tenant=request.tenant,
        objectives=objectives,
        curve=plan.curve,
        max_tokens=request.generated + request.max_new_tokens,
        unwanted=unwanted,
    )
    values = (
        nodes.slots.item(chosen),  # prefill_node
        slot_of(decodes_at) if decodes_at else NONE,  # decode_node
        slot_of(plan.prefixes.best_pool) if scores.fetches.item(chosen) else NONE,  # sender
        to_ns(plan.prefill_s),  # prefill_ns
        NONE,  # started_ns
        now_ns + to_ns(placed.predicted_ttft_s),  # ready_ns
        NONE,  # joined_ns
        need_tokens if decodes_at else 0,  # committed
        need_tokens if is_endless else request.prompt_tokens,  # prompt
        0 if is_endless else request.max_new_tokens,  # max_new
        plan.curve,  # curve
        request.generated,  # generated
        now_ns,  # seen_ns
        now_ns,  # placed_ns
    )
    return state.requests.append(claim, values, plan.seat.numbers)


def case_of(now_ns: int, request: RequestArrived, reason: Reason, plan: Plan, objectives: EffectiveObjectives) -> Case:
    """What a rejected request would have done, for hindsight."""
    return Case(
        model=request.model,
        reason=reason,
        at_ns=now_ns,
        work_ns=to_ns(plan.ready_s - plan.queue_s),
        prefill=plan.places.prefill.ids[plan.chosen],
        decode=plan.decode.node_id if plan.decode is not None else "",
        need_tokens=plan.places.need_tokens,
        prompt_tokens=request.prompt_tokens,
        objectives=objectives,
    )

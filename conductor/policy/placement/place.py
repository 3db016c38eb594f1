"""The steps of a placement in their order: find nodes, plan, judge the plan, book it, begin a copy of a hot prefix.

A planned request ends as a Place with a row in the table of requests, or as a Reject and a case for the admission
evaluation. A preview takes the same steps up to the judgement, and leaves nothing behind.
"""

from dataclasses import dataclass, replace
from typing import Literal

from conductor.policy.admission import Judgement, asks_again, forecast_of, judge
from conductor.policy.admission_evaluation import RejectedCase
from conductor.policy.admission_rule import Forecast
from conductor.policy.costs import ModelCosts, tbt_s
from conductor.policy.decisions import Admissible, Considered, Decision, Place, Reason, Reject
from conductor.policy.events import RequestArrived, to_ns
from conductor.policy.history import JudgedRequest, RefusedRequest
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.placement.candidates import find_candidates
from conductor.policy.placement.colocated import ColocatedOutcome, consider_colocated
from conductor.policy.placement.copying import copy_after
from conductor.policy.placement.plan import PlacementPlan, extrapolated, make_plan, ttft_with_s
from conductor.policy.placement.prefill import holders, replicas_used, without_replicas
from conductor.policy.placement.siblings import consider_sibling
from conductor.policy.queue_position import join_queue, reject_endless
from conductor.policy.requests import NONE, Claim
from conductor.policy.role_plan import arrived, turned_away
from conductor.policy.state import ClusterState, PlacementContext
from jit.fast_dataclass import fast_dataclass

__all__ = [
    "book",
    "case_of",
    "place",
    "placed_by",
    "preview",
]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class _JudgedPlan:
    """The plan of a request, and what admission says of it."""

    context: PlacementContext
    plan: PlacementPlan
    objectives: EffectiveObjectives
    idle_s: tuple[float, float]
    considered: Considered
    colocated: ColocatedOutcome
    extrapolated: tuple[str, ...]
    forecast: Forecast
    judgement: Judgement


def place(now_ns: int, state: ClusterState, request: RequestArrived) -> list[Decision]:
    """Place the request: return a Place or a Reject, and possibly a Copy after a Place."""
    judged = _judged_plan(now_ns, state, request, _withdraw_former(state, request))
    if isinstance(judged, Reject):
        return [_refuse(now_ns, state, request, judged)]
    context, plan, objectives, judgement = judged.context, judged.plan, judged.objectives, judged.judgement
    rejection = judgement.rejection.reason if judgement.rejection is not None else ""
    if request.attempt == 0 and not request.generated:
        state.history.judged(_judged_request(judged), shared_blocks=plan.prefixes.best)
    elif rejection:
        state.history.lost(now_ns, request.request_id, rejection)
    if request.attempt == 0 and not request.endless:
        arrived(now_ns, state, request, plan.scores.best.prefill_s, plan.places.need_tokens)
    if judgement.rejection is not None:
        turned_away(now_ns, state, request)
        state.attainment.lost(request.model, request.tenant, objectives, "rejected")
        state.evaluation.watch(case_of(now_ns, request, judgement.rejection.reason, plan, objectives))
        return [replace(judgement.rejection, considered=judged.considered, extrapolated=judged.extrapolated)]
    if judgement.unwanted:
        state.count(request.model, f"unwanted_{judgement.unwanted}")
    if judged.colocated:
        state.count(request.model, f"undivided_{judged.colocated}")
    placed = placed_by(state, request, plan, judged.considered, judged.extrapolated)
    reused_tokens = placed.reuse_blocks * context.model.block_tokens
    state.history.placed(request.request_id, request.attempt, placed.prefill, placed.decode, reused_tokens)
    state.seen_share.placed_here(now_ns)
    copy = copy_after(context, plan.places.prefill, plan.prefixes, plan.scores)
    row = book(context, plan, placed, objectives, judgement.unwanted)
    join_queue(context, plan.position, row, placed)
    _credit_replica(context, plan)
    if request.session:
        state.sessions_of(request.model).use(request.session, placed.prefill)
    return [placed] if copy is None else [placed, copy]


def preview(now_ns: int, state: ClusterState, request: RequestArrived) -> Admissible | Reject:
    """Judge a first attempt as `place` would now, without placing it, counting it or recording it.

    A Reject that admission only advises (`unwanted`) is none, as for placements.
    """
    judged = _judged_plan(now_ns, state, request, None, is_preview=True)
    if isinstance(judged, Reject):
        return judged
    if judged.judgement.rejection is not None:
        return judged.judgement.rejection
    plan = judged.plan
    return Admissible(request.request_id, plan.scores.best.reuse_blocks, plan.ttft_s, plan.tbt_s)


def _judged_plan(
    now_ns: int, state: ClusterState, request: RequestArrived, former: Claim | None, *, is_preview: bool = False
) -> _JudgedPlan | Reject:
    """Plan and judge the request; return a Reject if no node can serve it whatever the load."""
    places = find_candidates(now_ns, state, request)
    if isinstance(places, Reject):
        return places
    if (refused := reject_endless(state, request)) is not None:
        return refused
    model = state.nodes.model(request.model)
    assert model is not None
    costs = state.costs_of(request.model)
    context = PlacementContext(now_ns, state, request, model, costs, former, is_preview)
    plan = make_plan(context, places)
    idle_s = _idle_s(request, plan, costs)
    objectives = _objectives(state, request, former, idle_s)
    plan = consider_sibling(context, plan, objectives)
    plan, considered, colocated = consider_colocated(context, plan, objectives)
    beyond = extrapolated(context, plan)
    forecast = forecast_of(context, plan, objectives, idle_s[1])
    judgement = judge(context, plan, forecast, objectives)
    return _JudgedPlan(context, plan, objectives, idle_s, considered, colocated, beyond, forecast, judgement)


def _judged_request(judged: _JudgedPlan) -> JudgedRequest:
    """Return the record of a first attempt, for the history of requests."""
    context, judgement = judged.context, judged.judgement
    request, now_ns, is_rejected = context.request, context.now_ns, judgement.rejection is not None
    return JudgedRequest(
        request.request_id,
        now_ns,
        request.model,
        request.tenant,
        request.slo_class,
        request.ttft_objective_s,
        request.tbt_objective_s,
        request.prompt_tokens,
        judged.objectives,
        judged.forecast,
        judged.plan.tbt_s,
        *judged.idle_s,
        rejection=judgement.rejection.reason if judgement.rejection is not None else "",
        unwanted=judgement.unwanted,
        outcome="rejected" if is_rejected else "open",
        ended_ns=now_ns if is_rejected else 0,
        match_key=request.match_key,
        session=request.session,
        parent_session=request.parent_session,
        pause_s=request.pause_s,
        lifetime_s=request.lifetime_s,
    )


def _refuse(now_ns: int, state: ClusterState, request: RequestArrived, rejection: Reject) -> Reject:
    """Return the rejection of a request whose placement was not planned, after recording it."""
    if request.attempt == 0 and not request.generated:
        state.history.refuse(
            RefusedRequest(
                request.request_id,
                now_ns,
                request.model,
                request.tenant,
                request.slo_class,
                request.prompt_tokens,
                rejection.reason,
            )
        )
    return rejection


def _withdraw_former(state: ClusterState, request: RequestArrived) -> Claim | None:
    """Void and return the claim of an earlier attempt, or of the same one repeated."""
    recent = state.recent.pop(request.request_id, None)
    former = recent.claim if recent is not None else None
    stale = state.requests.find(request.request_id)
    if stale is not None:
        former = state.requests.remove(stale)
    if former is not None and former.charge is not None:
        former.charge.cancel()
    return former


def _idle_s(request: RequestArrived, plan: PlacementPlan, costs: ModelCosts) -> tuple[float, float]:
    """Return TTFT without a queue on the best node, reused prefix included, and TBT in a batch of one."""
    return plan.scores.idle_s, tbt_s(*costs.decode, 1, request.seen_tokens, 1)


def _objectives(
    state: ClusterState, request: RequestArrived, former: Claim | None, idle_s: tuple[float, float]
) -> EffectiveObjectives:
    """Return the request's objectives, as set at its first attempt."""
    if request.attempt and former is not None and not former.is_revived:
        return former.objectives
    wanted = state.slo.resolve(request.model, request.tenant, request.slo_class)
    return wanted.effective(request.ttft_objective_s, request.tbt_objective_s, *idle_s)


def _credit_replica(context: PlacementContext, plan: PlacementPlan) -> None:
    """Credit a copied prefix that the request reuses with the time that it would have taken longer without any copy."""
    if not context.request.matches.replicas:
        return
    replicas = replicas_used(context)
    used = replicas.get(plan.places.prefill.pools[plan.chosen])
    if used is not None:
        alone_s = ttft_with_s(context, without_replicas(context, replicas), plan)
        context.state.replication.use(context.now_ns, used, max(0.0, alone_s - plan.scores.ttft_s))


def placed_by(
    state: ClusterState,
    request: RequestArrived,
    plan: PlacementPlan,
    considered: Considered,
    extrapolated: tuple[str, ...],
) -> Place:
    """Return the plan as a decision."""
    nodes, scores, decode = plan.places.prefill, plan.scores, plan.decode
    chosen = scores.chosen
    decodes_at = "" if decode is None or nodes.is_aggregated.item(chosen) else decode.node_id
    reserves = state.config.overrun_probability and decode is not None and not request.endless
    return Place(
        request.request_id,
        request.attempt,
        nodes.ids[chosen],
        decodes_at,
        scores.best.reuse_blocks,
        holders(nodes.pools[chosen], chosen, plan.prefixes, scores.best.fetches),
        plan.ttft_s,
        plan.tbt_s,
        plan.position.turn,
        considered,
        extrapolated,
        asks_again=decode is not None and not request.generated and asks_again(state.config),
        reserve_tokens=plan.places.need_tokens if reserves else 0,
        helpers=plan.group.helpers if plan.group is not None else (),
        local_blocks=scores.best.local_blocks,
        sibling=plan.sibling,
    )


def book(
    context: PlacementContext,
    plan: PlacementPlan,
    placed: Place,
    objectives: EffectiveObjectives,
    unwanted: Reason | Literal[""],
) -> int:
    """Enter the placed request's claims into the table of requests; return its row."""
    now_ns, state, request = context.now_ns, context.state, context.request
    nodes, need_tokens = plan.places.prefill, plan.places.need_tokens
    chosen, slot_of, is_endless = plan.chosen, state.nodes.slot, request.endless
    decodes_at = placed.decode or (placed.prefill if nodes.is_aggregated.item(chosen) else "")
    if plan.group is not None:
        state.group_work.add(request.request_id, request.attempt, plan.group.helpers, to_ns(plan.group.share_s))
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
        slot_of(plan.prefixes.best_pool) if plan.scores.best.fetches else NONE,  # sender
        plan.curve,  # curve
        NONE,  # joined_ns
        now_ns + to_ns(placed.predicted_ttft_s),  # ready_ns
        need_tokens if decodes_at else 0,  # committed
        need_tokens if is_endless else request.prompt_tokens,  # prompt
        0 if is_endless else request.max_new_tokens,  # max_new
        request.generated,  # generated
        to_ns(plan.prefill_s),  # prefill_ns
        NONE,  # started_ns
        now_ns,  # seen_ns
        now_ns,  # placed_ns
    )
    return state.requests.append(claim, (*values, *plan.position.numbers))


def case_of(
    now_ns: int, request: RequestArrived, reason: Reason, plan: PlacementPlan, objectives: EffectiveObjectives
) -> RejectedCase:
    """Return the case of a rejected request for the admission evaluation."""
    return RejectedCase(
        model=request.model,
        reason=reason,
        at_ns=now_ns,
        work_ns=to_ns(plan.ready_s - plan.queue_s),
        prefill=plan.places.prefill.ids[plan.chosen],
        decode=plan.decode.node_id if plan.decode is not None else "",
        need_tokens=plan.places.need_tokens,
        prompt_tokens=request.seen_tokens,
        objectives=objectives,
    )

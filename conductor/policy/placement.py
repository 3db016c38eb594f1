"""Places a request or rejects it: finds nodes, plans, judges the plan, books it, begins a hot-spot copy. The steps of
a placement in their order; how each is done stands elsewhere."""

from dataclasses import replace

from conductor.policy.admission import forecast_of, judge
from conductor.policy.candidates import find_places
from conductor.policy.copying import copy_after
from conductor.policy.costs import ModelCosts, tbt_s
from conductor.policy.decisions import Decision, Reject
from conductor.policy.events import RequestArrived
from conductor.policy.extrapolation import extrapolated
from conductor.policy.nodes import ModelNodes
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.placement_outcome import book, case_of, placed_by
from conductor.policy.placement_plan import Plan, make_plan, ttft_with_s
from conductor.policy.placement_prefixes import replicas_used, without_replicas
from conductor.policy.requests import Claim
from conductor.policy.role_plan import arrived, turned_away
from conductor.policy.seats import endless_refused, sit
from conductor.policy.state import ClusterState
from conductor.policy.undivided import without_handover

__all__ = ["place"]


def place(now_ns: int, state: ClusterState, request: RequestArrived) -> list[Decision]:
    """One Place or Reject, and possibly a Copy after a Place."""
    former = _withdraw_former(state, request)
    places = find_places(now_ns, state, request)
    if isinstance(places, Reject):
        return [places]
    if (refused := endless_refused(state, request)) is not None:
        return [refused]
    model = state.nodes.model(request.model)
    assert model is not None
    costs = state.costs_of(request.model)
    plan = make_plan(now_ns, state, request, places, model, former, costs)
    idle_s = _idle_s(request, plan, costs)
    objectives = _objectives(state, request, former, idle_s)
    plan, considered, undivided = without_handover(now_ns, state, request, model, plan, objectives, costs)
    beyond = extrapolated(
        plan.prefixes,
        plan.scores,
        plan.decode.choice if plan.decode is not None else None,
        request.prompt_tokens,
        model,
        costs,
        state.transfers,
    )
    forecast = forecast_of(state, request, plan)
    judgement = judge(now_ns, state, request, plan, forecast, objectives, costs)
    rejection = judgement.rejection.reason if judgement.rejection is not None else ""
    if request.attempt == 0 and not request.generated:
        state.past.judged(
            now_ns,
            request,
            forecast,
            predicted_tbt_s=plan.tbt_s,
            objectives=objectives,
            idle_s=idle_s,
            shared_blocks=plan.prefixes.best,
            rejection=rejection,
            unwanted=judgement.unwanted,
        )
    elif rejection:
        state.past.lost(now_ns, request.request_id, rejection)
    if request.attempt == 0 and not request.endless:
        prefill_s = plan.scores.seconds.item(1, plan.scores.chosen)
        arrived(now_ns, state, request, prefill_s)
    if judgement.rejection is not None:
        turned_away(now_ns, state, request)
        state.attainment.lost(request.model, request.tenant, objectives, "rejected")
        state.hindsight.watch(case_of(now_ns, request, judgement.rejection.reason, plan, objectives))
        return [replace(judgement.rejection, considered=considered, extrapolated=beyond)]
    if judgement.unwanted:
        state.count(request.model, f"unwanted_{judgement.unwanted}")
    if undivided:
        state.count(request.model, f"undivided_{undivided}")
    placed = placed_by(state, request, plan, considered, beyond)
    reused_tokens = placed.reuse_blocks * model.block_tokens
    state.past.placed(request.request_id, request.attempt, placed.prefill, placed.decode, reused_tokens)
    nodes = plan.places.prefill
    copy = copy_after(now_ns, state, request, nodes, plan.prefixes, plan.scores, plan.chosen, model.block_nbytes)
    row = book(now_ns, state, request, plan, placed, objectives, judgement.unwanted)
    sit(state, plan.seat, row, request, placed, model, costs)
    _credit_replica(now_ns, state, request, model, plan, costs)
    return [placed] if copy is None else [placed, copy]


def _withdraw_former(state: ClusterState, request: RequestArrived) -> Claim | None:
    """What an earlier attempt, or the same one asked again, claimed: that is void."""
    recent = state.recent.pop(request.request_id, None)
    former = recent.claim if recent is not None else None
    stale = state.requests.find(request.request_id)
    if stale is not None:
        former = state.requests.remove(stale)
    if former is not None and former.charge is not None:
        former.charge.cancel()
    return former


def _idle_s(request: RequestArrived, plan: Plan, costs: ModelCosts) -> tuple[float, float]:
    """TTFT and TBT without a queue, at the best node, with what it can reuse; in a batch of its own."""
    ttft_s = float((plan.scores.transfer_s + plan.scores.prefill_s).min())
    return ttft_s, tbt_s(*costs.decode, 1, request.prompt_tokens, 1)


def _objectives(
    state: ClusterState, request: RequestArrived, former: Claim | None, idle_s: tuple[float, float]
) -> EffectiveObjectives:
    """What the request is to meet, as its first attempt was told."""
    if request.attempt and former is not None and not former.is_revived:
        return former.objectives
    wanted = state.slo.resolve(request.model, request.tenant, request.slo_class)
    return wanted.effective(request.ttft_objective_s, request.tbt_objective_s, *idle_s)


def _credit_replica(
    now_ns: int, state: ClusterState, request: RequestArrived, model: ModelNodes, plan: Plan, costs: ModelCosts
) -> None:
    """A copied prefix that the request runs on saved what it would have taken longer without any copy."""
    if not request.matches.replicas:
        return
    replicas = replicas_used(state, request, model)
    used = replicas.get(plan.places.prefill.pools[plan.chosen])
    if used is not None:
        without = without_replicas(state, request, model, replicas)
        alone_s = ttft_with_s(state, request, model, without, plan, costs)
        state.replication.use(now_ns, used, max(0.0, alone_s - plan.scores.ttft_s))

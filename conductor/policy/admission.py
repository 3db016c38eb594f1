"""Admission: rejects a request if its predicted service misses its objectives, and chooses its Retry-After.

docs/admission.md describes the modes. `unmeetable` and `longest_prompts` examine a record of objectives by the
predicted costs of an idle cluster; they omit models without measured costs and without a cost profile.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Final, Literal
from zlib import crc32

from conductor.policy.admission_rule import Forecast, unmet, usable_s
from conductor.policy.costs import DECODE, PREFILL, ModelCosts, prefill_s, tbt_s
from conductor.policy.decisions import Reason, Reject
from conductor.policy.events import DecodeAsked, RequestArrived
from conductor.policy.nodes import ModelNodes, NodeTable
from conductor.policy.objectives import (
    EffectiveObjectives,
    Objective,
    SloClass,
    SloRecord,
    TenantSlo,
    objective_text,
)
from conductor.policy.placement.decode import tbt_now_s, wait_for_tbt_s
from conductor.policy.placement.plan import PlacementPlan
from conductor.policy.requests import NONE
from conductor.policy.shadow_prices import decode_need_s
from conductor.policy.state import ClusterState, PlacementContext
from settings.conductor import AdmissionMode, PolicyConfig

__all__ = [
    "LONGEST_RETRY_S",
    "Judgement",
    "asks_again",
    "forecast_of",
    "judge",
    "judge_after_prefill",
    "longest_prompts",
    "retry_after_s",
    "unmeetable",
]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of admission: a rejection to send, or the reason why enforced admission would have rejected it."""

    rejection: Reject | None = None
    unwanted: Reason | Literal[""] = ""


_ADMITTED: Final = Judgement()
_PRICED: Final = frozenset[AdmissionMode]({"predicted-uniform", "predicted"})  # where expensive requests leave room


def asks_again(config: PolicyConfig) -> bool:
    """Return True if decode load is judged after the prefill instead of before it."""
    return config.admission_mode == "load" and config.admission != "off"


def forecast_of(
    context: PlacementContext, plan: PlacementPlan, objectives: EffectiveObjectives, idle_tbt_s: float
) -> Forecast:
    """Return the inputs of the admission rule for a request, as planned; `idle_tbt_s` is its TBT in a batch of one."""
    state, decode = context.state, plan.decode
    waited_s = max(plan.queue_s, plan.room_wait_s)
    margins = state.tally_of(context.request.model).margins
    ttft_margin, tbt_margin = margins.ttft.share, margins.tbt.share
    if state.config.admission_mode in _PRICED and not context.request.generated:
        ttft_s, tbt_s = usable_s(objectives.ttft_s), usable_s(objectives.tbt_s)
        # The room between the load that it would have on idle nodes and the bound.
        ttft_room = 1 - ttft_margin - (plan.ttft_s - waited_s) / ttft_s if ttft_s else 0.0
        tbt_room = 1 - tbt_margin - idle_tbt_s / tbt_s if tbt_s else 0.0
        fits = min(ttft_room, tbt_room) >= 0  # otherwise it cannot be served well, whatever else is rejected
        if fits and _cost_of(context, plan, ttft_s, tbt_s * (1 - tbt_margin)) > 1:
            ttft_margin += state.config.ttft_reserve * ttft_room
            tbt_margin += state.config.tbt_reserve * tbt_room
    return Forecast(
        plan.ttft_s,
        0.0 if asks_again(state.config) else plan.tbt_s,
        waited_s,
        decode is not None and decode.choice.free_tokens < plan.places.need_tokens,
        ttft_margin,
        tbt_margin,
    )


def _cost_of(context: PlacementContext, plan: PlacementPlan, ttft_s: float, tbt_s: float) -> float:
    """Return what serving the request costs (`shadow_prices`), and count it in the demand.

    Time without a bound `ttft_s` or `tbt_s` is free.
    """
    request, decode, nodes = context.request, plan.decode, plan.places.prefill
    prefill_s, decode_s = plan.scores.best.prefill_s if ttft_s else 0.0, 0.0
    if decode is not None and tbt_s:
        answer_tokens = context.state.lengths.expected(plan.curve, request.max_new_tokens)
        mean_context = request.seen_tokens + answer_tokens / 2
        decode_s = decode_need_s(answer_tokens, mean_context, context.costs.decode, tbt_s)
    if nodes.is_aggregated.item(plan.chosen):
        prefill_s, decode_s = prefill_s + decode_s, 0.0
    prices = context.state.tally_of(request.model).prices
    cost = prices.cost_of(prefill_s, decode_s)
    if not context.is_preview:
        prices.count(context.now_ns, prefill_s, decode_s)
    return cost


def judge(
    context: PlacementContext, plan: PlacementPlan, forecast: Forecast, objectives: EffectiveObjectives
) -> Judgement:
    """Admit or reject an arriving request by the predictions for its plan and its objectives (`admission_rule.unmet`).

    A request whose client has received tokens is never rejected for load.
    """
    request, config = context.request, context.state.config
    if request.generated > 0:
        return _ADMITTED
    refused = None
    if config.admission != "off" and config.admission_mode != "none":
        refused = _refused(context, plan, forecast, objectives)
    if refused is not None and config.admission == "enforce":
        return Judgement(refused)
    if (waited_s := forecast.waited_s) > config.max_queue_s:
        message = f"predicted to wait {waited_s:.1f} s; the limit is {config.max_queue_s:g} s"
        return Judgement(_reject(request, "queue", message, waited_s - config.max_queue_s))
    return _ADMITTED if refused is None else Judgement(unwanted=refused.reason)


def judge_after_prefill(now_ns: int, state: ClusterState, event: DecodeAsked) -> Judgement:
    """Admit or reject a request whose prefill has ended, by the present decode load (the paper's baseline).

    Its first token is withheld until then.
    """
    row = state.requests.find(event.request_id, event.attempt)
    if row is None or not asks_again(state.config):
        return _ADMITTED
    claim, requests = state.requests.claims[row], state.requests
    objective_s = usable_s(claim.objectives.tbt_s)
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
    forecast = Forecast(0.0, tbt_s, 0.0, False, 0.0, state.tally_of(claim.model).margins.tbt.share)
    state.history.judged_late(event.request_id, forecast)
    if not unmet(forecast, 0.0, objective_s):
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


def _refused(
    context: PlacementContext, plan: PlacementPlan, forecast: Forecast, objectives: EffectiveObjectives
) -> Reject | None:
    request = context.request
    ttft_objective_s, tbt_objective_s = usable_s(objectives.ttft_s), usable_s(objectives.tbt_s)
    reason, decode = unmet(forecast, ttft_objective_s, tbt_objective_s), plan.decode
    if reason == "":
        return None
    if reason == "decode_capacity":
        message = f"no decode node has room for {request.prompt_tokens + request.max_new_tokens} tokens of KV"
        return _reject(request, "decode_capacity", message, plan.room_wait_s)
    if reason == "ttft":
        message = _message("time to first token", plan.ttft_s, ttft_objective_s)
        # Waiting can only shorten the queues, not transfer and prefill.
        wait_s = min(plan.ttft_s - ttft_objective_s, max(plan.queue_s, plan.room_wait_s))
        return _reject(request, "ttft", message, wait_s)
    assert decode is not None
    wait_s = wait_for_tbt_s(
        decode.nodes,
        decode.choice.index,
        context.state,
        context.costs,
        now_ns=context.now_ns,
        prompt_tokens=request.seen_tokens,
        objective_s=tbt_objective_s,
    )
    return _reject(request, "tbt", _message("time between tokens", plan.tbt_s, tbt_objective_s), wait_s)


def _message(what: str, predicted_s: float, objective_s: float) -> str:
    return f"{what} is predicted to be {predicted_s:.3g} s; the objective is {objective_s:.3g} s"


def _reject(request: RequestArrived, reason: Reason, message: str, wait_s: float) -> Reject:
    retry_s = retry_after_s(request.request_id, request.attempt, wait_s)
    return Reject(request.request_id, request.attempt, reason, message, retry_s)


LONGEST_RETRY_S: Final = 300.0
_SPREAD: Final = 0.5  # share of the wait over which the retries of requests rejected together are spread


def retry_after_s(request_id: str, attempt: int, wait_s: float) -> float:
    """Return Retry-After in whole seconds, from 1 to LONGEST_RETRY_S and not before the predicted wait ends.

    A hash of the request id and attempt spreads it over another half of the wait, at least 1 s, so that requests that
    were rejected together do not return together.
    """
    soonest = max(1, ceil(min(wait_s, LONGEST_RETRY_S))) if isfinite(wait_s) else int(LONGEST_RETRY_S)
    spread = max(1, ceil(_SPREAD * soonest))
    later = crc32(f"{request_id}/{attempt}".encode()) % (spread + 1)
    return float(min(LONGEST_RETRY_S, soonest + later))


def unmeetable(record: SloRecord, nodes: NodeTable, costs: Mapping[str, ModelCosts]) -> list[str]:
    """Return one message per objective in seconds that is below the minimum of all nodes of a served model."""
    found = []
    for model, at in _served(nodes, costs):
        for place, kind, objective in _absolute(record, model):
            least_s, what = _least(kind, costs[model], at)
            if objective.seconds < least_s:
                found.append(
                    f"{place} is {objective_text(objective)}, and no node of model {model!r} takes less than "
                    f"{least_s * 1e3:.3g} ms for {what}"
                )
    return found


def longest_prompts(record: SloRecord, nodes: NodeTable, costs: Mapping[str, ModelCosts]) -> list[str]:
    """Return one message per TTFT objective in seconds, with the longest prompt for which an idle node meets it."""
    found = []
    for model, at in _served(nodes, costs):
        factor = _least_slowdown(costs[model], PREFILL, at)
        most = int(at.all_prefill.max_model_len.max(initial=0))
        for place, kind, objective in _absolute(record, model):
            if kind == "ttft" and factor:
                longest = _longest_prompt(objective.seconds / factor, costs[model], most)
                found.append(
                    f"{place} is {objective_text(objective)}: an idle node of model {model!r} meets it for up to "
                    f"{longest} prompt tokens without reuse, of at most {most}"
                )
    return found


def _served(nodes: NodeTable, costs: Mapping[str, ModelCosts]) -> Iterator[tuple[str, ModelNodes]]:
    for model in sorted(costs):
        at = nodes.model(model)
        if at is not None:
            yield model, at


def _absolute(record: SloRecord, model: str) -> Iterator[tuple[str, str, Objective]]:
    """Yield (place in the record, kind, objective) of all objectives in seconds that may apply to the model."""
    others: dict[str, SloClass | TenantSlo] = {
        **{f"classes.{name}": one for name, one in sorted(record.classes.items())},
        **{f"tenants.{name}": one for name, one in sorted(record.tenants.items())},
    }
    for kind in ("ttft", "tbt"):
        own = getattr(record.models.get(model), kind, None)
        first = {f"models.{model}": own} if own is not None else {"cluster": getattr(record.cluster, kind)}
        for place, objective in (first | {place: getattr(one, kind) for place, one in others.items()}).items():
            if objective is not None and objective.seconds:
                yield f"{place}.{kind}", kind, objective


def _least(kind: str, costs: ModelCosts, at: ModelNodes) -> tuple[float, str]:
    """Return the minimum in seconds, and the work that it is for; 0 s while nothing was measured."""
    if kind == "ttft":
        return prefill_s(*costs.prefill, 1, 0) * _least_slowdown(costs, PREFILL, at), "even a prompt of one new token"
    return tbt_s(*costs.decode, 1, 1, 1) * _least_slowdown(costs, DECODE, at), "even a batch of one"


def _least_slowdown(costs: ModelCosts, kind: int, at: ModelNodes) -> float:
    """Return the smallest slowdown factor of the model's nodes; 0 while nothing was measured."""
    most, candidates = (costs.prefill_most, at.all_prefill) if kind == PREFILL else (costs.decode_most, at.all_decode)
    if not most[0]:
        return 0.0
    slots = candidates.slots if len(candidates) else at.all_prefill.slots
    return float(costs.slowdowns.factors[kind, slots].min(initial=1.0))


def _longest_prompt(seconds: float, costs: ModelCosts, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if prefill_s(*costs.prefill, middle, 0) <= seconds else (low, middle - 1)
    return low

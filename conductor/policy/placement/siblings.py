"""Reuse of the KV that a model tuned from the same base computed for the prompt (DroidSpeak: Liu et al. 2024, §4).

It is weighed for the chosen prefill node only, and only what the model's own KV does not cover counts. Its profile's
points trade work for quality: the best one is taken with which the first token is predicted to come within its
objective, or the cheapest if there is none. Without an objective, the best one is taken that saves time.
"""

from dataclasses import dataclass, replace
from typing import Final

from conductor.policy.decisions import SiblingChoice
from conductor.policy.events import SiblingMatch, SiblingPoint
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.placement.plan import PlacementPlan
from conductor.policy.placement.prefill import PrefillScores, most_reused
from conductor.policy.state import PlacementContext
from jit.fast_dataclass import fast_dataclass

__all__ = ["consider_sibling"]

_GAIN: Final = 0.1  # of the TTFT; a smaller gain is within the error of predictions, and costs quality


@fast_dataclass
@dataclass(frozen=True, slots=True)
class _Prediction:
    choice: SiblingChoice
    transfer_s: float
    prefill_s: float

    @property
    def busy_s(self) -> float:
        return self.transfer_s + self.prefill_s


def consider_sibling(context: PlacementContext, plan: PlacementPlan, objectives: EffectiveObjectives) -> PlacementPlan:
    """Return the plan with a sibling's KV, if that makes its first token come sooner; otherwise the plan itself."""
    request = context.request
    if not request.siblings or request.window_tokens:
        return plan
    alone_s = plan.ready_s - plan.queue_s
    found = [_predict(context, plan, sibling, point) for sibling in request.siblings for point in sibling.points]
    gaining = sorted(
        (each for each in found if each is not None and each.busy_s <= (1 - _GAIN) * alone_s),
        key=lambda each: (each.choice.quality_loss, each.busy_s),
    )
    if not gaining:
        return plan
    wait_s = plan.ttft_s - alone_s  # for its turn and for decode pages
    in_time = (each for each in gaining if not objectives.ttft_s or wait_s + each.busy_s <= objectives.ttft_s)
    return _with(plan, next(in_time, min(gaining, key=lambda each: each.busy_s)))


def _predict(
    context: PlacementContext, plan: PlacementPlan, sibling: SiblingMatch, point: SiblingPoint
) -> _Prediction | None:
    """Return what is predicted with this point; None if it covers nothing that the model's own KV does not."""
    request, model, costs, transfers = context.request, context.model, context.costs, context.state.transfers
    answering = [sibling.pool, *([point.input_pool] if point.first_layer else [])]
    if any(pool in request.excluded or not context.state.answers(pool) for pool in answering):
        return None
    own, slot = plan.scores.best.reuse_blocks, plan.places.prefill.slots.item(plan.chosen)
    end = min(sibling.blocks, most_reused(context))
    if point.first_layer:
        end = min(end, point.input_blocks)
    if end <= own:
        return None
    own_tokens, end_tokens = own * model.block_tokens, end * model.block_tokens
    share_s = point.cost * costs.prefill_cost_s(end_tokens - own_tokens, own_tokens, slot)
    rest_s = costs.prefill_cost_s(request.prompt_tokens - end_tokens, end_tokens, slot)
    nbytes = model.read_nbytes(end - own) + (end_tokens - own_tokens) * point.input_nbytes
    # Before fetches were measured, they count as loads: a guess that is too slow would never be corrected.
    is_loaded = plan.places.prefill.pools[plan.chosen] == sibling.pool or not transfers.is_calibrated("fetch")
    moved_s = transfers.load_s(nbytes) if is_loaded else transfers.fetch_s(nbytes, 0)
    choice = SiblingChoice(
        sibling.sender,
        point.first_layer,
        point.last_layer,
        end,
        sibling.pool,
        point.input_pool if point.first_layer else "",
        point.quality_loss,
    )
    return _Prediction(choice, plan.scores.best.transfer_s + moved_s, share_s + rest_s)


def _with(plan: PlacementPlan, found: _Prediction) -> PlacementPlan:
    """Return the plan with the chosen node's times replaced; the node computes the prompt without helpers."""
    scores, chosen = plan.scores, plan.chosen
    candidates = scores.candidates.copy()
    candidates["transfer_s"][chosen], candidates["prefill_s"][chosen] = found.transfer_s, found.prefill_s
    ttft_s = scores.queue_s.item(chosen) + found.busy_s
    changed = PrefillScores.of(candidates, chosen, ttft_s, min(scores.idle_s, found.busy_s))
    waits_s = plan.ttft_s - plan.ready_s
    return replace(plan, scores=changed, group=None, ttft_s=ttft_s + waits_s, sibling=found.choice)

"""Colocated prefill: computing a prompt on the decode node itself, where that is faster and breaks no TBT objective.

It is a second plan beside the disaggregated one, for the `_FEW` decode nodes with the least TTFT. Few prefills wait
there and no KV is handed over, but while the prompt is computed each step lasts as long as a chunk and a decode step
together. The first of these nodes is taken that meets both conditions:

- TTFT is shorter by at least `_GAIN` of the other plan's, and the node has the pages now;
- the longer steps stay within the tightest TBT objective, less admission's margin, of the requests on the node and of
  the request itself; without any objective, within `_MOST_STEPS` usual steps. A node without requests meets it.
"""

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final, Literal, get_args

import numpy as np

from conductor.policy.admission import asks_again
from conductor.policy.decisions import ColocatedScore, Considered, WhyNot
from conductor.policy.events import NS, to_ns
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.placement.candidates import FittingNodes
from conductor.policy.placement.decode import DecodeChoice, peak_tokens, tbt_each_s
from conductor.policy.placement.plan import DecodePlan, PlacementPlan, considered_in
from conductor.policy.placement.prefill import PrefillScores, Prefixes, find_prefixes, score_candidates
from conductor.policy.state import ClusterState, PlacementContext
from jit.fast_dataclass import fast_dataclass

__all__ = ["COLOCATED_OUTCOMES", "consider_colocated"]

ColocatedOutcome = WhyNot | Literal["done", "advised"]
COLOCATED_OUTCOMES: Final[tuple[str, ...]] = ("done", "advised", *filter(None, get_args(WhyNot)))

_GAIN: Final = 0.1  # of the TTFT; a smaller gain is within the error of predictions
_FEW: Final = 4
_MOST_STEPS: Final = 4.0  # longest step with a chunk, in usual steps


def consider_colocated(
    context: PlacementContext, plan: PlacementPlan, objectives: EffectiveObjectives
) -> tuple[PlacementPlan, Considered, ColocatedOutcome]:
    """Return the plan to follow, what both were judged by, and the outcome; "" if there is nothing to weigh."""
    state, request = context.state, context.request
    considered = considered_in(context, plan, objectives)
    if state.config.colocated_prefill == "off" or asks_again(state.config):
        return plan, considered, ""
    decode = plan.decode
    if decode is None or plan.places.prefill.is_aggregated[plan.chosen]:
        return plan, considered, ""
    most = peak_tokens(request.prompt_tokens, request.max_new_tokens, context.model.block_tokens)
    need_tokens = request.most_held(most)
    found = _best(context, plan, decode, need_tokens, objectives)
    if found is None:
        score = ColocatedScore(decode.node_id, 0.0, 0.0, 0.0, plan.ttft_s, why_not="no_room")
        return plan, _told(state, considered, score), "no_room"
    score, here, scored = found
    considered = _told(state, considered, score)
    if score.why_not:
        return plan, considered, score.why_not
    if state.config.colocated_prefill == "advise":
        return plan, considered, "advised"
    tbt_s = here.choice.tbt_s
    colocated = _alone(plan, score, here, scored, need_tokens)
    considered = replace(considered, ttft_s=colocated.ttft_s, tbt_s=tbt_s, room_wait_s=0.0, need_tokens=need_tokens)
    return colocated, considered, "done"


@fast_dataclass
@dataclass(frozen=True, slots=True)
class _Scored:
    """Predictions for the decode nodes as prefill candidates."""

    prefixes: Prefixes
    scores: PrefillScores


def _alone(
    plan: PlacementPlan, score: ColocatedScore, here: DecodePlan, scored: _Scored, need_tokens: int
) -> PlacementPlan:
    """The plan whose only candidate is the one node, which does both."""
    index = here.choice.index
    node = replace(here.nodes.only(index), is_aggregated=np.ones(1, bool), has_aggregated=True, kept={})
    ttft_s = score.transfer_s + score.queue_s + score.prefill_s
    candidate = scored.scores.candidates[index : index + 1].copy()
    candidate["prefill_s"] = score.prefill_s  # with the steps beside it, during which the node is busy
    return PlacementPlan(
        FittingNodes(node, node, need_tokens),
        plan.curve,
        plan.loads,
        plan.position,
        replace(scored.prefixes, candidates=candidate),
        PrefillScores.of(candidate, 0, ttft_s, score.transfer_s + score.prefill_s),
        DecodePlan(node, replace(here.choice, index=0), 0.0),
        None,
        ttft_s,
    )


def _told(state: ClusterState, considered: Considered, score: ColocatedScore) -> Considered:
    return replace(considered, colocated=score) if state.config.explain else considered


def _best(
    context: PlacementContext,
    plan: PlacementPlan,
    decode: DecodePlan,
    need_tokens: int,
    objectives: EffectiveObjectives,
) -> tuple[ColocatedScore, DecodePlan, _Scored] | None:
    """Choose among the few decode nodes with room whose first token would come soonest.

    The first whose requests are not delayed too much is chosen, else the soonest; ties go to the lower time between
    tokens. Returns None if none has room.
    """
    nodes, loads, now_ns = decode.nodes, plan.loads, context.now_ns
    free = nodes.capacity_tokens - loads["committed"][nodes.slots]
    prefixes = find_prefixes(context, context.request.matches, nodes, loads)
    scores = score_candidates(context, prefixes, loads["queued_ns"][nodes.slots] / NS)
    ttft_s = np.where(free >= need_tokens, scores.transfer_s + scores.queue_s + scores.prefill_s, inf)
    if not ttft_s.min() < inf:
        return None
    beside_s = tbt_each_s(context, nodes, loads, at_ns=now_ns + to_ns(plan.ready_s))
    best: tuple[ColocatedScore, int] | None = None
    for index in np.argsort(ttft_s + beside_s[0], kind="stable")[:_FEW].tolist():
        if not ttft_s[index] < inf:
            break
        decode_s = float(beside_s[:, index].max())
        score = _judged(context, plan, nodes.ids[index], scores.candidates[index], decode_s, objectives)
        if best is None or score.is_better:
            best = score, index
        if score.is_better or score.why_not == "not_sooner":
            break
    assert best is not None
    score, index = best
    choice = DecodeChoice(
        index, float(beside_s[0, index]), int(free[index]), decode.choice.is_covered, decode.choice.scores
    )
    return score, DecodePlan(nodes, choice, 0.0), _Scored(prefixes, scores)


def _judged(
    context: PlacementContext,
    plan: PlacementPlan,
    node_id: str,
    candidate: np.void,
    decode_s: float,
    objectives: EffectiveObjectives,
) -> ColocatedScore:
    """Score the PREFILL_CANDIDATE, on which a step with the request in its batch takes `decode_s`."""
    state, request = context.state, context.request
    transfer_s, queue_s, prefill_s = (candidate[name].item() for name in ("transfer_s", "queue_s", "prefill_s"))
    most_s = (1 - _GAIN) * plan.ttft_s
    if transfer_s + queue_s + prefill_s > most_s:
        return ColocatedScore(node_id, transfer_s, queue_s, prefill_s, plan.ttft_s, why_not="not_sooner")
    node, slot = state.nodes.get(node_id), candidate["slot"].item()
    assert node is not None
    new_tokens = request.prompt_tokens - candidate["reuse_blocks"].item() * context.model.block_tokens
    chunk_tokens = node.chunk_tokens or new_tokens
    if queue_s and not node.chunk_tokens:  # how many of its tokens one step takes is unknown
        return ColocatedScore(node_id, transfer_s, queue_s, prefill_s, plan.ttft_s, why_not="unknown_chunks")
    if not plan.loads["committed"][slot]:  # no request has pages there
        return ColocatedScore(node_id, transfer_s, queue_s, prefill_s, plan.ttft_s, is_better=True)
    prefill_s += ceil(new_tokens / chunk_tokens) * decode_s
    if transfer_s + queue_s + prefill_s > most_s:
        return ColocatedScore(node_id, transfer_s, queue_s, prefill_s, plan.ttft_s, why_not="not_sooner")
    # The last chunk attends to the most tokens. Prompts that wait there share the chunks with this one.
    chunk = min(chunk_tokens, request.prompt_tokens) if queue_s else min(chunk_tokens, new_tokens)
    step_s = decode_s + context.costs.prefill_cost_s(chunk, max(0, request.seen_tokens - chunk), slot)
    here = np.flatnonzero(state.requests.column("decode_node") == slot).tolist()
    wanted = [state.requests.claims[row].objectives.tbt_s for row in here]
    tightest_s = min((bound for bound in (*wanted, objectives.tbt_s) if 0 < bound < inf), default=0.0)
    kept = 1 - state.tally_of(request.model).margins.tbt.share
    bound_s = kept * tightest_s if tightest_s else _MOST_STEPS * decode_s
    is_better = step_s <= bound_s
    why_not: WhyNot = "" if is_better else "slows_others"
    return ColocatedScore(
        node_id, transfer_s, queue_s, prefill_s, plan.ttft_s, step_s, bound_s, is_better=is_better, why_not=why_not
    )

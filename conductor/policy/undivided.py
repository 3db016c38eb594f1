"""Do not disaggregate this one: a prefill on the decode node itself, where it is faster and breaks nobody's TBT.

A second plan beside the usual one, for the decode node that was chosen: few prefills wait there, and nothing is handed
over; but every step there is as long as a chunk and a decode step together while the prompt is computed. Taken when

- its first token comes sooner by `_GAIN` of the other plan's time at least, and the node has the pages now;
- and those steps stay within the tightest objective for TBT, less the margin that admission keeps, of all who have
  their place there and of the request itself; without any objective, within `_MOST_STEPS` usual steps. Where nobody has
  a place, nobody is disturbed.

Costs a few array operations where it is on, none where it is off.
"""

from bisect import bisect_left
from dataclasses import replace
from math import ceil, inf
from typing import Final, Literal, get_args

import numpy as np

from conductor.policy.admission import asks_again
from conductor.policy.algorithm1 import PrefillScores, Prefixes, score_prefill
from conductor.policy.candidates import Places
from conductor.policy.config import NS
from conductor.policy.costs import ModelCosts
from conductor.policy.decisions import Considered, UndividedScore, WhyNot
from conductor.policy.decode_choice import peak_tokens, tbt_now_s
from conductor.policy.events import RequestArrived
from conductor.policy.nodes import Candidates, ModelNodes
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.placement_outcome import considered_in
from conductor.policy.placement_plan import DecodePlan, Plan
from conductor.policy.requests import NONE
from conductor.policy.state import ClusterState

__all__ = ["UNDIVIDED_OUTCOMES", "without_handover"]

Outcome = WhyNot | Literal["done", "advised"]
UNDIVIDED_OUTCOMES: Final[tuple[str, ...]] = ("done", "advised", *filter(None, get_args(WhyNot)))

_GAIN: Final = 0.1  # of the TTFT: predictions differ by less than they err
_MOST_STEPS: Final = 4.0  # that a step beside a chunk may take, in usual steps


def without_handover(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    model: ModelNodes,
    plan: Plan,
    objectives: EffectiveObjectives,
    costs: ModelCosts,
) -> tuple[Plan, Considered, Outcome]:
    """The plan to follow, what both were judged by, and what came of it; "" where there is nothing to weigh."""
    considered = considered_in(state, plan, objectives)
    if state.config.undivided == "off" or asks_again(state.config):
        return plan, considered, ""
    decode = plan.decode
    if decode is None or plan.places.prefill.is_aggregated[plan.chosen]:
        return plan, considered, ""
    need_tokens = peak_tokens(request.prompt_tokens, request.max_new_tokens, model.block_tokens)
    if decode.choice.free_tokens < need_tokens:
        score = UndividedScore(decode.node_id, 0.0, 0.0, 0.0, plan.ttft_s, why_not="no_room")
        return plan, _told(state, considered, score), "no_room"
    prefixes = _prefixes(request, model, plan, decode)
    queue_s = int(plan.sums[decode.nodes.slots[decode.choice.index], 0]) / NS
    scores = _scores(state, request, model, decode, prefixes, queue_s, costs)
    score = _judged(now_ns, state, request, model, plan, decode, scores, objectives, costs)
    considered = _told(state, considered, score)
    if score.why_not:
        return plan, considered, score.why_not
    if state.config.undivided == "advise":
        return plan, considered, "advised"
    scores.seconds[1, 0] = score.prefill_s  # with the steps beside it: for so long the node is taken
    ttft_s = score.transfer_s + score.queue_s + score.prefill_s
    scores = replace(scores, ttft_s=ttft_s)
    alone = _alone(decode)
    places = Places(alone, alone, need_tokens)
    here = DecodePlan(alone, replace(decode.choice, index=0), 0.0)
    undivided = Plan(places, plan.curve, plan.sums, plan.seat, prefixes, scores, here, None, ttft_s)
    return undivided, replace(considered, ttft_s=ttft_s, room_wait_s=0.0, need_tokens=need_tokens), "done"


def _told(state: ClusterState, considered: Considered, score: UndividedScore) -> Considered:
    return replace(considered, undivided=score) if state.config.explain else considered


def _prefixes(request: RequestArrived, model: ModelNodes, plan: Plan, decode: DecodePlan) -> Prefixes:
    """What its host's pool node holds, beside the best one."""
    index = decode.choice.index
    pool, matches, own = decode.nodes.pools[index], request.matches, np.zeros((2, 1), np.int64)
    at = bisect_left(matches.roster, pool)
    if (
        at < len(matches.roster)
        and matches.roster[at] == pool
        and decode.nodes.pool_slots[index] >= 0
        and pool not in request.excluded
    ):
        limit = (request.prompt_tokens - 1) // model.block_tokens
        have = min(int(matches.blocks[at]), limit)
        own[:, 0] = have, min(int(matches.ssd_blocks[at]), have)
    return replace(plan.prefixes, held=own)


def _scores(
    state: ClusterState,
    request: RequestArrived,
    model: ModelNodes,
    decode: DecodePlan,
    prefixes: Prefixes,
    queue_s: float,
    costs: ModelCosts,
) -> PrefillScores:
    """Of the one candidate, as if nobody decoded there."""
    index = decode.choice.index
    return score_prefill(
        prefixes,
        np.array([queue_s]),
        prompt_tokens=request.prompt_tokens,
        block_tokens=model.block_tokens,
        block_nbytes=model.block_nbytes,
        balancing_threshold=state.config.balancing_threshold,
        slots=decode.nodes.slots[index : index + 1],
        costs=costs,
        transfers=state.transfers,
    )


def _judged(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    model: ModelNodes,
    plan: Plan,
    decode: DecodePlan,
    scores: PrefillScores,
    objectives: EffectiveObjectives,
    costs: ModelCosts,
) -> UndividedScore:
    transfer_s, prefill_s = scores.seconds[:, 0].tolist()
    queue_s = float(scores.queue_s[0])
    score = UndividedScore(decode.node_id, transfer_s, queue_s, prefill_s, plan.ttft_s)
    most_s = (1 - _GAIN) * plan.ttft_s
    if scores.ttft_s > most_s:
        return replace(score, why_not="not_sooner")
    node, slot = state.nodes.get(decode.node_id), int(decode.nodes.slots[decode.choice.index])
    assert node is not None
    new_tokens = request.prompt_tokens - int(scores.reuse_blocks[0]) * model.block_tokens
    chunk_tokens = node.chunk_tokens or new_tokens
    if queue_s and not node.chunk_tokens:
        return replace(score, why_not="unknown_chunks")  # how much of those goes into one step
    here = np.flatnonzero(state.requests.column("decode_node") == slot)
    decode_s = 0.0
    if len(here):
        now_s = tbt_now_s(decode.nodes, decode.choice.index, state, costs, now_ns, NONE)
        decode_s = max(decode.choice.tbt_s, now_s)
    prefill_s += ceil(new_tokens / chunk_tokens) * decode_s
    score = replace(score, prefill_s=prefill_s)
    if transfer_s + queue_s + prefill_s > most_s:
        return replace(score, why_not="not_sooner")
    if not len(here):
        return replace(score, is_better=True)
    # The last chunk attends to the most. Prompts that wait there share the chunks with this one.
    chunk = min(chunk_tokens, request.prompt_tokens) if queue_s else min(chunk_tokens, new_tokens)
    step_s = decode_s + costs.prefill_cost_s(chunk, request.prompt_tokens - chunk, slot)
    wanted = [state.requests.claims[row].objectives.tbt_s for row in here.tolist()]
    tightest_s = min((bound for bound in (*wanted, objectives.tbt_s) if 0 < bound < inf), default=0.0)
    kept = 1 - state.tally_of(request.model).margins.tbt.share
    bound_s = kept * tightest_s if tightest_s else _MOST_STEPS * decode_s
    score = replace(score, step_s=step_s, bound_s=bound_s)
    return replace(score, is_better=True) if step_s <= bound_s else replace(score, why_not="slows_others")


def _alone(decode: DecodePlan) -> Candidates:
    """The decode node as one that does both."""
    nodes, index = decode.nodes, decode.choice.index
    one = slice(index, index + 1)
    return Candidates.of(
        nodes.ids[one],
        nodes.pools[one],
        nodes.slots[one],
        nodes.capacity_tokens[one],
        nodes.max_model_len[one],
        nodes.max_batch[one],
        np.ones(1, bool),
        nodes.pool_slots[one],
    )

"""The plan of a placement: where a request would run, and what is predicted of it there.

Algorithm 1 chooses the prefill node, the predicted TBT the decode node. Nothing is judged or booked here, except that
the request takes its ticket.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from conductor.policy.decisions import NOTHING_CONSIDERED, Considered, SiblingChoice
from conductor.policy.events import PoolMatches, to_ns
from conductor.policy.lengths import ENDLESS
from conductor.policy.nodes import Candidates
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.placement.affinity import choose_among_near
from conductor.policy.placement.candidates import FittingNodes
from conductor.policy.placement.decode import DecodeChoice, choose_decode, peak_tokens, wait_for_room_s
from conductor.policy.placement.grouping import PrefillGroupPlan, form_group, work_at_hand_s
from conductor.policy.placement.prefill import (
    PrefillScores,
    Prefixes,
    choose_prefill,
    find_prefixes,
    score_candidates,
)
from conductor.policy.queue_position import QueuePosition
from conductor.policy.requests import NONE
from conductor.policy.state import PlacementContext
from jit.fast_dataclass import fast_dataclass

__all__ = [
    "DecodePlan",
    "PlacementPlan",
    "considered_in",
    "extrapolated",
    "make_plan",
    "ttft_with_s",
]

Floats = NDArray[np.float64]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Where the request decodes: the node of `nodes` at `choice.index`."""

    nodes: Candidates
    choice: DecodeChoice
    wait_s: float  # predicted, until its pages are free

    @property
    def node_id(self) -> str:
        return self.nodes.ids[self.choice.index]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Where a request would run. `decode` is None if it ends with its first token, on a prefill node."""

    places: FittingNodes
    curve: int  # of its answer's length
    loads: NDArray[np.void]  # NODE_LOAD [slots], without this request
    position: QueuePosition
    prefixes: Prefixes
    scores: PrefillScores
    decode: DecodePlan | None
    group: PrefillGroupPlan | None  # helpers of the chosen node
    ttft_s: float  # with the wait for decode pages
    sibling: SiblingChoice | None = None  # whose KV is reused after the model's own

    @property
    def chosen(self) -> int:
        """The prefill candidate."""
        return self.scores.chosen

    @property
    def queue_s(self) -> float:
        """Part of the TTFT spent in the queue, in seconds."""
        return self.scores.best.queue_s

    @property
    def prefill_s(self) -> float:
        """Seconds for which the chosen node is busy with it."""
        return self.scores.best.prefill_s if self.group is None else self.group.prefill_s

    @property
    def ready_s(self) -> float:
        """TTFT without the wait for decode pages."""
        return self.scores.ttft_s if self.group is None else self.group.ttft_s

    @property
    def tbt_s(self) -> float:
        """0 without a decode."""
        return self.decode.choice.tbt_s if self.decode is not None else 0.0

    @property
    def room_wait_s(self) -> float:
        """Seconds until the decode node has the pages; 0 without a decode."""
        return self.decode.wait_s if self.decode is not None else 0.0


def make_plan(context: PlacementContext, places: FittingNodes) -> PlacementPlan:
    """Plan the request, which takes its ticket (`choose_prefill`)."""
    state, config = context.state, context.state.config
    curve, places = _expect(context, places)
    found = choose_prefill(context, places.prefill)
    loads, prefixes, scores = found.loads, found.prefixes, found.scores
    group_s: Floats | None = None
    if places.prefill.has_aggregated or state.group_work:
        queue_s = _queue_s(context, places, loads, scores.queue_s)
        # Members of a prefill group compute their part before they take up anything new.
        group_s = state.group_work.load_s(context.now_ns, state.nodes, state.requests) if state.group_work else None
        if group_s is not None:
            queue_s += group_s[places.prefill.slots]
        scores = score_candidates(context, prefixes, queue_s)
    if config.placement == "moonpool":
        scores = choose_among_near(context, places.prefill, scores)
    group: PrefillGroupPlan | None = None
    if config.prefill_group_size > 1:
        group = form_group(context, places, scores, work_at_hand_s(places, loads, group_s))
    ttft_s = scores.ttft_s if group is None else group.ttft_s
    decode = _plan_decode(context, places, loads, scores, ttft_s)
    if decode is not None:
        # Prefill begins only once the decode node has the pages.
        ttft_s += max(0.0, decode.wait_s - scores.best.queue_s)
    return PlacementPlan(places, curve, loads, found.position, prefixes, scores, decode, group, ttft_s)


def considered_in(context: PlacementContext, plan: PlacementPlan, objectives: EffectiveObjectives) -> Considered:
    """Return the best candidates and the predictions, if the policy explains its decisions."""
    count = context.state.config.explain
    if not count:
        return NOTHING_CONSIDERED
    places, decode = plan.places, plan.decode
    return Considered(
        prefill=plan.scores.explain(places.prefill.ids, count),
        num_prefill=len(places.prefill),
        decode=() if decode is None else decode.choice.scores,
        num_decode=0 if decode is None else len(decode.nodes),
        ttft_s=plan.ttft_s,
        tbt_s=plan.tbt_s,
        room_wait_s=plan.room_wait_s,
        need_tokens=0 if decode is None else places.need_tokens,
        ttft_objective_s=objectives.ttft_s,
        tbt_objective_s=objectives.tbt_s,
        ttft_from=objectives.ttft_from,
        tbt_from=objectives.tbt_from,
    )


def ttft_with_s(context: PlacementContext, matches: PoolMatches, plan: PlacementPlan) -> float:
    """Return the TTFT, without a wait for decode pages, as if the pool nodes had held `matches`."""
    prefixes = find_prefixes(context, matches, plan.places.prefill, plan.loads)
    return score_candidates(context, prefixes, plan.scores.queue_s).ttft_s


def _expect(context: PlacementContext, places: FittingNodes) -> tuple[int, FittingNodes]:
    """Return the curve of the answer's length, and the places with the pages to reserve.

    Those are the most that the answer may take, or what answers like it exceed with the configured probability.
    """
    state, request = context.state, context.request
    if request.endless:
        return ENDLESS, places
    prompt_tokens = request.prompt_tokens - request.generated
    curve = state.lengths.curve_of(
        context.now_ns, request.model, request.tenant, prompt_tokens, request.previous_tokens
    )
    overrun = state.config.overrun_probability
    if overrun:
        usual = state.lengths.quantile(curve, overrun, request.generated, request.max_new_tokens)
        # The client's expectation only raises what is reserved, and charged: none can gain by a false one.
        usual = max(usual, min(request.expected_tokens - request.generated, request.max_new_tokens))
        places = replace(places, need_tokens=peak_tokens(request.prompt_tokens, usual, context.model.block_tokens))
    return curve, places


def _queue_s(context: PlacementContext, places: FittingNodes, loads: NDArray[np.void], before_s: Floats) -> Floats:
    """Return seconds until the request's turn per candidate; `before_s`: those of the prefills that precede it."""
    nodes, queue_s = places.prefill, before_s.copy()
    if nodes.has_aggregated:
        # There the prefill itself waits for the pages that the whole request needs.
        committed = loads["committed"][nodes.slots]
        missing = np.where(nodes.is_aggregated, committed + places.need_tokens - nodes.capacity_tokens, 0)
        for i in np.flatnonzero(missing > 0).tolist():
            queue_s[i] = max(queue_s[i], _room_wait_s(context, nodes, i, int(missing[i])))
    return queue_s


def _room_wait_s(context: PlacementContext, nodes: Candidates, index: int, missing_tokens: int) -> float:
    if missing_tokens > 0 and _yielding_tokens(context, nodes, index) >= missing_tokens:
        return 0.0
    return wait_for_room_s(
        nodes, index, context.state, context.costs, now_ns=context.now_ns, missing_tokens=missing_tokens
    )


def _yielding_tokens(context: PlacementContext, nodes: Candidates, index: int) -> int:
    """Return the tokens of pages that running answers of the candidate give up for the request (`preemption`)."""
    state, request = context.state, context.request
    node = state.nodes.get(nodes.ids[index])
    if node is None or not node.preempts:
        return 0
    rows = state.requests.records
    level = state.slo.resolve(request.model, request.tenant, request.slo_class).priority
    yields = (rows["decode_node"] == nodes.slots[index]) & (rows["joined_ns"] != NONE) & (rows["curve"] != ENDLESS)
    yields &= (rows["level"] > level) & (rows["ages_ns"] > context.now_ns)
    return int(rows["committed"][yields].sum())


def _plan_decode(
    context: PlacementContext, places: FittingNodes, loads: NDArray[np.void], scores: PrefillScores, ttft_s: float
) -> DecodePlan | None:
    nodes = places.decode
    if places.prefill.is_aggregated.item(scores.chosen):
        nodes = places.prefill.only(scores.chosen)
    elif context.request.max_new_tokens <= 1:
        return None
    choice = choose_decode(context, nodes, loads, at_ns=context.now_ns + to_ns(ttft_s), need_tokens=places.need_tokens)
    missing = places.need_tokens - choice.free_tokens
    return DecodePlan(nodes, choice, _room_wait_s(context, nodes, choice.index, missing))


def extrapolated(context: PlacementContext, plan: PlacementPlan) -> tuple[str, ...]:
    """Return which of "prefill", "decode", "load", "fetch" and "ssd_read" are predicted beyond what was measured."""
    request, model, transfers, found = context.request, context.model, context.state.transfers, []
    best = plan.scores.best
    reuse = best.reuse_blocks
    seen = request.seen_tokens
    if not context.costs.covers_prefill(seen - reuse * model.block_tokens, seen):
        found.append("prefill")
    if plan.decode is not None and not plan.decode.choice.is_covered:
        found.append("decode")
    if reuse:
        loaded = max(0, best.own_blocks - best.local_blocks)
        missing = reuse - max(best.own_blocks, best.local_blocks)
        on_ssd = best.own_ssd_blocks + min(missing, plan.prefixes.best_ssd)
        if loaded and not transfers.covers("load", model.read_nbytes(loaded)):
            found.append("load")
        if missing and not transfers.covers("fetch", model.read_nbytes(missing)):
            found.append("fetch")
        if on_ssd and not transfers.covers("ssd_read", model.read_nbytes(on_ssd)):
            found.append("ssd_read")
    return tuple(found)

"""Where a request would run, and what is predicted of it there: Algorithm 1 for the prefill, predicted TBT for the
decode. Nothing is judged or booked here, but that the request takes its ticket.

Which of a decision's predictions lie beyond what was measured. They are lengthened where they are made.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from conductor.policy.costs import ModelCosts, TransferCosts
from conductor.policy.decisions import NOTHING_CONSIDERED, Considered
from conductor.policy.event_bounds import to_ns
from conductor.policy.events import PoolMatches, RequestArrived
from conductor.policy.fast_dataclass import fast_dataclass
from conductor.policy.lengths import ENDLESS
from conductor.policy.nodes import Candidates, ModelNodes
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.placement.candidates import FittingNodes
from conductor.policy.placement.decode import DecodeChoice, choose_decode, peak_tokens, wait_for_room_s
from conductor.policy.placement.grouping import PrefillGroup, form_group, work_at_hand_s
from conductor.policy.placement.prefill import PrefillScores, Prefixes, find_prefixes, reach, score_candidates
from conductor.policy.queue_position import QueuePosition
from conductor.policy.requests import Claim
from conductor.policy.state import ClusterState

__all__ = [
    "DecodePlan",
    "Plan",
    "considered_in",
    "extrapolated",
    "make_plan",
    "ttft_with_s",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
class Plan:
    """The best place for a request. `decode` None: it ends with its first token, on a prefill node."""

    places: FittingNodes
    curve: int  # of its answer's length
    sums: Ints  # [slots, 3]: what `state.tally` found before it
    seat: QueuePosition
    prefixes: Prefixes
    scores: PrefillScores
    decode: DecodePlan | None
    group: PrefillGroup | None  # who helps the chosen node; None: nobody
    ttft_s: float  # with the wait for decode pages

    @property
    def chosen(self) -> int:
        """The prefill candidate."""
        return self.scores.chosen

    @property
    def queue_s(self) -> float:
        """Part of the TTFT spent in the queue, in seconds."""
        return self.scores.queue_s.item(self.scores.chosen)

    @property
    def prefill_s(self) -> float:
        """For which the chosen node is busy with it."""
        return self.scores.seconds.item(1, self.scores.chosen) if self.group is None else self.group.prefill_s

    @property
    def ready_s(self) -> float:
        """Its TTFT, but for the wait for decode pages."""
        return self.scores.ttft_s if self.group is None else self.group.ttft_s

    @property
    def tbt_s(self) -> float:
        """0 without a decode."""
        return self.decode.choice.tbt_s if self.decode is not None else 0.0

    @property
    def room_wait_s(self) -> float:
        """Seconds until the decode node has the pages; 0 without a decode."""
        return self.decode.wait_s if self.decode is not None else 0.0


def make_plan(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    places: FittingNodes,
    model: ModelNodes,
    former: Claim | None,
    costs: ModelCosts,
) -> Plan:
    """`former`: what an earlier attempt claimed."""
    curve, places = _expect(now_ns, state, request, places, model.block_tokens)
    found = reach(now_ns, state, request, places.prefill, model, former, costs)
    sums, seat, prefixes, scores = found.sums, found.seat, found.prefixes, found.scores
    help_s: Floats | None = None
    if places.prefill.has_aggregated or state.group_work:
        queue_s = _queue_s(now_ns, state, places, costs, sums, seat)
        # Whoever helps does so before it takes up anything new.
        help_s = state.group_work.load_s(now_ns, state.nodes, state.requests) if state.group_work else None
        if help_s is not None:
            queue_s += help_s[places.prefill.slots]
        scores = score_candidates(state, request, model, places.prefill, prefixes, queue_s, costs)
    group: PrefillGroup | None = None
    if state.config.prefill_group_size > 1:
        work_s = work_at_hand_s(places, sums, help_s)
        group = form_group(state, request, places, model, scores, work_s, costs)
    ttft_s = scores.ttft_s if group is None else group.ttft_s
    decode = _plan_decode(now_ns, state, request, places, costs, sums, scores, ttft_s)
    if decode is not None:
        # Prefill begins only once the decode node has the pages.
        ttft_s += max(0.0, decode.wait_s - scores.queue_s.item(scores.chosen))
    return Plan(places, curve, sums, seat, prefixes, scores, decode, group, ttft_s)


def considered_in(state: ClusterState, plan: Plan, objectives: EffectiveObjectives) -> Considered:
    """The best candidates and what was predicted, where the policy explains."""
    if not state.config.explain:
        return NOTHING_CONSIDERED
    places, decode = plan.places, plan.decode
    return Considered(
        prefill=plan.scores.explain(places.prefill.ids, state.config.explain),
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


def ttft_with_s(
    state: ClusterState,
    request: RequestArrived,
    model: ModelNodes,
    matches: PoolMatches,
    plan: Plan,
    costs: ModelCosts,
) -> float:
    """TTFT at the best place, but for waiting for decode pages, had the pool nodes held `matches` instead."""
    nodes = plan.places.prefill
    prefixes = find_prefixes(state, request, model, matches, nodes, plan.sums)
    return score_candidates(state, request, model, nodes, prefixes, plan.scores.queue_s, costs).ttft_s


def _expect(
    now_ns: int, state: ClusterState, request: RequestArrived, places: FittingNodes, block_tokens: int
) -> tuple[int, FittingNodes]:
    """The curve of the answer's length, and the places with the pages to reserve: the most that it may take, or what
    answers like it exceed with the configured probability."""
    if request.endless:
        return ENDLESS, places
    curve = state.lengths.curve_of(now_ns, request.model, request.tenant, request.prompt_tokens - request.generated)
    overrun = state.config.overrun_probability
    if overrun:
        usual = state.lengths.quantile(curve, overrun, request.generated, request.max_new_tokens)
        places = replace(places, need_tokens=peak_tokens(request.prompt_tokens, usual, block_tokens))
    return curve, places


def _queue_s(
    now_ns: int, state: ClusterState, places: FittingNodes, costs: ModelCosts, sums: Ints, seat: QueuePosition
) -> Floats:
    """Per candidate: seconds until its turn."""
    nodes, queue_s = places.prefill, seat.queue_s
    if nodes.has_aggregated:
        # There the prefill itself waits for the pages that the whole request needs.
        committed = sums[nodes.slots, 1]
        missing = np.where(nodes.is_aggregated, committed + places.need_tokens - nodes.capacity_tokens, 0)
        for i in np.flatnonzero(missing > 0):
            wait_s = wait_for_room_s(nodes, int(i), state, costs, now_ns=now_ns, missing_tokens=int(missing[i]))
            queue_s[i] = max(queue_s[i], wait_s)
    return queue_s


def _plan_decode(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    places: FittingNodes,
    costs: ModelCosts,
    sums: Ints,
    scores: PrefillScores,
    ttft_s: float,
) -> DecodePlan | None:
    nodes = places.decode
    if places.prefill.is_aggregated.item(scores.chosen):
        nodes = places.prefill.only(scores.chosen)
    elif request.max_new_tokens <= 1:
        return None
    choice = choose_decode(
        nodes,
        state,
        costs,
        sums,
        now_ns=now_ns,
        at_ns=now_ns + to_ns(ttft_s),
        prompt_tokens=request.prompt_tokens,
        need_tokens=places.need_tokens,
    )
    missing, wait_s = places.need_tokens - choice.free_tokens, 0.0
    if missing > 0:
        wait_s = wait_for_room_s(nodes, choice.index, state, costs, now_ns=now_ns, missing_tokens=missing)
    return DecodePlan(nodes, choice, wait_s)


def extrapolated(
    prefixes: Prefixes,
    scores: PrefillScores,
    choice: DecodeChoice | None,
    prompt_tokens: int,
    model: ModelNodes,
    costs: ModelCosts,
    transfers: TransferCosts,
) -> tuple[str, ...]:
    """Return which of "prefill", "decode", "load", "fetch" and "ssd_read" are extrapolated for the candidates."""
    chosen, block_nbytes, found = scores.chosen, model.block_nbytes, []
    reuse = scores.reuse_blocks.item(chosen)
    if not costs.covers_prefill(prompt_tokens - reuse * model.block_tokens, prompt_tokens):
        found.append("prefill")
    if choice is not None and not choice.is_covered:
        found.append("decode")
    if reuse:
        own = prefixes.held.item(0, chosen)
        missing = reuse - own
        on_ssd = prefixes.held.item(1, chosen) + min(missing, prefixes.best_ssd)
        if own and not transfers.covers("load", own * block_nbytes):
            found.append("load")
        if missing and not transfers.covers("fetch", missing * block_nbytes):
            found.append("fetch")
        if on_ssd and not transfers.covers("ssd_read", on_ssd * block_nbytes):
            found.append("ssd_read")
    return tuple(found)

"""Places a request: Algorithm 1 for the prefill node, predicted TBT for the decode node, admission, hot-spot copy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from conductor.policy.admission import Verdict, asks_again, judge
from conductor.policy.algorithm1 import PrefillScores, Prefixes, holders, score_prefill
from conductor.policy.candidates import Places, find_places
from conductor.policy.copying import copy_after
from conductor.policy.costs import ModelCosts, tbt_s
from conductor.policy.credible import to_ns
from conductor.policy.decisions import NOTHING_CONSIDERED, Considered, Decision, Place, Reason, Reject
from conductor.policy.decode_choice import DecodeChoice, choose_decode, peak_tokens, wait_for_room_s
from conductor.policy.events import RequestArrived, Turn
from conductor.policy.extrapolation import extrapolated
from conductor.policy.hindsight import Case
from conductor.policy.kernels import kernels
from conductor.policy.lengths import ENDLESS
from conductor.policy.matches import PoolMatch, PoolMatches
from conductor.policy.nodes import Candidates, ModelNodes
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.replication import Replica
from conductor.policy.requests import NONE, Claim
from conductor.policy.role_plan import arrived
from conductor.policy.seats import Seat, endless_refused, seat_of, sit
from conductor.policy.state import ClusterState

__all__ = ["place"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """Where the request decodes: the node of `nodes` at `choice.index`."""

    nodes: Candidates
    choice: DecodeChoice
    wait_s: float  # predicted, until its pages are free

    @property
    def node_id(self) -> str:
        return self.nodes.ids[self.choice.index]


def place(now_ns: int, state: ClusterState, request: RequestArrived) -> list[Decision]:
    """One Place or Reject, and possibly a Copy after a Place."""
    recent = state.recent.pop(request.request_id, None)
    former = recent.claim if recent is not None else None
    stale = state.requests.find(request.request_id)
    if stale is not None:
        # A new attempt, or the same one asked again: what the old answer claimed is void.
        former = state.requests.remove(stale)
    if former is not None and former.charge is not None:
        former.charge.cancel()
    places = find_places(now_ns, state, request)
    if isinstance(places, Reject):
        return [places]
    if (refused := endless_refused(state, request)) is not None:
        return [refused]
    model = state.nodes.model(request.model)
    assert model is not None
    costs = state.costs_of(request.model)
    curve, places = _expect(now_ns, state, request, places, model.block_tokens)
    sums = state.tally(now_ns)
    prefixes = _prefixes(state, request, model, request.matches, places.prefill, sums)
    seat = seat_of(now_ns, state, request, former, prefixes.best * model.block_tokens, places.prefill, costs)
    queue_all_s = _queue_s(now_ns, state, places, costs, sums, seat)
    slots = places.prefill.slots
    scores = _score(state, request, model, slots, prefixes, queue_all_s, costs)
    chosen = scores.chosen
    decode = _plan_decode(now_ns, state, request, places, costs, sums, chosen, scores.ttft_s)
    queue_s = float(scores.queue_s[chosen])
    # Prefill begins only once the decode node has the pages.
    ttft_s = scores.ttft_s + (max(0.0, decode.wait_s - queue_s) if decode is not None else 0.0)
    objectives = _objectives(state, request, former, scores, costs)
    verdict = Verdict(
        ttft_s=ttft_s,
        queue_s=queue_s,
        tbt_s=decode.choice.tbt_s if decode is not None else 0.0,
        room_wait_s=decode.wait_s if decode is not None else 0.0,
        has_room=decode is None or decode.choice.free_tokens >= places.need_tokens,
        decode_nodes=decode.nodes if decode is not None else None,
        decode_index=decode.choice.index if decode is not None else 0,
        objectives=objectives,
    )
    considered = (
        _considered(state, objectives, places, scores, decode, ttft_s) if state.config.explain else NOTHING_CONSIDERED
    )
    beyond = extrapolated(
        prefixes,
        scores,
        decode.choice if decode is not None else None,
        prompt_tokens=request.prompt_tokens,
        block_tokens=model.block_tokens,
        block_nbytes=model.block_nbytes,
        costs=costs,
        transfers=state.transfers,
    )
    judgement = judge(now_ns, state, request, verdict, costs)
    if request.attempt == 0 and not request.endless:
        arrived(now_ns, state, request.model, float(scores.prefill_s[chosen]), request.prompt_tokens)
    if judgement.rejection is not None:
        state.attainment.lost(request.model, request.tenant, objectives, "rejected")
        state.hindsight.watch(_case(now_ns, request, judgement.rejection.reason, places, scores, decode, objectives))
        return [replace(judgement.rejection, considered=considered, extrapolated=beyond)]
    if judgement.unwanted:
        state.count(request.model, f"unwanted_{judgement.unwanted}")
    placed = _placed(
        request,
        places.prefill,
        prefixes,
        scores,
        chosen,
        decode,
        ttft_s,
        considered,
        seat.turn,
        asks=asks_again(state.config),
    )
    if state.config.overrun_probability and placed.decode and not request.endless:
        placed = replace(placed, reserve_tokens=places.need_tokens)
    if beyond:
        placed = replace(placed, extrapolated=beyond)
    copy = copy_after(now_ns, state, request, places.prefill, prefixes, scores, chosen, model.block_nbytes)
    _claim(now_ns, state, request, places, prefixes, scores, chosen, placed, objectives, curve, judgement.unwanted)
    sit(state, seat, request, placed, model, costs)
    replicas = _replicas(state, request, model)
    if places.prefill.pools[chosen] in replicas:
        without = _without_replicas(state, request, model, replicas)
        alone_prefixes = _prefixes(state, request, model, without, places.prefill, sums)
        alone = _score(state, request, model, slots, alone_prefixes, queue_all_s, costs)
        saved_s = max(0.0, alone.ttft_s - scores.ttft_s)
        state.replication.use(now_ns, replicas[places.prefill.pools[chosen]], saved_s)
    return [placed] if copy is None else [placed, copy]


def _case(
    now_ns: int,
    request: RequestArrived,
    reason: Reason,
    places: Places,
    scores: PrefillScores,
    decode: _DecodePlan | None,
    objectives: EffectiveObjectives,
) -> Case:
    """What a rejected request would have done, for hindsight."""
    return Case(
        model=request.model,
        reason=reason,
        at_ns=now_ns,
        work_ns=to_ns(scores.ttft_s - float(scores.queue_s[scores.chosen])),
        prefill=places.prefill.ids[scores.chosen],
        decode=decode.node_id if decode is not None else "",
        need_tokens=places.need_tokens,
        prompt_tokens=request.prompt_tokens,
        objectives=objectives,
    )


def _objectives(
    state: ClusterState, request: RequestArrived, former: Claim | None, scores: PrefillScores, costs: ModelCosts
) -> EffectiveObjectives:
    """What the request is to meet, as its first attempt was told.

    Unloaded: no queue, at the best node, with what it can reuse; a batch of its own.
    """
    if request.attempt and former is not None and not former.is_revived:
        return former.objectives
    wanted = state.slo.resolve(request.model, request.tenant, request.slo_class)
    ttft_s = float((scores.transfer_s + scores.prefill_s).min()) if wanted.ttft.times else 0.0
    step_s = tbt_s(*costs.decode, 1, request.prompt_tokens, 1) if wanted.tbt.times else 0.0
    return wanted.effective(request.ttft_objective_s, request.tbt_objective_s, ttft_s, step_s)


def _expect(
    now_ns: int, state: ClusterState, request: RequestArrived, places: Places, block_tokens: int
) -> tuple[int, Places]:
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


def _limit(request: RequestArrived, model: ModelNodes) -> int:
    """Never the whole prompt is reused, so that at least one token is computed."""
    return (request.prompt_tokens - 1) // model.block_tokens


def _prefixes(
    state: ClusterState,
    request: RequestArrived,
    model: ModelNodes,
    matches: PoolMatches,
    prefill: Candidates,
    sums: Ints,
) -> Prefixes:
    """What pool nodes that answer and are not excluded hold."""
    slots, pool_slots = state.nodes.answering_slots(matches.roster), prefill.pool_slots
    for node_id in request.excluded:
        if (slot := state.nodes.slot(node_id)) != NONE:
            slots = np.where(slots == slot, NONE, slots)
    own, sends, limit = np.empty((2, len(prefill)), np.int64), state.copy_sends(), _limit(request, model)
    room = np.empty((2, len(sums)), np.int64)
    blocks, ssd_blocks = matches.blocks, matches.ssd_blocks
    best = kernels().prefixes(blocks, ssd_blocks, slots, limit, sends, sums, pool_slots, room, own)
    if best < 0:
        return Prefixes(own, 0, 0, "", 0)
    slot = int(slots[best])
    have, on_ssd = room[:, slot].tolist()
    return Prefixes(own, have, on_ssd, matches.roster[best], int(sums[slot, 2] + sends[slot]))


def _replicas(state: ClusterState, request: RequestArrived, model: ModelNodes) -> dict[str, Replica]:
    """Per pool node: the replica whose blocks the request finds there, beside those that were there before."""
    if not request.matches.replicas:
        return {}
    found = ((match, state.replication.of(match.pool, match.replica)) for match in _usable(state, request, model))
    return {
        match.pool: replica
        for match, replica in found
        if replica is not None and match.blocks > replica.extent.had_blocks
    }


def _usable(state: ClusterState, request: RequestArrived, model: ModelNodes) -> list[PoolMatch]:
    """What `_prefixes` goes by, one by one."""
    limit = _limit(request, model)
    return [
        match if match.blocks <= limit else replace(match, blocks=limit, ssd_blocks=min(match.ssd_blocks, limit))
        for match in request.matches
        if match.pool not in request.excluded and state.answers(match.pool)
    ]


def _without_replicas(
    state: ClusterState, request: RequestArrived, model: ModelNodes, replicas: Mapping[str, Replica]
) -> PoolMatches:
    """What pool nodes would hold if no Copy had been made: what followed a copied prefix would be with its source."""
    found = {match.pool: match for match in _usable(state, request, model)}
    without = dict(found)
    for pool, replica in replicas.items():
        had_blocks = replica.extent.had_blocks
        without[pool] = replace(found[pool], blocks=had_blocks, ssd_blocks=min(found[pool].ssd_blocks, had_blocks))
    for pool, replica in replicas.items():
        blocks = found[pool].blocks
        source = without.get(replica.source, PoolMatch(replica.source, 0))
        if replica.extent.num_blocks < blocks and source.blocks < blocks and state.answers(source.pool):
            without[source.pool] = replace(source, blocks=blocks)
    return PoolMatches.of(*without.values())


def _queue_s(now_ns: int, state: ClusterState, places: Places, costs: ModelCosts, sums: Ints, seat: Seat) -> Floats:
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


def _score(
    state: ClusterState,
    request: RequestArrived,
    model: ModelNodes,
    slots: Ints,
    prefixes: Prefixes,
    queue_s: Floats,
    costs: ModelCosts,
) -> PrefillScores:
    return score_prefill(
        prefixes,
        queue_s,
        prompt_tokens=request.prompt_tokens,
        block_tokens=model.block_tokens,
        block_nbytes=model.block_nbytes,
        balancing_threshold=state.config.balancing_threshold,
        slots=slots,
        costs=costs,
        transfers=state.transfers,
    )


def _plan_decode(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    places: Places,
    costs: ModelCosts,
    sums: Ints,
    chosen: int,
    ttft_s: float,
) -> _DecodePlan | None:
    """None: the request ends with its first token, on a prefill node."""
    nodes = places.decode
    if places.prefill.is_aggregated[chosen]:
        nodes = places.prefill.only(chosen)
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
    missing = places.need_tokens - choice.free_tokens
    wait_s = wait_for_room_s(nodes, choice.index, state, costs, now_ns=now_ns, missing_tokens=missing)
    return _DecodePlan(nodes, choice, wait_s)


def _considered(
    state: ClusterState,
    objectives: EffectiveObjectives,
    places: Places,
    scores: PrefillScores,
    decode: _DecodePlan | None,
    ttft_s: float,
) -> Considered:
    return Considered(
        prefill=scores.explain(places.prefill.ids, state.config.explain),
        num_prefill=len(places.prefill),
        decode=() if decode is None else decode.choice.scores,
        num_decode=0 if decode is None else len(decode.nodes),
        ttft_s=ttft_s,
        tbt_s=0.0 if decode is None else decode.choice.tbt_s,
        room_wait_s=0.0 if decode is None else decode.wait_s,
        need_tokens=0 if decode is None else places.need_tokens,
        ttft_objective_s=objectives.ttft_s,
        tbt_objective_s=objectives.tbt_s,
        ttft_from=objectives.ttft_from,
        tbt_from=objectives.tbt_from,
    )


def _placed(
    request: RequestArrived,
    nodes: Candidates,
    prefixes: Prefixes,
    scores: PrefillScores,
    chosen: int,
    decode: _DecodePlan | None,
    ttft_s: float,
    considered: Considered,
    turn: Turn,
    *,
    asks: bool,
) -> Place:
    return Place(
        request_id=request.request_id,
        attempt=request.attempt,
        prefill=nodes.ids[chosen],
        decode="" if decode is None or nodes.is_aggregated[chosen] else decode.node_id,
        reuse_blocks=int(scores.reuse_blocks[chosen]),
        holders=holders(nodes.pools[chosen], chosen, prefixes, bool(scores.fetches[chosen])),
        predicted_ttft_s=ttft_s,
        predicted_tbt_s=decode.choice.tbt_s if decode is not None else 0.0,
        turn=turn,
        considered=considered,
        asks_again=asks and decode is not None and not request.generated,
    )


def _claim(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    places: Places,
    prefixes: Prefixes,
    scores: PrefillScores,
    chosen: int,
    placed: Place,
    objectives: EffectiveObjectives,
    curve: int,
    unwanted: Reason | Literal[""],
) -> None:
    decodes_at = placed.decode or (placed.prefill if places.prefill.is_aggregated[chosen] else "")
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
        curve=curve,
        max_tokens=request.generated + request.max_new_tokens,
        unwanted=unwanted,
    )
    state.requests.add(
        claim,
        prefill_node=int(places.prefill.slots[chosen]),
        decode_node=state.nodes.slot(decodes_at),
        sender=state.nodes.slot(prefixes.best_pool) if scores.fetches[chosen] else NONE,
        prefill_ns=to_ns(float(scores.prefill_s[chosen])),
        ready_ns=now_ns + to_ns(placed.predicted_ttft_s),
        committed=places.need_tokens if decodes_at else 0,
        prompt=places.need_tokens if request.endless else request.prompt_tokens,
        max_new=0 if request.endless else request.max_new_tokens,
        curve=curve,
        generated=request.generated,
        seen_ns=now_ns,
        placed_ns=now_ns,
    )

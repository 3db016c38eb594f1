"""Mooncake's Algorithm 1 (FAST'25, §5.1): who reaches the first token soonest, fetching a prefix or not.

What of a request's prompt pool nodes hold that it may use, and what is owed to copies of prefixes among it.

Who reaches the first token how soon: a request's seat in line, the prefixes it may use, Algorithm 1 over both.

It gathers what one compiled loop (`reach_kernels`) needs, and gives names to what that found.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from conductor.policy.costs import ModelCosts, TransferCosts
from conductor.policy.decisions import Holder, PrefillScore
from conductor.policy.events import PoolMatch, PoolMatches, RequestArrived
from conductor.policy.fast_dataclass import fast_dataclass
from conductor.policy.kernels import kernels, reach_kernels
from conductor.policy.nodes import Candidates, ModelNodes
from conductor.policy.queue_position import QueuePosition, ordering_key
from conductor.policy.replication import Replica
from conductor.policy.requests import NONE, Claim
from conductor.policy.state import ClusterState

__all__ = [
    "PrefillScores",
    "Prefixes",
    "Reach",
    "find_prefixes",
    "holders",
    "most_reused",
    "reach",
    "replicas_used",
    "score_candidates",
    "score_prefill",
    "usable_slots",
    "without_replicas",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Prefixes:
    """Blocks of the prompt in the pool; never the whole prompt, so at least one token is computed."""

    held: Ints  # [2, candidates]: what each one's own host's pool node holds; of that, what is on SSD only
    best: int  # what `best_pool` holds, the most of all
    best_ssd: int  # of that, what is on SSD only
    best_pool: str  # "" when nobody holds anything
    num_sends: int  # prefixes and copies that `best_pool` sends already

    @property
    def own(self) -> Ints:
        """Blocks in the candidates' own pool nodes."""
        row: Ints = self.held[0]
        return row


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PrefillScores:
    """Predicted seconds per candidate, and how many blocks each would reuse; `fetches`: from the best pool node."""

    seconds: Floats  # [2, candidates]: transfer and prefill
    queue_s: Floats
    reuse_blocks: Ints
    fetches: NDArray[np.bool_]
    chosen: int  # the candidate with the least TTFT, the first of equals
    ttft_s: float  # its t_transfer + t_queue + t_prefill

    @property
    def transfer_s(self) -> Floats:
        row: Floats = self.seconds[0]
        return row

    @property
    def prefill_s(self) -> Floats:
        row: Floats = self.seconds[1]
        return row

    def explain(self, ids: tuple[str, ...], count: int) -> tuple[PrefillScore, ...]:
        """The terms of the `count` best candidates, best first; of equals the first."""
        best = np.empty(min(count, len(ids)), np.int64)
        kernels().best(self.seconds, self.queue_s, best)
        columns = (self.transfer_s[best], self.queue_s[best], self.prefill_s[best], self.reuse_blocks[best])
        rows = zip(best.tolist(), *(column.tolist() for column in columns), strict=True)
        return tuple(PrefillScore(ids[index], *terms) for index, *terms in rows)


def score_prefill(
    prefixes: Prefixes,
    queue_s: Floats,
    *,
    prompt_tokens: int,
    model: ModelNodes,
    balancing_threshold: float,
    slots: Ints,
    costs: ModelCosts,
    transfers: TransferCosts,
) -> PrefillScores:
    """Run Algorithm 1's loop over the prefill instances (Mooncake, §6.1) at `slots`; `queue_s`: [instances].

    A prefix of 0 makes the ratio infinite, if any instance has one. Of `model` only the sizes of a block are used.
    """
    count = len(queue_s)
    seconds, reuse, fetches = np.empty((2, count)), np.empty(count, np.int64), np.empty(count, np.bool_)
    chosen, ttft_s = kernels().score_prefill(
        prefixes.held,
        queue_s,
        prefixes.best,
        prefixes.best_ssd,
        prefixes.num_sends,
        prompt_tokens,
        model.block_tokens,
        model.block_nbytes,
        balancing_threshold,
        slots,
        costs.slowdowns.factors,
        costs.prefill,
        costs.prefill_most,
        transfers.of("load"),
        transfers.of("fetch"),
        transfers.of("ssd_read"),
        seconds,
        reuse,
        fetches,
    )
    return PrefillScores(seconds, queue_s, reuse, fetches, chosen, ttft_s)


def score_candidates(
    state: ClusterState,
    request: RequestArrived,
    model: ModelNodes,
    nodes: Candidates,
    prefixes: Prefixes,
    queue_s: Floats,
    costs: ModelCosts,
) -> PrefillScores:
    """Score `nodes` for the request; `queue_s`: [candidates], the seconds until its turn there."""
    return score_prefill(
        prefixes,
        queue_s,
        prompt_tokens=request.prompt_tokens,
        model=model,
        balancing_threshold=state.config.balancing_threshold,
        slots=nodes.slots,
        costs=costs,
        transfers=state.transfers,
    )


def holders(own_pool: str, index: int, prefixes: Prefixes, fetches: bool) -> tuple[Holder, ...]:
    """Return the holders of [0, reuse) for the candidate at `index`: first its own pool, then the best one."""
    own = prefixes.held.item(0, index)
    here = (Holder(own_pool, 0, own, prefixes.held.item(1, index)),) if own else ()
    if not fetches:
        return here
    missing = prefixes.best - own
    return (*here, Holder(prefixes.best_pool, own, missing, min(missing, prefixes.best_ssd)))


def find_prefixes(
    state: ClusterState,
    request: RequestArrived,
    model: ModelNodes,
    matches: PoolMatches,
    prefill: Candidates,
    sums: Ints,
) -> Prefixes:
    """Return the blocks on answering pool nodes that are not excluded. `sums` [slots, 3]: those of `state.tally`."""
    slots, pool_slots = usable_slots(state, request, matches), prefill.pool_slots
    own, limit = np.empty((2, len(pool_slots)), np.int64), most_reused(request, model)
    best, have, on_ssd, num_sends = kernels().prefixes(
        matches.blocks, matches.ssd_blocks, slots, limit, state.copy_sends(), sums, pool_slots, own
    )
    return Prefixes(own, have, on_ssd, matches.roster[best] if best >= 0 else "", num_sends)


def usable_slots(state: ClusterState, request: RequestArrived, matches: PoolMatches) -> Ints:
    """Return the slot of each pool node of the roster; NONE for those that do not answer or are excluded."""
    slots = state.nodes.answering_slots(matches.roster)
    for node_id in request.excluded:
        if (slot := state.nodes.slot(node_id)) != NONE:
            slots = np.where(slots == slot, NONE, slots)
    return slots


def most_reused(request: RequestArrived, model: ModelNodes) -> int:
    """Blocks; never the whole prompt, so that at least one token is computed."""
    return (request.prompt_tokens - 1) // model.block_tokens


def replicas_used(state: ClusterState, request: RequestArrived, model: ModelNodes) -> dict[str, Replica]:
    """Per pool node: the replica whose blocks the request finds there, beside those that were there before."""
    found = ((match, state.replication.of(match.pool, match.replica)) for match in _usable(state, request, model))
    return {
        match.pool: replica
        for match, replica in found
        if replica is not None and match.blocks > replica.extent.had_blocks
    }


def without_replicas(
    state: ClusterState, request: RequestArrived, model: ModelNodes, replicas: Mapping[str, Replica]
) -> PoolMatches:
    """Return the blocks on pool nodes as if no Copy had been made: the blocks after a copied prefix count at its
    source.
    """
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


def _usable(state: ClusterState, request: RequestArrived, model: ModelNodes) -> list[PoolMatch]:
    """Return the matches that `find_prefixes` uses, one by one."""
    limit = most_reused(request, model)
    return [
        match if match.blocks <= limit else replace(match, blocks=limit, ssd_blocks=min(match.ssd_blocks, limit))
        for match in request.matches
        if match.pool not in request.excluded and state.answers(match.pool)
    ]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Reach:
    """Findings about the prefill candidates; each wait of the request there is for a queued prefill."""

    sums: NDArray[np.int64]  # [slots, 3]: what `state.tally` finds
    seat: QueuePosition
    prefixes: Prefixes
    scores: PrefillScores


def reach(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    nodes: Candidates,
    model: ModelNodes,
    former: Claim | None,
    costs: ModelCosts,
) -> Reach:
    """The request's ticket is taken. `former`: what an earlier attempt claimed."""

    def reusable_tokens() -> int:
        sums = state.tally(now_ns)
        return find_prefixes(state, request, model, request.matches, nodes, sums).best * model.block_tokens

    shares, account, clock, me = ordering_key(now_ns, state, request, former, costs, reusable_tokens)
    matches, requests, transfers, slots = request.matches, state.requests, state.transfers, nodes.slots
    count, num_slots = len(slots), state.nodes.num_slots
    sums, room = np.empty((num_slots, 3), np.int64), np.empty((4, num_slots), np.int64)
    own, queue_s, seconds = np.empty((2, count), np.int64), np.empty(count), np.empty((2, count))
    reuse, fetches = np.empty(count, np.int64), np.empty(count, np.bool_)
    clock.now_ns, ticket_ns, best, blocks, ssd_blocks, num_sends, chosen, ttft_s = reach_kernels().reach(
        requests.table,
        requests.turns,
        len(requests.claims),
        me,
        clock.now_ns,
        clock.started_ns,
        account.finish_ns,
        matches.blocks,
        matches.ssd_blocks,
        usable_slots(state, request, matches),
        most_reused(request, model),
        state.copy_sends(),
        slots,
        nodes.pool_slots,
        request.prompt_tokens,
        model.block_tokens,
        model.block_nbytes,
        state.config.balancing_threshold,
        costs.slowdowns.factors,
        costs.terms.prefill,
        costs.prefill_most,
        transfers.of("load"),
        transfers.of("fetch"),
        transfers.of("ssd_read"),
        sums,
        room,
        own,
        queue_s,
        seconds,
        reuse,
        fetches,
    )
    seat = QueuePosition(shares, account, me, room, ticket_ns, queue_s)
    prefixes = Prefixes(own, blocks, ssd_blocks, matches.roster[best] if best >= 0 else "", num_sends)
    return Reach(sums, seat, prefixes, PrefillScores(seconds, queue_s, reuse, fetches, chosen, ttft_s))

"""Choice of the prefill node: Mooncake's Algorithm 1 (FAST'25, §5.1), with or without fetching a prefix.

A request's position in the queue, the prefixes it may use and the score of each candidate come from one compiled loop
(`kernels.score_arrival`); this module gathers its inputs and names its results. It also determines what a request owes
to copies of prefixes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conductor.policy.decisions import Holder, PrefillScore
from conductor.policy.events import PoolMatch, PoolMatches
from conductor.policy.kernels import ARRIVAL, MATCH, prefill_kernels
from conductor.policy.nodes import PREFILL_CANDIDATE, Candidates
from conductor.policy.placement.blind import choose_blindly
from conductor.policy.queue_position import QueuePosition, ordering_key
from conductor.policy.replication import Replica
from conductor.policy.requests import NONE
from conductor.policy.state import PlacementContext
from jit.fast_dataclass import fast_dataclass

__all__ = [
    "PrefillChoice",
    "PrefillScores",
    "Prefixes",
    "choose_prefill",
    "find_prefixes",
    "holders",
    "most_reused",
    "replicas_used",
    "score_candidates",
    "without_replicas",
]

Records = NDArray[np.void]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Prefixes:
    """Blocks of the prompt in the pool and in the nodes' own memory; never the whole prompt, so at least one token is
    computed.
    """

    candidates: Records  # PREFILL_CANDIDATE [candidates] with the blocks on their own pool nodes and in their memory
    best: int  # blocks on `best_pool`, the most of all
    best_ssd: int  # of those, on SSD only
    best_pool: str  # "" if no pool node holds any
    num_sends: int  # prefixes and copies that `best_pool` sends already

    @property
    def own(self) -> Ints:
        """Blocks on the candidates' own pool nodes."""
        return self.candidates["own_blocks"]


class ScoredCandidate(NamedTuple):
    """A row of PREFILL_CANDIDATE as Python numbers."""

    slot: int
    pool_slot: int
    own_blocks: int
    own_ssd_blocks: int
    local_blocks: int
    queue_s: float
    transfer_s: float
    prefill_s: float
    reuse_blocks: int
    fetches: bool


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PrefillScores:
    """Predictions for each candidate, and the choice."""

    candidates: Records  # PREFILL_CANDIDATE [candidates]
    chosen: int  # the candidate with the least TTFT, the first of equals
    best: ScoredCandidate  # its predictions
    ttft_s: float  # its t_transfer + t_queue + t_prefill
    idle_s: float  # the least t_transfer + t_prefill of all candidates

    @property
    def queue_s(self) -> Floats:
        return self.candidates["queue_s"]

    @property
    def transfer_s(self) -> Floats:
        return self.candidates["transfer_s"]

    @property
    def prefill_s(self) -> Floats:
        return self.candidates["prefill_s"]

    @classmethod
    def of(cls, candidates: Records, chosen: int, ttft_s: float, idle_s: float) -> "PrefillScores":
        """Return the scores with the chosen candidate's predictions."""
        return cls(candidates, chosen, ScoredCandidate._make(candidates[chosen].item()), ttft_s, idle_s)

    def explain(self, ids: tuple[str, ...], count: int) -> tuple[PrefillScore, ...]:
        """Return the predictions of the `count` best candidates, best first; of equals the first.

        The chosen one is among them: it takes the last place if others are faster.
        """
        best = np.empty(min(count, len(ids)), np.int64)
        prefill_kernels().rank_prefill(self.candidates, best)
        if self.chosen not in best:
            best[-1] = self.chosen
        ranked = self.candidates[best]
        terms_of = ("transfer_s", "queue_s", "prefill_s", "reuse_blocks", "local_blocks")
        columns = (ranked[name].tolist() for name in terms_of)
        return tuple(PrefillScore(ids[index], *terms) for index, *terms in zip(best.tolist(), *columns, strict=True))


def score_candidates(context: PlacementContext, prefixes: Prefixes, queue_s: Floats) -> PrefillScores:
    """Run Algorithm 1's loop over the candidates of `prefixes` (Mooncake, FAST'25, §6.1).

    `queue_s` [candidates]: seconds until the request's turn there. A prefix of 0 makes the ratio of prefixes infinite,
    if any pool node has one.
    """
    candidates = prefixes.candidates.view(np.uint8).copy().view(PREFILL_CANDIDATE)  # 10 times as fast as by fields
    candidates["queue_s"] = queue_s
    chosen, ttft_s, idle_s = prefill_kernels().score_prefill(
        _arrival(context, (0,) * 7, (0,) * 3),
        prefixes.best,
        prefixes.best_ssd,
        prefixes.num_sends,
        context.costs.slowdowns.factors,
        context.costs.terms.prefill_record,
        context.state.transfers.record,
        candidates,
    )
    if context.state.places_blindly:
        chosen, ttft_s = choose_blindly(context, candidates)
    return PrefillScores.of(candidates, chosen, ttft_s, idle_s)


def _arrival(context: PlacementContext, key: tuple[int, ...], clock: tuple[int, int, int]) -> Records:
    """Return ARRIVAL [1]; `key`: see `OrderingKey`, `clock`: (clock_ns, started_ns, finish_ns)."""
    request, model = context.request, context.model
    threshold = context.state.fetch_threshold
    tokens = request.prompt_tokens, request.window_tokens or request.prompt_tokens
    sizes = *tokens, most_reused(context), model.block_tokens, *model.kv_sizes
    arrival = np.empty(1, ARRIVAL)
    arrival[0] = *key, *clock, *sizes, threshold
    return arrival


def holders(own_pool: str, index: int, prefixes: Prefixes, fetches: bool) -> tuple[Holder, ...]:
    """Return the holders of what the candidate at `index` may load: first its own pool, then the best one."""
    own, own_ssd = prefixes.candidates["own_blocks"].item(index), prefixes.candidates["own_ssd_blocks"].item(index)
    here = (Holder(own_pool, 0, own, own_ssd),) if own else ()
    if not fetches:
        return here
    missing = prefixes.best - own
    return (*here, Holder(prefixes.best_pool, own, missing, min(missing, prefixes.best_ssd)))


def find_prefixes(context: PlacementContext, matches: PoolMatches, nodes: Candidates, loads: Records) -> Prefixes:
    """Return the blocks on answering pool nodes that are not excluded, and in the nodes' own memory.

    `loads` [slots]: those of `state.tally`.
    """
    candidates = _records(context, nodes)
    best, have, on_ssd, num_sends = prefill_kernels().prefixes(
        most_reused(context), _usable_matches(context, matches), loads, candidates
    )
    return Prefixes(candidates, have, on_ssd, matches.roster[best] if best >= 0 else "", num_sends)


def _records(context: PlacementContext, nodes: Candidates) -> Records:
    """Return PREFILL_CANDIDATE [nodes] with the blocks in their own memory."""
    records, held = nodes.prefill_records(), context.request.in_workers
    if held.roster:
        table = context.state.nodes
        by_slot = np.zeros(table.num_slots + 1, np.int64)  # the last for workers that have left
        by_slot[table.answering_slots(held.roster)] = np.clip(held.blocks, 0, most_reused(context))
        by_slot[-1] = 0
        records["local_blocks"] = by_slot[nodes.slots]
    return records


def _usable_matches(context: PlacementContext, matches: PoolMatches) -> Records:
    """Return MATCH [pool nodes]; the slot is NONE for those that do not answer or are excluded."""
    nodes, usable = context.state.nodes, np.empty(len(matches.roster), MATCH)
    slots = nodes.answering_slots(matches.roster)
    usable["blocks"], usable["ssd_blocks"], usable["slot"] = matches.blocks, matches.ssd_blocks, slots
    for node_id in context.request.excluded:
        if (slot := nodes.slot(node_id)) != NONE:
            usable["slot"][slots == slot] = NONE
    return usable


def most_reused(context: PlacementContext) -> int:
    """Return the most blocks to reuse: never the whole prompt, so that at least one token is computed."""
    request, block_tokens = context.request, context.model.block_tokens
    most = (request.prompt_tokens - 1) // block_tokens
    return min(most, request.window_tokens // block_tokens - 1) if request.window_tokens else most


def replicas_used(context: PlacementContext) -> dict[str, Replica]:
    """Return, by pool node, the replica whose blocks the request can reuse there."""
    replication = context.state.replication
    found = ((match, replication.of(match.pool, match.replica)) for match in _usable(context))
    return {
        match.pool: replica
        for match, replica in found
        if replica is not None and match.blocks > replica.extent.had_blocks
    }


def without_replicas(context: PlacementContext, replicas: Mapping[str, Replica]) -> PoolMatches:
    """Return the matches as if no Copy had been made; blocks after a copied prefix count at its source."""
    found = {match.pool: match for match in _usable(context)}
    without = dict(found)
    for pool, replica in replicas.items():
        had_blocks = replica.extent.had_blocks
        without[pool] = replace(found[pool], blocks=had_blocks, ssd_blocks=min(found[pool].ssd_blocks, had_blocks))
    for pool, replica in replicas.items():
        blocks = found[pool].blocks
        source = without.get(replica.source, PoolMatch(replica.source, 0))
        if replica.extent.num_blocks < blocks and source.blocks < blocks and context.state.answers(source.pool):
            without[source.pool] = replace(source, blocks=blocks)
    return PoolMatches.of(*without.values())


def _usable(context: PlacementContext) -> list[PoolMatch]:
    """Return the matches that `find_prefixes` uses, one by one."""
    request, limit = context.request, most_reused(context)
    return [
        match if match.blocks <= limit else replace(match, blocks=limit, ssd_blocks=min(match.ssd_blocks, limit))
        for match in request.matches
        if match.pool not in request.excluded and context.state.answers(match.pool)
    ]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Findings about the prefill candidates of a request."""

    loads: Records  # NODE_LOAD [slots]
    position: QueuePosition
    prefixes: Prefixes
    scores: PrefillScores  # `queue_s`: only prefills that precede the request


def choose_prefill(context: PlacementContext, nodes: Candidates) -> PrefillChoice:
    """Find the request's queue position and prefixes, and score the candidates, in one compiled loop.

    The request takes its ticket: the virtual clock of its class advances.
    """
    state, matches = context.state, context.request.matches

    def reusable_tokens() -> int:
        return find_prefixes(context, matches, nodes, state.tally(context.now_ns)).best * context.model.block_tokens

    shares, account, clock, key = ordering_key(context, reusable_tokens)
    loads, candidates = state.node_loads(), _records(context, nodes)
    clock.now_ns, ticket_ns, best, blocks, ssd_blocks, num_sends, chosen, ttft_s, idle_s = (
        prefill_kernels().score_arrival(
            state.requests.records,
            _arrival(context, key, (clock.now_ns, clock.started_ns, account.finish_ns)),
            _usable_matches(context, matches),
            loads,
            context.costs.slowdowns.factors,
            context.costs.terms.prefill_record,
            context.state.transfers.record,
            candidates,
        )
    )
    if state.places_blindly:
        chosen, ttft_s = choose_blindly(context, candidates)
    position = QueuePosition(shares, account, key, loads, ticket_ns)
    prefixes = Prefixes(candidates, blocks, ssd_blocks, matches.roster[best] if best >= 0 else "", num_sends)
    return PrefillChoice(loads, position, prefixes, PrefillScores.of(candidates, chosen, ttft_s, idle_s))

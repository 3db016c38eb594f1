"""What of a request's prompt pool nodes hold that it may use, and what is owed to copies of prefixes among it."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from conductor.policy.algorithm1 import Prefixes
from conductor.policy.events import PoolMatch, PoolMatches, RequestArrived
from conductor.policy.kernels import kernels
from conductor.policy.nodes import Candidates, ModelNodes
from conductor.policy.replication import Replica
from conductor.policy.requests import NONE
from conductor.policy.state import ClusterState

__all__ = ["find_prefixes", "most_reused", "replicas_used", "usable_slots", "without_replicas"]

Ints = NDArray[np.int64]


def find_prefixes(
    state: ClusterState,
    request: RequestArrived,
    model: ModelNodes,
    matches: PoolMatches,
    prefill: Candidates,
    sums: Ints,
) -> Prefixes:
    """What pool nodes that answer and are not excluded hold. `sums` [slots, 3]: what `state.tally` found."""
    slots, pool_slots = usable_slots(state, request, matches), prefill.pool_slots
    own, limit = np.empty((2, len(pool_slots)), np.int64), most_reused(request, model)
    best, have, on_ssd, num_sends = kernels().prefixes(
        matches.blocks, matches.ssd_blocks, slots, limit, state.copy_sends(), sums, pool_slots, own
    )
    return Prefixes(own, have, on_ssd, matches.roster[best] if best >= 0 else "", num_sends)


def usable_slots(state: ClusterState, request: RequestArrived, matches: PoolMatches) -> Ints:
    """Of each pool node of the roster its slot; NONE for those that do not answer or are excluded."""
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


def _usable(state: ClusterState, request: RequestArrived, model: ModelNodes) -> list[PoolMatch]:
    """What `find_prefixes` goes by, one by one."""
    limit = most_reused(request, model)
    return [
        match if match.blocks <= limit else replace(match, blocks=limit, ssd_blocks=min(match.ssd_blocks, limit))
        for match in request.matches
        if match.pool not in request.excluded and state.answers(match.pool)
    ]

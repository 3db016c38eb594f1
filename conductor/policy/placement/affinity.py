"""Session affinity: of the prefill nodes that are about equally fast for a request, the one that its session used.

Matched prefixes and queues are part of the predicted TTFT, so they decide wherever they make a difference. Affinity
decides among the rest: if a client has edited the beginning of its history, if the matching blocks have been evicted,
or if a restarted conductor does not know them yet. A session without a known node gets one by rendezvous hashing
(Thaler and Ravishankar, 1998), so that conductors which do not see each other's requests choose the same node.
"""

from typing import Final
from zlib import crc32

import numpy as np

from conductor.policy.nodes import Candidates
from conductor.policy.placement.prefill import PrefillScores
from conductor.policy.state import PlacementContext

__all__ = ["keep_affinity"]

_MOST_SLOWER: Final = 0.05
"""Fraction of the least predicted TTFT by which another node may be slower and still be preferred."""


def keep_affinity(context: PlacementContext, nodes: Candidates, scores: PrefillScores) -> PrefillScores:
    """Return `scores` with the session's node as the choice, if its TTFT is within the bound of the least.

    It must also have as much of the prompt's KV as the fastest one, so that affinity moves no KV between hosts.

    That node is the one that the session used last, else the one that its parent session used last, else the first by
    rendezvous hashing, by the parent's id if there is one, among the nodes within the bound. `nodes`: the candidates
    that `scores` describes.
    """
    ttft_s = scores.queue_s + scores.transfer_s + scores.prefill_s
    held = np.maximum(scores.candidates["own_blocks"], scores.candidates["local_blocks"])
    near = np.flatnonzero((ttft_s <= (1 + _MOST_SLOWER) * scores.ttft_s) & (held >= held[scores.chosen]))
    if len(near) < 2:
        return scores
    request, known = context.request, context.state.sessions_of(context.request.model)
    for session in (request.session, request.parent_session):
        if node_id := known.node_of(session):
            index = next((index for index in near.tolist() if nodes.ids[index] == node_id), scores.chosen)
            break
    else:
        weights = _weights(request.parent_session or request.session, [nodes.ids[index] for index in near.tolist()])
        index = int(near[weights.argmax()])
    if index == scores.chosen:
        return scores
    return PrefillScores.of(scores.candidates, index, float(ttft_s[index]), scores.idle_s)


def _weights(session: int, node_ids: list[str]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the nodes' weights for the session, uint64 [nodes]: SplitMix64's output function of both."""
    mixed = np.array([crc32(node_id.encode()) << 32 for node_id in node_ids], np.uint64) ^ np.uint64(session)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))

"""Choice among the prefill nodes that are about equally fast for a request: by its session, or spread over them.

Matched prefixes and queues are part of the predicted TTFT, so they decide wherever they make a difference. The session
decides among the rest: if a client has edited the beginning of its history, if the matching blocks have been evicted,
or if a restarted conductor does not know them yet. A session without a known node gets one by rendezvous hashing
(Thaler and Ravishankar, 1998), so that conductors which do not see each other's requests choose the same node. Requests
without a session are spread likewise if there are other conductors, which would choose the same fastest node until
its next report.
"""

from typing import Final
from zlib import crc32

import numpy as np

from conductor.policy.nodes import Candidates
from conductor.policy.placement.prefill import PrefillScores
from conductor.policy.state import PlacementContext

__all__ = ["choose_among_near"]

_MOST_SLOWER: Final = 0.05
"""Fraction of the least predicted TTFT by which another node may be slower and still be preferred."""


def choose_among_near(context: PlacementContext, nodes: Candidates, scores: PrefillScores) -> PrefillScores:
    """Return `scores` with a choice among the nodes whose TTFT is within the bound of the least.

    They must also have as much of the prompt's KV as the fastest one, so that the choice moves no KV between hosts. It
    is the node that the session used last, else the one that its parent session used last, else the first by rendezvous
    hashing: by the parent's id, the session's or, if there are other conductors, the request's. `nodes`: the candidates
    that `scores` describes.
    """
    request = context.request
    if not request.session and not context.state.seen_share.has_others(context.now_ns):
        return scores
    ttft_s = scores.queue_s + scores.transfer_s + scores.prefill_s
    held = np.maximum(scores.candidates["own_blocks"], scores.candidates["local_blocks"])
    near = np.flatnonzero((ttft_s <= (1 + _MOST_SLOWER) * scores.ttft_s) & (held >= held[scores.chosen]))
    if len(near) < 2:
        return scores
    known = context.state.sessions_of(request.model)
    for session in (request.session, request.parent_session):
        if node_id := known.node_of(session):
            index = next((index for index in near.tolist() if nodes.ids[index] == node_id), scores.chosen)
            break
    else:
        name = request.parent_session or request.session or crc32(request.request_id.encode())
        weights = _weights(name, [nodes.ids[index] for index in near.tolist()])
        index = int(near[weights.argmax()])
    if index == scores.chosen:
        return scores
    return PrefillScores.of(scores.candidates, index, float(ttft_s[index]), scores.idle_s)


def _weights(number: int, node_ids: list[str]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the nodes' weights for a session or a request, uint64 [nodes]: SplitMix64's output function of both."""
    mixed = np.array([crc32(node_id.encode()) << 32 for node_id in node_ids], np.uint64) ^ np.uint64(number)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))

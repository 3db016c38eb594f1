"""Choice of further prefill nodes that compute a long prompt together with the chosen one.

Mooncake's chunked pipeline parallelism (FAST'25, §5.1): each member computes every X-th chunk. Here every member holds
the whole model, so that a group is made for one request and none is kept.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conductor.policy.costs import PREFILL
from conductor.policy.events import NS
from conductor.policy.placement.candidates import FittingNodes
from conductor.policy.placement.prefill import PrefillScores
from conductor.policy.state import PlacementContext

__all__ = ["PrefillGroupPlan", "form_group"]

Floats = NDArray[np.float64]

# Time of a group's prefill beyond an equal part of the work: a share, since chunks wait for one another's layers and
# their KV is transferred, and a constant, since helpers are requested and the first chunk runs alone.
_OVERHEAD_SHARE = 0.15
_OVERHEAD_S = 0.03
_SAME_S = 1e-6  # sums of the same times in floats and in ns differ by less


@dataclass(frozen=True, slots=True)
class PrefillGroupPlan:
    """Helpers for a prompt, best first, and the times predicted with them."""

    helpers: tuple[str, ...]
    share_s: float  # that each of them computes
    prefill_s: float  # from the chosen node's turn to the first token
    ttft_s: float  # without the wait for decode pages


def form_group(
    context: PlacementContext, places: FittingNodes, scores: PrefillScores, work_s: Floats
) -> PrefillGroupPlan | None:
    """Return the group with the least TTFT if that is less than the chosen node's alone; of equals the smallest.

    `work_s` [candidates]: all prefill work placed there. A helper has no queued request that this one would precede,
    and is free before the chosen node alone would have finished, so no queued request waits longer.
    """
    state, request, nodes, chosen = context.state, context.request, places.prefill, scores.chosen
    config, slowdowns = state.config, context.costs.slowdowns
    new_tokens = request.prompt_tokens - scores.best.reuse_blocks * context.model.block_tokens
    if 0 < request.window_tokens < request.prompt_tokens + context.model.block_tokens:
        return None  # a window slides in the prompt
    if new_tokens < config.prefill_group_min_tokens or nodes.is_aggregated[chosen] or request.max_new_tokens <= 1:
        return None
    queue_s, alone_s = scores.queue_s, scores.best.prefill_s
    is_free = ~nodes.is_aggregated & (queue_s < alone_s) & (work_s - queue_s < _SAME_S)
    is_free[chosen] = False
    free = np.flatnonzero(is_free)
    head = state.nodes.get(nodes.ids[chosen])
    assert head is not None
    best: PrefillGroupPlan | None = None
    best_s = alone_s
    helpers: list[str] = []
    slowest = own_slowdown = slowdowns.of(PREFILL, int(nodes.slots[chosen]))
    for i in free[np.argsort(queue_s[free], kind="stable")].tolist():
        node = state.nodes.get(nodes.ids[i])
        if node is None or node.model_fingerprint != head.model_fingerprint:
            continue
        helpers.append(node.node_id)
        slowest = max(slowest, slowdowns.of(PREFILL, int(nodes.slots[i])))
        share_s = alone_s * slowest / own_slowdown / (1 + len(helpers))
        lag_s = max(0.0, float(queue_s[i] - queue_s[chosen]))
        group_s = lag_s + share_s * (1 + _OVERHEAD_SHARE) + _OVERHEAD_S
        if group_s < best_s:
            best_s = group_s
            best = PrefillGroupPlan(tuple(helpers), share_s, group_s, scores.ttft_s - alone_s + group_s)
        if len(helpers) + 1 >= config.prefill_group_size:
            break
    return best


def work_at_hand_s(places: FittingNodes, loads: NDArray[np.void], group_s: Floats | None) -> Floats:
    """Return seconds of all prefill work placed on each candidate, with its parts of groups (`group_s`, per slot)."""
    slots = places.prefill.slots
    work_s: Floats = loads["queued_ns"][slots] / NS
    return work_s if group_s is None else work_s + group_s[slots]

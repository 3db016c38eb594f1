"""Replication of hot prefixes: which prefix is worth a copy, and where, by predicted saving against predicted cost.

Two occasions, both at a request that was just placed. *Fetched* (Algorithm 1's last line): the chosen
node's pool receives the prefix that it had to fetch. *Ahead of need*: the prefix takes so much of its holders' time
that the next requests would queue there, so another pool receives it first. In both cases the copy must be predicted to
save more than it costs.
"""

import numpy as np

from conductor.policy.decisions import Copy
from conductor.policy.nodes import Candidates
from conductor.policy.placement.prefill import PrefillScores, Prefixes
from conductor.policy.replication import PrefixExtent
from conductor.policy.state import ClusterState, PlacementContext

__all__ = ["copy_after"]

_LIKELY_USES = 2.0  # uses within the horizon from which a prefix is expected to be used again
_HIGHEST_LOAD = 0.95  # the queue is predicted for at most this


def copy_after(context: PlacementContext, nodes: Candidates, prefixes: Prefixes, scores: PrefillScores) -> Copy | None:
    """Return the copy to begin now that the request runs on the chosen one of `nodes`, if one pays."""
    state, match_key = context.state, context.request.match_key
    if not prefixes.best or not state.config.max_copies:
        return None
    # Other conductors' requests are assumed to use the same prefixes as those that are seen here.
    uses = state.prefix_hits.use(context.now_ns, match_key, state.seen_share.requests_per_own)
    if scores.best.fetches:
        # Algorithm 1 as printed copies every prefix that it fetches.
        is_printed = state.config.placement == "algorithm1"
        target, pays = scores.chosen, is_printed or _pays_fetched(context, prefixes, scores, uses)
    elif state.config.placement != "moonpool":
        return None
    else:
        found = _relief(state, nodes, prefixes, scores, uses)
        if found is None:
            return None
        target, pays = found, _pays_ahead(context, prefixes, scores, found, uses)
    pool, had = nodes.pools[target], int(prefixes.own[target])
    if not pays or not state.answers(pool):
        return None
    if not state.copies.try_begin(prefixes.best_pool, pool, match_key, PrefixExtent(prefixes.best, had)):
        return None
    return Copy(prefixes.best_pool, pool, prefixes.best, match_key)


def _pays_fetched(context: PlacementContext, prefixes: Prefixes, scores: PrefillScores, uses: float) -> bool:
    """Return True if a copy of the fetched prefix pays: without it the next use on this node would fetch it again.

    The blocks that this request adds can be reused here only if its prefix is here, too.
    """
    fetch_s, load_s = _reads_s(context, prefixes, scores.chosen, prefixes.num_sends)
    expected = context.state.replication.used_again + max(0.0, uses - 1) / _num_holders(prefixes)
    saved_s = expected * (fetch_s - load_s + scores.best.prefill_s)
    return saved_s > fetch_s


def _pays_ahead(context: PlacementContext, prefixes: Prefixes, scores: PrefillScores, target: int, uses: float) -> bool:
    """Return True if a copy ahead of need pays: it saves the lesser of waiting at a holder and of fetching."""
    chosen_s = scores.best.prefill_s
    load = min(_HIGHEST_LOAD, _load(context.state, prefixes, chosen_s, uses))
    # Mean wait of a queue with even service times (M/D/1), or what waits there already.
    wait_s = chosen_s * load / (2 * (1 - load))
    wait_s = max(wait_s, float(scores.queue_s[scores.chosen] - scores.queue_s[target]))
    cost_s, load_s = _reads_s(context, prefixes, target, prefixes.num_sends)
    fetch_s, _ = _reads_s(context, prefixes, target, prefixes.num_sends + 1)
    expected = max(0.0, uses - 1) / (_num_holders(prefixes) + 1)
    return expected * min(wait_s, fetch_s - load_s) > cost_s


def _relief(
    state: ClusterState, nodes: Candidates, prefixes: Prefixes, scores: PrefillScores, uses: float
) -> int | None:
    """Return the candidate with the shortest queue among those that could get the prefix.

    None while the prefix's holders can serve it alone.
    """
    if uses < _LIKELY_USES or _load(state, prefixes, scores.best.prefill_s, uses) < state.config.hot_load:
        return None
    without = np.flatnonzero(~_has_prefix(state, prefixes) & (nodes.pool_slots >= 0))
    return int(without[np.argmin(scores.queue_s[without])]) if len(without) else None


def _load(state: ClusterState, prefixes: Prefixes, prefill_s: float, uses: float) -> float:
    """Share of its holders' time that the prefix's requests take, each `prefill_s`."""
    num_nodes = max(1, int(np.count_nonzero(_has_prefix(state, prefixes))))
    return uses * prefill_s / (state.config.replication_horizon_s * num_nodes)


def _has_prefix(state: ClusterState, prefixes: Prefixes) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    return prefixes.own * state.config.balancing_threshold >= prefixes.best


def _num_holders(prefixes: Prefixes) -> int:
    return max(1, int(np.count_nonzero(prefixes.own == prefixes.best)))


def _reads_s(context: PlacementContext, prefixes: Prefixes, index: int, num_sends: int) -> tuple[float, float]:
    """Seconds to read what candidate `index` lacks of the prefix: from its best holder, and from its own pool."""
    transfers, block_nbytes = context.state.transfers, context.model.block_nbytes
    nbytes = float(prefixes.best - int(prefixes.own[index])) * block_nbytes
    on_ssd = min(nbytes, float(prefixes.best_ssd * block_nbytes))
    return transfers.fetch_s(nbytes, num_sends) + transfers.ssd_read_s(on_ssd), transfers.load_s(nbytes)

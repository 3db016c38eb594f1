"""Replication of hot prefixes: which prefix is worth a copy, and where, by predicted saving against predicted cost.

Two occasions, both at a request that was just placed. *Fetched* (Algorithm 1's last line): the chosen node stores the
prefix that it has to fetch in its own pool, too. *Ahead of need*: the prefix takes so much of its holders' time that
the next requests would queue there, so another pool receives it first. In both cases the copy must be predicted to save
more than it costs.
"""

from dataclasses import replace

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
    """Return the copy to begin now that the request runs on the chosen one of `nodes`, if one pays.

    A fetched prefix becomes a replica at once: if the node does not store it, it is dropped as an unused one.
    """
    state = context.state
    if not prefixes.best or not state.config.max_copies:
        return None
    # Other conductors' requests are assumed to use the same prefixes as those that are seen here.
    uses = state.prefix_hits.use(context.now_ns, context.request.match_key, state.seen_share.requests_per_own)
    if scores.best.fetches:
        return _after_fetch(context, nodes, prefixes, scores, uses)
    return _ahead_of_need(context, nodes, prefixes, scores, uses) if state.config.placement == "moonpool" else None


def _after_fetch(
    context: PlacementContext, nodes: Candidates, prefixes: Prefixes, scores: PrefillScores, uses: float
) -> Copy | None:
    state, target = context.state, scores.chosen
    if state.config.placement == "algorithm1":  # as printed: every prefix that is fetched is copied
        return _begin(context, nodes, prefixes, target)
    if not _pays_fetched(context, prefixes, scores, uses) or not state.answers(nodes.pools[target]):
        return None
    copy = replace(_copy_to(context, nodes, prefixes, target), keeps_fetched=True)
    state.replication.made(context.now_ns, copy, PrefixExtent(prefixes.best, int(prefixes.own[target])))
    return copy


def _ahead_of_need(
    context: PlacementContext, nodes: Candidates, prefixes: Prefixes, scores: PrefillScores, uses: float
) -> Copy | None:
    if uses < _LIKELY_USES:
        return None
    busy_s = _busy_s(context, nodes, prefixes, scores)
    target = _relief(context.state, nodes, prefixes, scores, uses, busy_s)
    if target is None or not _pays_ahead(context, prefixes, scores, target, uses, busy_s):
        return None
    return _begin(context, nodes, prefixes, target)


def _begin(context: PlacementContext, nodes: Candidates, prefixes: Prefixes, target: int) -> Copy | None:
    """Return the copy to the pool of the candidate at `target`, unless it is in flight or would exceed a limit."""
    state, copy = context.state, _copy_to(context, nodes, prefixes, target)
    extent = PrefixExtent(prefixes.best, int(prefixes.own[target]))
    if not state.answers(copy.target) or not state.copies.try_begin(copy.source, copy.target, copy.match_key, extent):
        return None
    return copy


def _copy_to(context: PlacementContext, nodes: Candidates, prefixes: Prefixes, target: int) -> Copy:
    return Copy(prefixes.best_pool, nodes.pools[target], prefixes.best, context.request.match_key)


def _pays_fetched(context: PlacementContext, prefixes: Prefixes, scores: PrefillScores, uses: float) -> bool:
    """Return True if storing the fetched prefix pays: without it the next use on this node would fetch it again.

    The blocks that this request adds can be reused here only if its prefix is here, too. Storing takes as long as
    loading, within the host.
    """
    fetch_s, load_s = _reads_s(context, prefixes, scores.chosen, prefixes.num_sends)
    expected = context.state.replication.used_again + max(0.0, uses - 1) / _num_holders(prefixes)
    saved_s = expected * (fetch_s - load_s + scores.best.prefill_s)
    return saved_s > load_s


def _busy_s(context: PlacementContext, nodes: Candidates, prefixes: Prefixes, scores: PrefillScores) -> float:
    """Seconds for which a request behind the prefix keeps its holder busy.

    The holder computes the rest of the prompt while it sends the prefix to the decode node; the longer one counts.
    """
    prefill_s = scores.best.prefill_s
    if nodes.is_aggregated.item(scores.chosen):
        return prefill_s
    nbytes = float(context.model.read_nbytes(prefixes.best))
    return max(prefill_s, context.state.transfers.fetch_s(nbytes, 0))


def _pays_ahead(
    context: PlacementContext, prefixes: Prefixes, scores: PrefillScores, target: int, uses: float, busy_s: float
) -> bool:
    """Return True if a copy ahead of need pays: it saves the lesser of waiting at a holder and of fetching."""
    load = min(_HIGHEST_LOAD, _load(context.state, prefixes, busy_s, uses))
    # Mean wait of a queue with even service times (M/D/1), or what waits there already.
    wait_s = busy_s * load / (2 * (1 - load))
    wait_s = max(wait_s, float(scores.queue_s[scores.chosen] - scores.queue_s[target]))
    cost_s, load_s = _reads_s(context, prefixes, target, prefixes.num_sends)
    fetch_s, _ = _reads_s(context, prefixes, target, prefixes.num_sends + 1)
    expected = max(0.0, uses - 1) / (_num_holders(prefixes) + 1)
    return expected * min(wait_s, fetch_s - load_s) > cost_s


def _relief(
    state: ClusterState, nodes: Candidates, prefixes: Prefixes, scores: PrefillScores, uses: float, busy_s: float
) -> int | None:
    """Return the candidate with the shortest queue among those that could get the prefix.

    None while the prefix's holders can serve it alone.
    """
    if _load(state, prefixes, busy_s, uses) < state.config.hot_load:
        return None
    without = np.flatnonzero(~_has_prefix(state, prefixes) & (nodes.pool_slots >= 0))
    return int(without[np.argmin(scores.queue_s[without])]) if len(without) else None


def _load(state: ClusterState, prefixes: Prefixes, busy_s: float, uses: float) -> float:
    """Share of its holders' time that the prefix's requests take, each `busy_s`."""
    num_nodes = max(1, int(np.count_nonzero(_has_prefix(state, prefixes))))
    return uses * busy_s / (state.config.replication_horizon_s * num_nodes)


def _has_prefix(state: ClusterState, prefixes: Prefixes) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    return prefixes.own * state.config.balancing_threshold >= prefixes.best


def _num_holders(prefixes: Prefixes) -> int:
    return max(1, int(np.count_nonzero(prefixes.own == prefixes.best)))


def _reads_s(context: PlacementContext, prefixes: Prefixes, index: int, num_sends: int) -> tuple[float, float]:
    """Seconds to read what candidate `index` lacks of the prefix: from its best holder, and from its own pool."""
    transfers, model = context.state.transfers, context.model
    nbytes = float(model.read_nbytes(prefixes.best - int(prefixes.own[index])))
    on_ssd = min(nbytes, float(model.read_nbytes(prefixes.best_ssd)))
    return transfers.fetch_s(nbytes, num_sends) + transfers.ssd_read_s(on_ssd), transfers.load_s(nbytes)

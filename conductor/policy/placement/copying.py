"""Which prefix is worth copying where: predicted saving against predicted cost. It reads the state and decides.

Two occasions, both at a request that was just placed. *Fetched*: Algorithm 1's last line, the chosen node's pool gets
the prefix that it had to fetch. *Ahead of need*: the prefix takes so much of its holders' time that the next requests
would queue there, so another pool gets it before they do. In both the copy must be predicted to save more than it
costs.
"""

import numpy as np

from conductor.policy.costs import TransferCosts
from conductor.policy.decisions import Copy
from conductor.policy.events import RequestArrived
from conductor.policy.nodes import Candidates
from conductor.policy.placement.prefill import PrefillScores, Prefixes
from conductor.policy.replication import PrefixExtent
from conductor.policy.state import ClusterState

__all__ = ["copy_after"]

_LIKELY_USES = 2.0  # uses within the horizon from which on a prefix counts as one that comes back
_HIGHEST_LOAD = 0.95  # the queue is predicted for at most this


def copy_after(
    now_ns: int,
    state: ClusterState,
    request: RequestArrived,
    nodes: Candidates,
    prefixes: Prefixes,
    scores: PrefillScores,
    chosen: int,
    block_nbytes: int,
) -> Copy | None:
    """The copy to begin now that the request runs on candidate `chosen`, if one pays."""
    if not prefixes.best or not state.config.max_copies:
        return None
    uses = state.prefix_hits.use(now_ns, request.match_key)
    if scores.fetches[chosen]:
        target, pays = chosen, _pays_fetched(state, prefixes, scores, chosen, uses, block_nbytes)
    else:
        found = _relief(state, nodes, prefixes, scores, chosen, uses)
        if found is None:
            return None
        target, pays = found, _pays_ahead(state, nodes, prefixes, scores, chosen, found, uses, block_nbytes)
    pool, had = nodes.pools[target], int(prefixes.own[target])
    if not pays or not state.answers(pool):
        return None
    if not state.copies.try_begin(prefixes.best_pool, pool, request.match_key, PrefixExtent(prefixes.best, had)):
        return None
    return Copy(prefixes.best_pool, pool, prefixes.best, request.match_key)


def _pays_fetched(
    state: ClusterState, prefixes: Prefixes, scores: PrefillScores, chosen: int, uses: float, block_nbytes: int
) -> bool:
    """The next use here would fetch again, and what this request adds is found here only behind its prefix."""
    fetch_s, load_s = _reads_s(state.transfers, prefixes, chosen, block_nbytes, prefixes.num_sends)
    expected = state.replication.used_again + max(0.0, uses - 1) / _num_holders(prefixes)
    saved_s = expected * (fetch_s - load_s + float(scores.prefill_s[chosen]))
    return saved_s > fetch_s


def _pays_ahead(
    state: ClusterState,
    nodes: Candidates,
    prefixes: Prefixes,
    scores: PrefillScores,
    chosen: int,
    target: int,
    uses: float,
    block_nbytes: int,
) -> bool:
    """Without a copy to go to a request either waits at a holder or fetches: a copy saves the less of both."""
    load = min(_HIGHEST_LOAD, _load(state, nodes, prefixes, scores, chosen, uses))
    # Mean wait of a queue with even service times (M/D/1), or what waits there already.
    wait_s = float(scores.prefill_s[chosen]) * load / (2 * (1 - load))
    wait_s = max(wait_s, float(scores.queue_s[chosen] - scores.queue_s[target]))
    cost_s, load_s = _reads_s(state.transfers, prefixes, target, block_nbytes, prefixes.num_sends)
    fetch_s, _ = _reads_s(state.transfers, prefixes, target, block_nbytes, prefixes.num_sends + 1)
    expected = max(0.0, uses - 1) / (_num_holders(prefixes) + 1)
    return expected * min(wait_s, fetch_s - load_s) > cost_s


def _relief(
    state: ClusterState, nodes: Candidates, prefixes: Prefixes, scores: PrefillScores, chosen: int, uses: float
) -> int | None:
    """The candidate with the shortest queue among those that could get the prefix; None while its holders can do it
    alone."""
    if uses < _LIKELY_USES or _load(state, nodes, prefixes, scores, chosen, uses) < state.config.hot_load:
        return None
    without = np.flatnonzero(~_has_prefix(state, prefixes) & (nodes.pool_slots >= 0))
    return int(without[np.argmin(scores.queue_s[without])]) if len(without) else None


def _load(
    state: ClusterState, nodes: Candidates, prefixes: Prefixes, scores: PrefillScores, chosen: int, uses: float
) -> float:
    """Share of its holders' time that the prefix's requests take, each like this one."""
    num_nodes = max(1, int(np.count_nonzero(_has_prefix(state, prefixes))))
    return uses * float(scores.prefill_s[chosen]) / (state.config.replication_horizon_s * num_nodes)


def _has_prefix(state: ClusterState, prefixes: Prefixes) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    return prefixes.own * state.config.balancing_threshold >= prefixes.best


def _num_holders(prefixes: Prefixes) -> int:
    return max(1, int(np.count_nonzero(prefixes.own == prefixes.best)))


def _reads_s(
    transfers: TransferCosts, prefixes: Prefixes, index: int, block_nbytes: int, num_sends: int
) -> tuple[float, float]:
    """Seconds to read what candidate `index` lacks of the prefix: from its best holder, and from its own pool."""
    nbytes = float(prefixes.best - int(prefixes.own[index])) * block_nbytes
    on_ssd = min(nbytes, float(prefixes.best_ssd * block_nbytes))
    return transfers.fetch_s(nbytes, num_sends) + transfers.ssd_read_s(on_ssd), transfers.load_s(nbytes)

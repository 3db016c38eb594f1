"""Mooncake's Algorithm 1 (FAST'25, §5.1): who reaches the first token soonest, fetching a prefix or not."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conductor.policy.costs import ModelCosts, TransferCosts
from conductor.policy.decisions import Holder, PrefillScore
from conductor.policy.kernels import kernels
from conductor.policy.quick import quick

__all__ = ["PrefillScores", "Prefixes", "holders", "score_prefill"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@quick
@dataclass(frozen=True, slots=True)
class Prefixes:
    """What of the prompt the pool holds, in blocks; never the whole prompt, so at least one token is computed."""

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


@quick
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
    block_tokens: int,
    block_nbytes: int,
    balancing_threshold: float,
    slots: Ints,
    costs: ModelCosts,
    transfers: TransferCosts,
) -> PrefillScores:
    """Algorithm 1's loop over the prefill instances. A prefix of 0 makes the ratio infinite, if anybody has one."""
    count = len(queue_s)
    seconds, reuse, fetches = np.empty((2, count)), np.empty(count, np.int64), np.empty(count, np.bool_)
    chosen, ttft_s = kernels().score_prefill(
        prefixes.held,
        queue_s,
        prefixes.best,
        prefixes.best_ssd,
        prefixes.num_sends,
        prompt_tokens,
        block_tokens,
        block_nbytes,
        balancing_threshold,
        slots,
        costs.paces.slowdown,
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


def holders(own_pool: str, index: int, prefixes: Prefixes, fetches: bool) -> tuple[Holder, ...]:
    """Who holds [0, reuse) for the candidate at `index`: its own pool as far as it goes, then the best one."""
    own = prefixes.held.item(0, index)
    here = (Holder(own_pool, 0, own, prefixes.held.item(1, index)),) if own else ()
    if not fetches:
        return here
    missing = prefixes.best - own
    return (*here, Holder(prefixes.best_pool, own, missing, min(missing, prefixes.best_ssd)))

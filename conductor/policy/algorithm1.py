"""Mooncake's Algorithm 1 (FAST'25, §5.1): who reaches the first token soonest, fetching a prefix or not."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conductor.policy.costs import ModelCosts, TransferCosts
from conductor.policy.decisions import Holder, PrefillScore

__all__ = ["PrefillScores", "Prefixes", "best_holder", "holders", "score_prefill"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What of the prompt the pool holds, in blocks; never the whole prompt, so at least one token is computed."""

    own: Ints  # per candidate: what its own host's pool node holds
    best: int  # what `best_pool` holds, the most of all
    best_pool: str  # "" when nobody holds anything
    num_sends: int  # prefixes and copies that `best_pool` sends already


@dataclass(frozen=True, slots=True)
class PrefillScores:
    """Predicted seconds per candidate, and how many blocks each would reuse; `fetches`: from the best pool node."""

    transfer_s: Floats
    queue_s: Floats
    prefill_s: Floats
    reuse_blocks: Ints
    fetches: NDArray[np.bool_]

    @property
    def ttft_s(self) -> Floats:
        """t_transfer + t_queue + t_prefill."""
        return self.transfer_s + self.queue_s + self.prefill_s

    def explain(self, ids: tuple[str, ...]) -> tuple[PrefillScore, ...]:
        """Every candidate's terms."""
        columns = (self.transfer_s, self.queue_s, self.prefill_s, self.reuse_blocks)
        return tuple(PrefillScore(*row) for row in zip(ids, *(column.tolist() for column in columns), strict=True))


def best_holder(matches: dict[str, int], limit: int, sends: dict[str, int]) -> tuple[str, int]:
    """(pool node, blocks): the longest match, cut to `limit` blocks; of equals the one that sends least."""
    held = [(-min(blocks, limit), sends.get(pool, 0), pool) for pool, blocks in matches.items() if min(blocks, limit)]
    if not held:
        return "", 0
    blocks, _, pool = min(held)
    return pool, -blocks


def score_prefill(
    prefixes: Prefixes,
    queue_s: Floats,
    *,
    prompt_tokens: int,
    block_tokens: int,
    block_nbytes: int,
    balancing_threshold: float,
    costs: ModelCosts,
    transfers: TransferCosts,
) -> PrefillScores:
    """Algorithm 1's loop over the prefill instances. A prefix of 0 makes the ratio infinite, if anybody has one."""
    # best / own > threshold, without the division by zero
    fetches = prefixes.best > balancing_threshold * prefixes.own
    reuse = np.where(fetches, prefixes.best, prefixes.own)
    missing_nbytes = np.where(fetches, prefixes.best - prefixes.own, 0).astype(np.float64) * block_nbytes
    return PrefillScores(
        transfers.pool_read_s(missing_nbytes, prefixes.num_sends),
        queue_s,
        costs.prefill_s(prompt_tokens, (reuse * block_tokens).astype(np.float64)),
        reuse,
        fetches,
    )


def holders(own_pool: str, own_blocks: int, prefixes: Prefixes, fetches: bool) -> tuple[Holder, ...]:
    """Who holds [0, reuse): the node's own pool as far as it goes, then the best one."""
    found = [Holder(own_pool, 0, own_blocks)] if own_blocks else []
    if fetches:
        found.append(Holder(prefixes.best_pool, own_blocks, prefixes.best - own_blocks))
    return tuple(found)

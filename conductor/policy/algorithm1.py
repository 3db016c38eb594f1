"""Mooncake's Algorithm 1 (FAST'25, §5.1): who reaches the first token soonest, fetching a prefix or not."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conductor.policy.costs import ModelCosts, TransferCosts
from conductor.policy.decisions import Holder, PrefillScore
from conductor.policy.events import PoolMatch

__all__ = ["PrefillScores", "Prefixes", "best_holder", "holders", "score_prefill"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What of the prompt the pool holds, in blocks; never the whole prompt, so at least one token is computed."""

    own: Ints  # per candidate: what its own host's pool node holds
    own_ssd: Ints  # of that, what is on SSD only
    best: int  # what `best_pool` holds, the most of all
    best_ssd: int  # of that, what is on SSD only
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


def best_holder(matches: Iterable[PoolMatch], sends: dict[str, int]) -> PoolMatch | None:
    """The longest match; of equals the one with least on SSD, then the one that sends least."""
    held = [match for match in matches if match.blocks]
    return min(held, key=lambda m: (-m.blocks, m.ssd_blocks, sends.get(m.pool, 0), m.pool), default=None)


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
    missing = np.where(fetches, prefixes.best - prefixes.own, 0)
    on_ssd = prefixes.own_ssd + np.minimum(missing, prefixes.best_ssd)
    return PrefillScores(
        transfers.load_s(_nbytes(prefixes.own, block_nbytes))
        + transfers.ssd_read_s(_nbytes(on_ssd, block_nbytes))
        + transfers.fetch_s(_nbytes(missing, block_nbytes), prefixes.num_sends),
        queue_s,
        costs.prefill_s(prompt_tokens, (reuse * block_tokens).astype(np.float64)),
        reuse,
        fetches,
    )


def holders(own_pool: str, index: int, prefixes: Prefixes, fetches: bool) -> tuple[Holder, ...]:
    """Who holds [0, reuse) for the candidate at `index`: its own pool as far as it goes, then the best one."""
    own = int(prefixes.own[index])
    found = [Holder(own_pool, 0, own, int(prefixes.own_ssd[index]))] if own else []
    if fetches:
        missing = prefixes.best - own
        found.append(Holder(prefixes.best_pool, own, missing, min(missing, prefixes.best_ssd)))
    return tuple(found)


def _nbytes(blocks: Ints, block_nbytes: int) -> Floats:
    return blocks.astype(np.float64) * block_nbytes

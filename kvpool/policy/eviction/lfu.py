"""Least frequently used first."""

from kvpool.policy.eviction.base import Resident
from kvpool.policy.eviction.ranked import Rank, RankedPolicy

__all__ = ["Lfu"]


class Lfu(RankedPolicy):
    """The block with the fewest uses since it came leaves; among equals the one whose last use is the oldest.

    Uses are forgotten with the block: one that comes back starts anew.
    """

    def rank(self, block: Resident, num_uses: int) -> Rank:
        return (block.hits, num_uses)

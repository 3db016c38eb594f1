"""Least frequently used first, and of those the furthest from its prompt's beginning.

Source: LengthAwareCache of the Mooncake paper (Qin et al., 2024: "similar to LFU but prioritizing evicting cache blocks
occurring later in requests").
"""

from kvpool.policy.eviction.base import Resident
from kvpool.policy.eviction.ranked import Rank, RankedPolicy

__all__ = ["LengthAware"]


class LengthAware(RankedPolicy):
    """The block with the fewest uses since it came leaves; among equals the deepest; then the least recently used."""

    def rank(self, block: Resident, num_uses: int) -> Rank:
        return (block.hits, -block.depth, num_uses)

"""Least recently used first."""

from kvpool.policy.eviction.base import Resident
from kvpool.policy.eviction.ranked import Rank, RankedPolicy

__all__ = ["Lru"]


class Lru(RankedPolicy):
    """The block whose last use is the oldest leaves. Uses are counted, not timed, so there are no ties."""

    def rank(self, block: Resident, num_uses: int) -> Rank:
        return (num_uses,)

"""Interface between a tier and its eviction policy. No tier, tree or lease lives here.

The tier knows the tree and the leases; the policy only orders. A block is *offered* when it may be evicted: it is
sealed, not leased, and no block of the tier follows it (leaf first). A policy may keep offered blocks in any structure,
with stale entries: `pop` asks `may_take` before it evicts a block.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """One request's use of blocks: a look-up that found them, or the put that stored them."""

    now_ns: int
    request_blocks: int = 0  # blocks of the whole prompt (and answer) that the request is about; 0 = not known
    stores: bool = False  # the put of what a request computed: the blocks that it finds were looked up before
    after: object = None  # of such a put: the key of the block that its first one comes after, if it is not the first


@dataclass(slots=True, eq=False)
class Resident:
    """One block in one tier. The tier updates the facts; `rank`, `hits` and `state` belong to the policy."""

    key: object  # hashable, unique within the tier; stable when a block comes back
    parent: object  # the key of the block before it; None for a prompt's first
    nbytes: int
    depth: int = 0  # blocks before it in its chain, as far as known
    cost_s: float = 0.0  # what computing it took, 0 = not known
    num_tokens: int = 0  # of a partial block; 0 = full
    replicas: int = 0  # copies on other nodes, as last told
    in_slower_tier: bool = False  # a slower tier has it too: leaving here loses nothing but time
    born_ns: int = 0
    used_ns: int = 0  # last use; while a policy is told of a hit still the one before it
    hits: int = 0  # uses after the one that stored it
    rank: float = 0.0
    state: object = None


class _SeenEnough(Exception):
    """Ends a `pop` that only looks."""


class EvictionPolicy(ABC):
    """Orders the blocks of one tier by the loss that their eviction causes."""

    def admits(self, block: Resident, use: Use) -> bool:
        """Return True if a missing block is worth evicting another. Default: always.

        Called before the first `pop` that makes room for the block.
        """
        return True

    @abstractmethod
    def insert(self, block: Resident, use: Use) -> None:
        """Add a block to the tier; `block.key` may have been here before (ghosts)."""

    @abstractmethod
    def hit(self, block: Resident, use: Use) -> None:
        """Record that a request used the block. A prompt's blocks come in order, first to last."""

    @abstractmethod
    def offer(self, block: Resident) -> None:
        """Mark the block as evictable until `may_take` returns False. May be repeated for the same block."""

    @abstractmethod
    def pop(self, now_ns: int, may_take: Callable[[Resident], bool]) -> Resident | None:
        """Choose and remove the least valuable block; return None if no offered block may be evicted.

        An offered block that may not be evicted now is skipped, and offered again when that changes. `may_take` may
        raise: then nothing was removed, and the block in question is offered again at once.
        """

    def next_victims(self, now_ns: int, count: int, may_take: Callable[[Resident], bool]) -> list[Resident]:
        """Return up to `count` blocks that `pop` would choose next, first one first; they all stay."""
        seen: list[Resident] = []

        def look(block: Resident) -> bool:
            if may_take(block):
                seen.append(block)
                if len(seen) >= count:
                    raise _SeenEnough
            return False

        with contextlib.suppress(_SeenEnough):
            self.pop(now_ns, look)
        for block in seen:
            self.offer(block)
        return seen

    @abstractmethod
    def remove(self, block: Resident) -> None:
        """Remove a block for another reason than `pop`: removed, corrupt, moved."""

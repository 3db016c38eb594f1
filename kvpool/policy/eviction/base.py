"""Interface between a tier and its eviction policy.

The tier maintains the prefix tree and the leases; the policy only orders blocks. A block is *offered* when it may be
evicted: it is sealed, not leased, and has no followers in the tier (leaf first). A policy may keep offered blocks in
any structure, with stale entries: `pop` calls `may_take` before it evicts a block.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jit.fast_dataclass import fast_dataclass


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Use:
    """One request's use of blocks: a look-up that found them, or the put that stored them."""

    now_ns: int
    request_blocks: int = 0  # blocks of the request's whole prompt (and answer); 0 = unknown
    stores: bool = False  # a put of what a request computed: the blocks that it finds were looked up before
    after: object = None  # for such a put: key of the block before its first one; None if it begins a prompt


@dataclass(slots=True, eq=False)
class Resident:
    """One block in one tier. The tier updates the facts; `rank`, `hits` and `state` belong to the policy."""

    key: object  # hashable, unique within the tier, the same if the block returns
    parent: object  # the key of the block before it; None for a prompt's first
    nbytes: int
    depth: int = 0  # blocks before it in its chain, as far as known
    cost_s: float = 0.0  # time that computing it took; 0 = unknown
    num_tokens: int = 0  # of a partial block; 0 = full
    replicas: int = 0  # copies on other nodes, as last reported
    in_slower_tier: bool = False  # a slower tier has it too: evicting it here costs only the time of loading it
    born_ns: int = 0
    used_ns: int = 0  # last use; during `hit`, the one before
    hits: int = 0  # uses after the one that stored it
    rank: float = 0.0
    state: object = None


class _SeenEnough(Exception):
    """Raised by `next_victims` to end its `pop`."""


class EvictionPolicy(ABC):
    """Orders the blocks of one tier by the loss that their eviction causes."""

    def expect(self, parent: object, depth: int, keys: Sequence[object], last_tokens: int, use: Use) -> None:
        """Prepare for missing blocks that follow `parent` in a row, the first at `depth`; the default does nothing.

        The tier then asks for room for them in this order, until one is refused. `last_tokens` is the number of tokens
        of the last block, 0 if it is full.
        """
        return

    def admits(self, block: Resident, use: Use) -> bool:
        """Return True if a missing block is worth evicting another; the default is always.

        Called before the first `pop` that makes room for the block.
        """
        return True

    def keep_to_recency(self) -> None:
        """Evict the least recently used blocks from now on; the default does nothing."""
        return

    @abstractmethod
    def insert(self, block: Resident, use: Use) -> None:
        """Add a block to the tier; `block.key` may have been here before (ghosts)."""

    @abstractmethod
    def hit(self, block: Resident, use: Use) -> None:
        """Record that a request used the block. Called for a prompt's blocks in order, first to last."""

    @abstractmethod
    def offer(self, block: Resident) -> None:
        """Mark the block as evictable until `may_take` returns False. May be repeated for the same block."""

    @abstractmethod
    def pop(self, now_ns: int, may_take: Callable[[Resident], bool]) -> Resident | None:
        """Remove and return the least valuable block; return None if no offered block may be evicted.

        A block for which `may_take` returns False is skipped; the caller offers it again when that changes. If
        `may_take` raises, nothing is removed, and the caller offers the block in question again.
        """

    def next_victims(self, now_ns: int, count: int, may_take: Callable[[Resident], bool]) -> list[Resident]:
        """Return up to `count` blocks that `pop` would choose next, in that order, without removing them."""
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
        """Remove a block without evicting it: it was removed, corrupt or moved."""

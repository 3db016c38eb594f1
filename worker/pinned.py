"""What a request has leased at one pool node, as arrays to read and verify by, and what came of reading it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool import Lease, PoolClient, Tail


@dataclass(slots=True, eq=False)
class Pinned:
    """Leased blocks of a prompt: whole ones from block `first` on, then, if `tail` is set, the partial one after them.

    The arrays have a row per block, the partial one included.
    """

    first: int
    lease: Lease
    client: PoolClient
    is_own: bool  # at this host's pool node
    block_tokens: int
    tail: Tail | None = None
    tail_tokens: int = 0  # of them, those that the prompt can use
    offsets: NDArray[np.int64] = field(init=False)  # [groups, n], in the pool's region
    digests: list[NDArray[np.uint64]] = field(init=False)  # per group [n, layers], over the valid tokens
    keys: NDArray[np.uint8] = field(init=False)  # [n, 16]
    valid: NDArray[np.int32] = field(init=False)  # [n] tokens
    right: range = range(0)  # of the rows, those that were read and are right

    def __post_init__(self) -> None:
        lease, tail = self.lease, self.tail
        self.offsets, self.digests, self.keys = lease.offsets, lease.digests, lease.chain
        self.valid = np.full(lease.num_blocks, self.block_tokens, np.int32)
        if tail is not None:
            self.offsets = np.concatenate([self.offsets, tail.offsets[:, None]], axis=1)
            self.digests = [np.concatenate([a, b[None]]) for a, b in zip(self.digests, tail.digests, strict=True)]
            self.keys = np.concatenate([self.keys, np.frombuffer(tail.key, np.uint8)[None]])
            self.valid = np.append(self.valid, np.int32(tail.num_tokens))

    @property
    def num_rows(self) -> int:
        return len(self.valid)

    @property
    def end(self) -> int:
        """The place in the prompt after the last whole block."""
        return self.first + self.lease.num_blocks

    def tokens_by_tier(self, num_tokens: int) -> tuple[int, int, int]:
        """(from this host's DRAM, from its SSD, from another host) of the prompt's first `num_tokens`, as read here.

        A run's blocks that had to come from SSD are taken for its last ones: what is used less follows what is used
        more, and leaves DRAM first.
        """
        begins = (self.first + np.arange(self.num_rows)) * self.block_tokens
        used = np.clip(num_tokens - begins, 0, self.valid)
        used = used[self.right.start : self.right.stop]
        if not self.is_own:
            return 0, 0, int(used.sum())
        ssd_end = max(0, self.lease.num_blocks - self.right.start)  # the partial block is not among them
        ssd = int(used[max(0, ssd_end - self.lease.ssd_blocks) : ssd_end].sum())
        return int(used.sum()) - ssd, ssd, 0

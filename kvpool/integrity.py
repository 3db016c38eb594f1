"""Whether a block's bytes are what its digests say. Arithmetic on bytes that lie still, for worker threads; no I/O."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.digest import layer_digests_at
from kvpool.policy import Block
from kvpool.spec import KvSpec

__all__ = ["right_at"]


def right_at(memory: NDArray[np.uint8], blocks: Sequence[Block], offsets: Sequence[tuple[int, ...]]) -> list[bool]:
    """Per block, whether its bytes at `offsets` (one per group) of `memory` uint8 [nbytes] have its digests.

    Of a partial block its valid tokens count.
    """
    right = [True] * len(blocks)
    members: dict[KvSpec, list[int]] = defaultdict(list)
    for i, block in enumerate(blocks):
        members[block.spec].append(i)
    for spec, mine in members.items():
        valid = np.array([blocks[i].num_tokens or spec.block_tokens for i in mine], np.int32)
        for g in range(spec.num_groups):
            at = np.array([offsets[i][g] for i in mine], np.int64)
            got = layer_digests_at(memory, at, spec, g, valid)
            want = np.frombuffer(b"".join(blocks[i].digests[g] for i in mine), "<u8").reshape(got.shape)
            for i, same in zip(mine, (got == want).all(axis=1).tolist(), strict=True):
                right[i] &= same
    return right

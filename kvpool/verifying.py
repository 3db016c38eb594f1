"""Reading every block back to see whether its bytes are still right: all of them for people, or one to be looked at.

Nothing is leased for it. A block that is still where it was after its bytes were read was there all the time, so that
what was read was its own; one that left meanwhile is nobody's concern.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from kvpool.handles import Verified
from kvpool.integrity import right_at
from kvpool.node import PoolNode
from kvpool.policy import Block

__all__ = ["verify"]

_BATCH_NBYTES = 8 << 20


async def verify(node: PoolNode, kv_namespace: bytes) -> AsyncIterator[Verified]:
    """Check what is sealed now, of one namespace or of all (empty); what is corrupt is quarantined and counted."""
    blocks = [
        block
        for block in node.core.store.index
        if block.sealed and (not kv_namespace or block.kv_namespace == kv_namespace)
    ]
    checked = corrupt = 0
    yield Verified(0, len(blocks), 0)
    for batch in _batches(blocks):
        for block in await corrupt_in_dram(node, batch):
            node.core.counters["digest_mismatches"] += 1
            corrupt += node.core.quarantine(block.kv_namespace, [block.chain_key])
        node.tell()
        checked += len(batch)
        yield Verified(checked, len(blocks), corrupt)


async def corrupt_in_dram(node: PoolNode, blocks: Sequence[Block]) -> list[Block]:
    """Those of the blocks whose bytes in the arena are wrong."""
    there = [block for block in blocks if not block.removed]
    offsets = [block.offsets for block in there]
    right = await asyncio.to_thread(right_at, node.memory.array, there, offsets)
    return [block for block, fine in zip(there, right, strict=True) if not fine and not block.removed]


def _batches(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    batch: list[Block] = []
    nbytes = 0
    for block in blocks:
        batch.append(block)
        nbytes += block.spec.block_nbytes
        if nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch

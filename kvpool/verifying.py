"""Reading blocks back, in either tier, to see whether their bytes are still right: all for people, or one looked at.

Nothing is leased for it. A copy that is still there after its bytes were read was there all the time, so that what was
read was its own; one that left meanwhile is nobody's concern.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence

from kvpool.handles import Verified
from kvpool.integrity import right_at
from kvpool.node import PoolNode
from kvpool.policy import LoadOutcome
from kvpool.policy.records import DRAM, SSD, Copy
from kvpool.ssd_io import read_elsewhere

__all__ = ["take_out_corrupt", "verify"]

_BATCH_NBYTES = 4 << 20

_log = logging.getLogger(__name__)


async def verify(node: PoolNode, kv_namespace: bytes) -> AsyncIterator[Verified]:
    """Check what is sealed now, of one namespace or of all (empty); a block that is corrupt anywhere is quarantined."""
    copies = [
        copy
        for block in node.core.store.index
        if not kv_namespace or block.kv_namespace == kv_namespace
        for copy in block.copies
        if copy is not None and copy.ready
    ]
    checked = corrupt = 0
    yield Verified(0, len(copies), 0)
    for batch in _batches(copies):
        corrupt += len({id(copy.block) for copy in await take_out_corrupt(node, batch)})
        checked += len(batch)
        yield Verified(checked, len(copies), corrupt)


async def take_out_corrupt(node: PoolNode, copies: Sequence[Copy]) -> list[Copy]:
    """Those of the copies whose bytes are wrong, counted and their blocks quarantined.

    A copy that the SSD cannot read is not known to be wrong, and stays.
    """
    wrong = [
        copy for copy in [*await _wrong_in_dram(node, copies), *await _wrong_on_ssd(node, copies)] if not copy.gone
    ]
    for copy in wrong:
        node.counters["dram_corrupt_blocks" if copy.tier == DRAM else "ssd_corrupt_blocks"] += 1
        _log.error("block %s was corrupt %s and is taken out", copy.block.chain_key.hex(), _where(copy))
    for copy in wrong:
        node.core.quarantine(copy.block.kv_namespace, [copy.block.chain_key])
    node.tell()
    return wrong


async def _wrong_in_dram(node: PoolNode, copies: Sequence[Copy]) -> list[Copy]:
    mine = [copy for copy in copies if copy.tier == DRAM and not copy.gone]
    blocks, offsets = [copy.block for copy in mine], [copy.offsets for copy in mine]
    right = await asyncio.to_thread(right_at, node.memory.array, blocks, offsets)
    return [copy for copy, fine in zip(mine, right, strict=True) if not fine]


async def _wrong_on_ssd(node: PoolNode, copies: Sequence[Copy]) -> list[Copy]:
    mine = [copy for copy in copies if copy.tier == SSD and not copy.gone]
    if node.ssd is None or not mine:
        return []
    blocks, at = [copy.block for copy in mine], [copy.offsets[0] for copy in mine]
    outcomes = await asyncio.to_thread(read_elsewhere, node.ssd.store, blocks, at)
    there = [(copy, outcome) for copy, outcome in zip(mine, outcomes, strict=True) if not copy.gone]
    node.counters["ssd_read_errors"] += sum(outcome is LoadOutcome.IO_ERROR for _, outcome in there)
    return [copy for copy, outcome in there if outcome is LoadOutcome.CORRUPT]


def _where(copy: Copy) -> str:
    return "in memory" if copy.tier == DRAM else "on the SSD"


def _batches(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    batch: list[Copy] = []
    nbytes = 0
    for copy in copies:
        batch.append(copy)
        nbytes += copy.nbytes
        if nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch

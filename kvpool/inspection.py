"""Verification and inspection of stored blocks, on an operator's request.

No lease is taken. Bytes are read in a thread, while the event loop may remove copies: a copy that still exists
afterwards existed all the time, so the bytes were its own. A copy that was removed meanwhile is ignored.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from kvpool.errors import PoolRefused
from kvpool.handles import Verified
from kvpool.node import PoolNode
from kvpool.policy import Block, LoadOutcome
from kvpool.policy.records import DRAM, SSD, BlockCopy
from kvpool.verified_io import check_on_ssd, verify_digests

_BATCH_NBYTES = 4 << 20
_NUM_AT_ONCE = 4096  # blocks per step, so that the event loop is not blocked

_log = logging.getLogger(__name__)


async def verify(node: PoolNode, kv_namespace: bytes) -> AsyncIterator[Verified]:
    """Verify all sealed blocks and quarantine those with a corrupt copy; an empty `kv_namespace` means all namespaces.

    Yields progress, first with 0 checked copies, last with all.
    """
    copies = await _copies(node, kv_namespace)
    checked = corrupt = 0
    yield Verified(0, len(copies), 0)
    for batch in _batches(copies):
        corrupt += len({id(copy.block) for copy in await quarantine_corrupt(node, batch)})
        checked += len(batch)
        yield Verified(checked, len(copies), corrupt)


async def quarantine_corrupt(node: PoolNode, copies: Sequence[BlockCopy]) -> list[BlockCopy]:
    """Verify the copies, count the corrupt ones, quarantine their blocks, and return them.

    A copy that cannot be read from the SSD is not known to be corrupt and stays.
    """
    wrong = [
        copy for copy in [*await _wrong_in_dram(node, copies), *await _wrong_on_ssd(node, copies)] if not copy.gone
    ]
    for copy in wrong:
        node.counters["dram_corrupt_blocks" if copy.tier == DRAM else "ssd_corrupt_blocks"] += 1
        _log.error("block %s was corrupt %s and was removed", copy.block.chain_key.hex(), _where(copy))
    for copy in wrong:
        node.core.quarantine(copy.block.kv_namespace, [copy.block.chain_key])
    node.publish_changes()
    return wrong


async def _copies(node: PoolNode, kv_namespace: bytes) -> list[BlockCopy]:
    """Return all complete copies, of one namespace or of all, collected in steps."""
    index = node.core.store.index
    keys = [key for key in index.addresses() if key.startswith(kv_namespace)]
    copies: list[BlockCopy] = []
    for start in range(0, len(keys), _NUM_AT_ONCE):
        blocks = [block for key in keys[start : start + _NUM_AT_ONCE] if (block := index.get(key)) is not None]
        copies += [copy for block in blocks for copy in block.copies if copy is not None and copy.ready]
        await asyncio.sleep(0)
    return copies


async def _wrong_in_dram(node: PoolNode, copies: Sequence[BlockCopy]) -> list[BlockCopy]:
    mine = [copy for copy in copies if copy.tier == DRAM and not copy.gone]
    blocks, offsets = [copy.block for copy in mine], [copy.offsets for copy in mine]
    right = await asyncio.to_thread(verify_digests, node.memory.array, blocks, offsets)
    return [copy for copy, fine in zip(mine, right, strict=True) if not fine]


async def _wrong_on_ssd(node: PoolNode, copies: Sequence[BlockCopy]) -> list[BlockCopy]:
    mine = [copy for copy in copies if copy.tier == SSD and not copy.gone]
    if node.ssd is None or not mine:
        return []
    blocks, at = [copy.block for copy in mine], [copy.offsets[0] for copy in mine]
    outcomes = await asyncio.to_thread(check_on_ssd, node.ssd.store, blocks, at)
    there = [(copy, outcome) for copy, outcome in zip(mine, outcomes, strict=True) if not copy.gone]
    node.counters["ssd_read_errors"] += sum(outcome is LoadOutcome.IO_ERROR for _, outcome in there)
    return [copy for copy, outcome in there if outcome is LoadOutcome.CORRUPT]


def _where(copy: BlockCopy) -> str:
    return "in memory" if copy.tier == DRAM else "on the SSD"


def _batches(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    batch: list[BlockCopy] = []
    nbytes = 0
    for copy in copies:
        batch.append(copy)
        nbytes += copy.nbytes
        if nbytes >= _BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


_MAX_BLOCKS = 64
_NAMES = {DRAM: "dram", SSD: "ssd"}


async def inspect(node: PoolNode, kv_namespace: bytes, key_prefix: bytes) -> list[dict[str, Any]]:
    """Describe the blocks whose chain key starts with `key_prefix`; an empty `kv_namespace` means all namespaces.

    Their bytes are read and verified; corrupt blocks are reported and removed. Raises PoolRefused for more than 64
    blocks.
    """
    index = node.core.store.index
    keys = [key for key in index.addresses() if key.startswith(key_prefix, 16) and key.startswith(kv_namespace)]
    found = [block for key in keys if (block := index.get(key)) is not None]
    if len(found) > _MAX_BLOCKS:
        wanted = key_prefix.hex() or "any key"
        raise PoolRefused(
            f"{len(found)} blocks match {wanted}, at most {_MAX_BLOCKS} are allowed: give a longer prefix"
        )
    copies = [(block, copy) for block in found for copy in block.copies if copy is not None and copy.ready]
    # Before the verification, which may remove blocks.
    now_ns = time.monotonic_ns()
    described = {block: _describe(block) for block in found}
    tiers = {copy: _describe_copy(copy, now_ns) for _, copy in copies}
    wrong = await quarantine_corrupt(node, [copy for _, copy in copies])
    for block, copy in copies:
        described[block]["tiers"][_NAMES[copy.tier]] = tiers[copy] | {"right": copy not in wrong}
    return list(described.values())


def _describe(block: Block) -> dict[str, Any]:
    following = [prefix_node.block for prefix_node in block.prefix_node.children() if prefix_node.block is not None]
    return {
        "key": block.chain_key.hex(),
        "kv_namespace": block.kv_namespace.hex(),
        "state": "sealed" if block.sealed else "being written",
        "tokens": block.num_tokens or block.spec.block_tokens,
        "parent": block.parent[16:].hex(),
        "depth": block.prefix_node.depth,
        "children": [each.chain_key.hex() for each in following if not each.num_tokens],
        "tails": [{"key": each.chain_key.hex(), "tokens": each.num_tokens} for each in following if each.num_tokens],
        "leases": block.num_leases,
        "uses": block.num_uses,
        "replicas": block.replicas,
        "compute_s": block.cost_s,
        "nbytes": block.spec.block_nbytes,
        "tiers": {},
    }


def _describe_copy(copy: BlockCopy, now_ns: int) -> dict[str, Any]:
    return {
        "offsets": list(copy.offsets),
        "nbytes": copy.nbytes,
        "age_s": (now_ns - copy.born_ns) / 1e9,
        "unused_s": (now_ns - copy.used_ns) / 1e9,
    }

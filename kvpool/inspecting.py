"""What there is to know of single blocks, as plain data for people."""

import time
from typing import Any

from kvpool.errors import PoolRefused
from kvpool.node import PoolNode
from kvpool.policy import Block
from kvpool.policy.records import DRAM, SSD, Copy
from kvpool.verifying import take_out_corrupt

__all__ = ["inspect"]

_MAX_BLOCKS = 64
_NAMES = {DRAM: "dram", SSD: "ssd"}


async def inspect(node: PoolNode, kv_namespace: bytes, key_prefix: bytes) -> list[dict[str, Any]]:
    """The blocks whose chain key begins with `key_prefix`, of one namespace or of all (empty).

    Their bytes are read; what is corrupt is taken out, and said. Raises PoolRefused when more than 64 blocks are meant.
    """
    index = node.core.store.index
    keys = [key for key in index.addresses() if key.startswith(key_prefix, 16) and key.startswith(kv_namespace)]
    found = [block for key in keys if (block := index.get(key)) is not None]
    if len(found) > _MAX_BLOCKS:
        raise PoolRefused(f"{len(found)} blocks begin with {key_prefix.hex() or 'any key'}: give more of the key")
    copies = [(block, copy) for block in found for copy in block.copies if copy is not None and copy.ready]
    # Before the check, which may take blocks out.
    now_ns = time.monotonic_ns()
    described = {block: _describe(block) for block in found}
    tiers = {copy: _describe_copy(copy, now_ns) for _, copy in copies}
    wrong = await take_out_corrupt(node, [copy for _, copy in copies])
    for block, copy in copies:
        described[block]["tiers"][_NAMES[copy.tier]] = tiers[copy] | {"right": copy not in wrong}
    return list(described.values())


def _describe(block: Block) -> dict[str, Any]:
    following = [place.block for place in block.place.children() if place.block is not None]
    return {
        "key": block.chain_key.hex(),
        "kv_namespace": block.kv_namespace.hex(),
        "state": "sealed" if block.sealed else "being written",
        "tokens": block.num_tokens or block.spec.block_tokens,
        "parent": block.parent[16:].hex(),
        "depth": block.place.depth,
        "children": [each.chain_key.hex() for each in following if not each.num_tokens],
        "tails": [{"key": each.chain_key.hex(), "tokens": each.num_tokens} for each in following if each.num_tokens],
        "leases": block.num_leases,
        "uses": block.num_uses,
        "replicas": block.replicas,
        "compute_s": block.cost_s,
        "nbytes": block.spec.block_nbytes,
        "tiers": {},
    }


def _describe_copy(copy: Copy, now_ns: int) -> dict[str, Any]:
    return {
        "offsets": list(copy.offsets),
        "nbytes": copy.nbytes,
        "age_s": (now_ns - copy.born_ns) / 1e9,
        "unused_s": (now_ns - copy.used_ns) / 1e9,
    }

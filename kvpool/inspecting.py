"""What there is to know of single blocks, as plain data for people."""

import time
from typing import Any

from kvpool.errors import PoolRefused
from kvpool.node import PoolNode
from kvpool.policy import Block
from kvpool.policy.records import Copy
from kvpool.tiers import Tier
from kvpool.verifying import take_out_corrupt

__all__ = ["inspect"]

_MAX_BLOCKS = 64
_TIERS = (Tier.DRAM, Tier.SSD)  # in the order of a block's copies


async def inspect(node: PoolNode, kv_namespace: bytes, key_prefix: bytes) -> list[dict[str, Any]]:
    """The blocks whose chain key begins with `key_prefix`, of one namespace or of all (empty).

    Their bytes are read; what is corrupt is taken out, and said. Raises PoolRefused when more than 64 blocks are meant.
    """
    found = [
        block
        for block in node.core.store.index
        if block.chain_key.startswith(key_prefix) and (not kv_namespace or block.kv_namespace == kv_namespace)
    ]
    if len(found) > _MAX_BLOCKS:
        raise PoolRefused(f"{len(found)} blocks begin with {key_prefix.hex() or 'any key'}: give more of the key")
    copies = [copy for block in found for copy in block.copies if copy is not None and copy.ready]
    described = [block for block in found if not block.removed]
    wrong = await take_out_corrupt(node, copies)
    now_ns = time.monotonic_ns()
    return [_describe(block, wrong, now_ns) for block in described]


def _describe(block: Block, wrong: list[Copy], now_ns: int) -> dict[str, Any]:
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
        "tiers": {
            tier.name.lower(): {
                "offsets": list(copy.offsets),
                "nbytes": copy.nbytes,
                "age_s": (now_ns - copy.born_ns) / 1e9,
                "unused_s": (now_ns - copy.used_ns) / 1e9,
                "right": copy not in wrong,
            }
            for tier, copy in zip(_TIERS, block.copies, strict=True)
            if copy is not None and copy.ready
        },
    }

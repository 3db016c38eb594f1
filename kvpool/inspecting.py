"""What there is to know of single blocks, as plain data for people."""

from typing import Any

from kvpool.errors import PoolRefused
from kvpool.node import PoolNode
from kvpool.policy import Block
from kvpool.verifying import corrupt_in_dram

__all__ = ["inspect"]

_MAX_BLOCKS = 64


async def inspect(node: PoolNode, kv_namespace: bytes, key_prefix: bytes) -> list[dict[str, Any]]:
    """The blocks whose chain key begins with `key_prefix`, of one namespace or of all (empty).

    Raises PoolRefused when more than 64 do.
    """
    found = [
        block
        for block in node.core.store.index
        if block.chain_key.startswith(key_prefix) and (not kv_namespace or block.kv_namespace == kv_namespace)
    ]
    if len(found) > _MAX_BLOCKS:
        raise PoolRefused(f"{len(found)} blocks begin with {key_prefix.hex() or 'any key'}: give more of the key")
    corrupt = {block.key for block in await corrupt_in_dram(node, [block for block in found if block.sealed])}
    return [_describe(block) | {"right": block.key not in corrupt if block.sealed else None} for block in found]


def _describe(block: Block) -> dict[str, Any]:
    return {
        "key": block.chain_key.hex(),
        "kv_namespace": block.kv_namespace.hex(),
        "parent": block.parent[16:].hex(),
        "state": "sealed" if block.sealed else "being written",
        "offsets": list(block.offsets),
        "leases": block.num_leases,
        "nbytes": block.spec.block_nbytes,
    }

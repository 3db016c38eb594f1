"""Compressed copies of leased blocks between pool nodes, for links that are slower than a CPU compresses.

The source encodes block after block in a thread, one ahead of the one being sent, and sends them over gRPC: on such
links its cost does not matter, and nothing needs room or keys. The reader decodes each block as it arrives. The lease
keeps the blocks' slots at the source; a block of a lease that ends meanwhile does not match its digests.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.block_coding import decode_block, encode_block
from kvpool.errors import CodedBlockInvalid, PoolRefused
from kvpool.node import PoolNode
from kvpool.policy.records import BlockCopy
from kvpool.spec import KvSpec
from moonpool_proto.v1 import pool_pb2

Bytes = NDArray[np.uint8]


async def encoded_blocks(node: PoolNode, lease_id: str, indices: Sequence[int]) -> AsyncIterator[pool_pb2.CodedBlock]:
    """Yield the lease's blocks, encoded. Raises PoolRefused if the lease has ended or has no such block."""
    lease = node.core.leases.get(lease_id)
    if lease is None:
        raise PoolRefused(f"lease {lease_id!r} has ended: pin the blocks again")
    if len(indices) > len(lease.copies):
        raise PoolRefused(f"blocks must be at most the lease's {len(lease.copies)} blocks, got {len(indices)}")
    if any(index >= len(lease.copies) for index in indices):
        raise PoolRefused(f"blocks must be indices of the lease's {len(lease.copies)} blocks, got {max(indices)}")
    copies = [lease.copies[index] for index in indices]
    ahead: asyncio.Future[pool_pb2.CodedBlock] | None = None
    for i in range(len(copies)):
        current = ahead or _encoding(node.memory.array, copies[i])
        ahead = _encoding(node.memory.array, copies[i + 1]) if i + 1 < len(copies) else None
        yield await current


def _encoding(memory: Bytes, copy: BlockCopy) -> "asyncio.Future[pool_pb2.CodedBlock]":
    # The thread gets bytes of its own: it may outlive the call, the lease and the arena.
    spec = copy.block.spec
    slots = [memory[at : at + spec.slot_nbytes(g)].copy() for g, at in enumerate(copy.offsets)]
    return asyncio.get_running_loop().run_in_executor(None, _encode, slots, spec)


def _encode(slots: list[Bytes], spec: KvSpec) -> pool_pb2.CodedBlock:
    coded = encode_block(slots, spec)
    if coded is None:
        return pool_pb2.CodedBlock(plain=b"".join(slot.tobytes() for slot in slots))
    return pool_pb2.CodedBlock(coded=coded)


def decode_message(message: pool_pb2.CodedBlock, spec: KvSpec) -> list[Bytes]:
    """Return the block's slots per group. Raises CodedBlockInvalid."""
    sizes = [spec.slot_nbytes(g) for g in range(spec.num_groups)]
    if message.WhichOneof("content") == "coded":
        slots = [np.empty(size, np.uint8) for size in sizes]
        decode_block(np.frombuffer(message.coded, np.uint8), slots, spec)
        return slots
    if len(message.plain) != spec.block_nbytes:
        raise CodedBlockInvalid(f"a block must have {spec.block_nbytes} bytes, got {len(message.plain)}")
    return np.split(np.frombuffer(message.plain, np.uint8), np.cumsum(sizes)[:-1].tolist())

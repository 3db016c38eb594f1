"""What precedes a prefill on any worker: find reusable KV, take slots, load and verify."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from moonpool_proto.v1.worker_pb2 import Timing
from worker.matchers import Matcher
from worker.node import WorkerNode
from worker.pool_glue import Pinned
from worker.request import Request, Sequence
from worker.settle import settled


@dataclass(slots=True)
class Prepared:
    """Slots for the whole attempt, the first `local_blocks` of them shared with earlier requests of this node."""

    request: Request
    slots: list[int]
    local_blocks: int
    pinned: list[Pinned]
    reused_blocks: int = 0
    load_s: float = 0.0

    @property
    def pooled_blocks(self) -> int:
        """Leading blocks that are leased at pool nodes, so that others may read them too."""
        return sum(p.lease.num_blocks for p in self.pinned)


@contextlib.asynccontextmanager
async def prepared(node: WorkerNode, request: Request, *, peak_tokens: int) -> AsyncIterator[Prepared]:
    """Slots and leases for `request`, given back at the end. Load the KV with `load`."""
    block_tokens = node.config.block_tokens
    # The last prompt token is always computed, and all of a prompt that is to be scored: their logits are wanted.
    reusable = request.keys[: 0 if request.scores_prompt else (len(request.prompt) - 1) // block_tokens]
    slots, num_shared = await node.take_slots(reusable, -(-peak_tokens // block_tokens))
    # A task of its own: a cancelled caller must still learn of the leases that it was given.
    pinning = asyncio.ensure_future(node.pool.pin(reusable, request.placement))
    try:
        pinned = await asyncio.shield(pinning)
        yield Prepared(request, slots, num_shared, pinned)
    finally:
        node.give_slots(slots)
        await settled(asyncio.ensure_future(_unpin(node, pinning)))


async def _unpin(node: WorkerNode, pinning: asyncio.Task[list[Pinned]]) -> None:
    await asyncio.wait([pinning])
    if pinning.exception() is None:
        await node.pool.unpin(pinning.result())


async def load(node: WorkerNode, work: Prepared) -> None:
    """Fill the reused blocks' slots from the pool; sets `reused_blocks` to what is there and right."""
    began = time.monotonic()
    local, pooled = work.local_blocks, work.pooled_blocks
    loaded = 0
    if pooled > local:
        loaded = await node.pool.load(work.pinned, work.slots[local:pooled], local)
        if loaded < pooled - local:
            node.counters.add("recomputed_blocks", pooled - local - loaded)
    work.reused_blocks = local + loaded
    node.index_blocks(work.slots[: work.reused_blocks], work.request.keys)
    work.load_s = time.monotonic() - began


def sequence_of(node: WorkerNode, work: Prepared, matcher: Matcher | None, *, prefill_only: bool) -> Sequence:
    """The engine's sequence for prepared work, with its timing noted for the first token."""
    cached = work.reused_blocks * node.config.block_tokens
    sequence = Sequence.of(work.request, work.slots, num_computed=cached, prefill_only=prefill_only, matcher=matcher)
    node.timings[id(sequence)] = Timing(cached_tokens=cached, load_s=work.load_s)
    node.counters.add("prompt_tokens", len(work.request.prompt))
    node.counters.add("cached_tokens", cached)
    return sequence

"""Steps around a prefill on any worker: lease reusable KV, take slots, load and verify; save new blocks afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np

from moonpool_proto.v1.worker_pb2 import Timing
from telemetry.tracing import Span
from worker.grammar_matching import GrammarMatcher
from worker.node import WorkerNode
from worker.parity import ParitySample
from worker.prefix_blocks import PinnedBlocks, PrefixSave
from worker.request import EngineSequence, Request
from worker.shielded_wait import in_thread, shielded

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Prepared:
    """Slots for a whole attempt; the first `local_blocks` of them are shared with earlier requests of this node."""

    request: Request
    slots: list[int]
    local_blocks: int
    pinned: list[PinnedBlocks]
    cut: int | None  # from this block on, blocks are computed for comparison even if they could be reused
    reused_tokens: int = 0  # never includes the last prompt token
    elsewhere_tokens: int = 0  # prompt tokens that the decode node may reuse by itself
    store_from: int = 0  # blocks below this index are in the pool
    aside: ParitySample | None = None
    load_s: float = 0.0
    is_superseding: bool = False  # a stored block contains the reused partial one

    @property
    def pooled_blocks(self) -> int:
        """Number of leading whole blocks that are leased at pool nodes."""
        return sum(p.lease.num_blocks for p in self.pinned)

    @property
    def pooled_tokens(self) -> int:
        """Number of tokens in all leased blocks, the partial one included."""
        return sum(int(p.valid.sum()) for p in self.pinned)

    @property
    def grown_tail(self) -> bytes:
        """Key of the reused partial block if the prompt leaves it partial; empty otherwise."""
        tail = self.pinned[-1].tail if self.pinned else None
        return tail.key if tail is not None and len(self.request.keys) == self.pooled_blocks else b""

    @property
    def shared_blocks(self) -> int:
        """Number of leased blocks that other nodes may read as well."""
        return self.pooled_blocks if self.cut is None else min(self.cut, self.pooled_blocks)


@contextlib.asynccontextmanager
async def prepared(node: WorkerNode, request: Request, *, peak_tokens: int) -> AsyncIterator[Prepared]:
    """Take slots and leases for `request` and return them at the end. The caller loads the KV with `load`."""
    block_tokens = node.config.block_tokens
    reusable = reusable_blocks(request, block_tokens)
    cut = node.parity.cut(request.request_id, reusable)
    num_slots = -(-peak_tokens // block_tokens)
    if node.slots.must_wait(num_slots):
        node.kv_connector.prefetch(request, reusable)
    slots, num_shared = await node.slots.take(request.key, request.keys[: reusable if cut is None else cut], num_slots)
    # A separate task: even if cancelled, the caller must learn which leases were granted, to return them.
    pinning = asyncio.ensure_future(_pin(node, request, reusable))
    work: Prepared | None = None
    try:
        work = Prepared(request, slots, num_shared, await asyncio.shield(pinning), cut)
        yield work
    finally:
        node.slots.give(slots)
        await shielded(
            asyncio.ensure_future(_unpin(node, pinning, superseded=work is not None and work.is_superseding))
        )


def reusable_blocks(request: Request, block_tokens: int) -> int:
    """Return the number of whole blocks of the prompt that may be reused.

    The last prompt token is always computed, since its logits are needed; a prompt that is to be scored is computed
    whole.
    """
    return 0 if request.scores_prompt else (len(request.prompt) - 1) // block_tokens


async def _pin(node: WorkerNode, request: Request, reusable: int) -> list[PinnedBlocks]:
    return [] if request.scores_prompt or len(request.prompt) == 1 else await node.kv_connector.pin(request, reusable)


async def _unpin(node: WorkerNode, pinning: asyncio.Task[list[PinnedBlocks]], *, superseded: bool) -> None:
    await asyncio.wait([pinning])
    if pinning.exception() is None:
        await node.kv_connector.unpin(pinning.result(), superseded=superseded)


async def load(node: WorkerNode, work: Prepared, span: Span) -> None:
    """Load the reused blocks from the pool into their slots and set `reused_tokens` to the verified ones; traced in
    `span`.
    """
    began = time.monotonic()
    with span.child("load") as loading:
        await _load(node, work, loading)
        loading.note(reused_tokens=work.reused_tokens, local_blocks=work.local_blocks, pooled_blocks=work.pooled_blocks)
    work.load_s = time.monotonic() - began


async def _load(node: WorkerNode, work: Prepared, span: Span) -> None:
    block_tokens = node.config.block_tokens
    local, pooled = work.local_blocks, work.pooled_blocks
    tail = work.pinned[-1].tail if work.pinned and pooled >= local else None
    wanted = max(0, pooled - local) + (tail is not None)
    good = 0
    if wanted:
        with span.child("messenger load", "client", blocks=wanted):
            good = await node.kv_connector.load(work.pinned, work.slots[local : local + wanted], local)
    work.store_from = pooled
    work.reused_tokens = (local + min(good, wanted - (tail is not None))) * block_tokens
    if good < wanted:
        node.counters.add("recomputed_blocks", wanted - good)
        work.store_from = local + good
    elif tail is not None:
        work.reused_tokens += work.pinned[-1].tail_tokens
    if work.cut is not None and work.cut * block_tokens < work.reused_tokens:
        await _set_aside(node, work, good)
        work.reused_tokens = work.cut * block_tokens
    node.slots.index(work.slots[: work.reused_tokens // block_tokens], work.request.keys)


def trace_prompt(span: Span, sequence: EngineSequence, work: Prepared) -> None:
    """Record in a span how the prompt was processed until its first token."""
    if span.is_on:
        queued_s = sequence.request.submitted, sequence.first_step_at
        span.past("queue", *queued_s, load_s=work.load_s)
        computed = {"computed_tokens": sequence.computed_tokens, "reused_tokens": sequence.reused_tokens}
        span.past("compute", sequence.first_step_at, sequence.first_token_at, **computed)


def trace_answer(span: Span, sequence: EngineSequence) -> None:
    """Record in a span how the answer was generated, after it has left the engine."""
    if span.is_on and sequence.first_token_at:
        generated = sequence.num_tokens - sequence.prompt_len
        if sequence.committed_at:
            span.past("join", sequence.committed_at, sequence.joined_at)
        began_at = sequence.joined_at or sequence.first_token_at
        span.past("generate", began_at, time.monotonic(), tokens=generated)


async def _set_aside(node: WorkerNode, work: Prepared, num_loaded: int) -> None:
    assert work.cut is not None
    rows = np.concatenate([pin.valid[pin.right.start : pin.right.stop] for pin in work.pinned])
    skip = work.cut - work.local_blocks
    slots = work.slots[work.cut : work.local_blocks + num_loaded]
    work.aside = await in_thread(node.parity.set_aside, work.cut, slots, rows[skip:])


def sequence_of(
    node: WorkerNode, work: Prepared, matcher: GrammarMatcher | None, *, prefill_only: bool
) -> EngineSequence:
    """Create the engine sequence of prepared work and register its timing for the first token."""
    cached = work.reused_tokens
    sequence = EngineSequence.of(
        work.request, work.slots, num_computed=cached, prefill_only=prefill_only, matcher=matcher
    )
    sequence.queue_entry = node.wait_queue.entry(work.request.key)
    tiers = [pin.tokens_by_tier(cached) for pin in work.pinned]
    dram, ssd, remote = (sum(column) for column in zip((0, 0, 0), *tiers, strict=True))
    node.timings[id(sequence)] = Timing(
        cached_tokens=cached,
        load_s=work.load_s,
        cached_dram_tokens=dram,
        cached_ssd_tokens=ssd,
        cached_remote_tokens=remote,
        approximate_tokens=max(cached, work.elsewhere_tokens) if node.config.kv.kv_storage == "int8" else 0,
    )
    node.counters.add("prompt_tokens", len(work.request.prompt))
    node.counters.add("cached_tokens", cached)
    node.counters.add("cached_dram_tokens", dram)
    node.counters.add("cached_ssd_tokens", ssd)
    node.counters.add("cached_remote_tokens", remote)
    return sequence


async def save_prefix(node: WorkerNode, work: Prepared, sequence: EngineSequence, *, goes_on: bool = False) -> None:
    """Save computed blocks: index them on this node and store them in the pool.

    With `goes_on` the sequence continues on another node: only whole blocks are saved, since the partial one will grow.
    """
    kept = PrefixSave.of(sequence, node.config.block_tokens)
    aside, work.aside = work.aside, None
    if aside is not None:
        await _compare(node, work, aside)
    node.slots.index(work.slots, kept.keys, anew_from=work.cut)
    kept = kept.whole() if goes_on else kept
    await node.kv_connector.store(kept, work.slots, work.store_from, token_s=sequence.token_s)
    work.is_superseding = kept.num_tokens(node.config.block_tokens) > work.pooled_tokens


async def _compare(node: WorkerNode, work: Prepared, aside: ParitySample) -> None:
    """Compare the pool's blocks with the recomputed ones; wrong blocks are quarantined and stored again."""
    wrong = await in_thread(node.parity.wrong_blocks, aside)
    node.counters.add("parity_checked_blocks", len(aside.slots))
    if not wrong:
        return
    node.counters.add("parity_mismatches", len(wrong))
    for pin in work.pinned:
        for block in wrong:
            if 0 <= block - pin.first < pin.num_rows:
                key = pin.keys[block - pin.first].tobytes().hex()
                log.error(
                    "block %d of a prompt at %s differs from the recomputed one although its digests match: it was "
                    "computed wrongly, or damaged before they were taken; its key is %s in namespace %s",
                    *(block, pin.lease.endpoint.node_id, key, node.namespace.hex()),
                )
    await node.kv_connector.quarantine(work.pinned, wrong)
    work.store_from = min(work.store_from, wrong[0])

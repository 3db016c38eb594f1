"""Steps around a prefill on any worker: lease reusable KV, take slots, load and verify, compute; save new blocks
afterwards.

If the reused KV is large, `load` returns with its first layers, and `compute` begins with them; the engine waits at the
load's gate before each layer (`worker.layer_gate`). If a later layer turns out to be damaged or does not come, nothing
that was computed is used: the step fails, the load ends, and the prompt is computed again from the first block that is
not right in all of its layers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from engine.rolling import RollingWindow
from moonpool_proto.v1.worker_pb2 import Timing
from rpc.waiting import first_of
from telemetry.tracing import Span
from worker.errors import LoadLost
from worker.grammar_matching import GrammarMatcher
from worker.kv_loading import PoolLoad
from worker.layer_gate import LayerGate
from worker.node import WorkerNode
from worker.parity import ParitySample
from worker.policy import WindowHold
from worker.prefix_blocks import PinnedBlocks, PinnedPrefix, PrefixSave
from worker.request import EngineSequence, Request
from worker.shielded_wait import in_thread, shielded

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Prepared:
    """Slots for a whole attempt; the first `local_blocks` of them are shared with earlier requests of this node."""

    request: Request
    slots: list[int]
    local_blocks: int
    prefix: PinnedPrefix
    cut: int | None  # from this block on, blocks are computed for comparison even if they could be reused
    reused_tokens: int = 0  # never includes the last prompt token
    sibling_tokens: int = 0  # of them, the last ones, whose KV another model computed
    elsewhere_tokens: int = 0  # prompt tokens that the decode node may reuse by itself
    store_from: int = 0  # blocks below this index are in the pool
    recomputed_blocks: int = 0  # reusable blocks that could not be loaded
    aside: ParitySample | None = None
    load_began: float = 0.0  # time.monotonic() instant
    load_s: float = 0.0  # for which nothing could be computed
    loading: asyncio.Task[None] | None = None  # sets `reused_tokens` and `store_from` when it ends
    gate: LayerGate | None = None  # before the layers that `loading` has still to bring
    is_superseding: bool = False  # a stored block contains the reused partial one
    window: WindowHold | None = None  # slots of windowed groups
    rolling: RollingWindow | None = None  # if it slides here: nobody shares the slots
    known_blocks: int = 0  # leading blocks of an earlier prompt of this node, if no pool can show where they part

    @property
    def shared_ends(self) -> list[int]:
        """Ends, in blocks, of what other prompts may share and this request computes.

        They are the end of the chat's head, and the place where an earlier prompt was seen to part from this one.
        """
        reused = max(self.pooled_blocks, self.local_blocks)
        parted = self.known_blocks or self.prefix.branch
        return sorted({end for end in (parted, self.request.head_blocks) if end > reused})

    @property
    def rolls_in_prompt(self) -> bool:
        """True if the window slides before the prompt is computed."""
        return self.request.rolling_up_to(len(self.request.prompt)) is not None

    @property
    def pinned(self) -> list[PinnedBlocks]:
        """Leased blocks of the lasting groups or, if all layers have windows, of the windowed ones."""
        return self.prefix.ending

    @property
    def pooled_blocks(self) -> int:
        """Number of leading whole blocks after which the prompt can go on with what is leased at pool nodes."""
        return max((p.end for p in self.pinned), default=0)

    @property
    def pooled_tokens(self) -> int:
        """Number of tokens in these blocks and in the leased partial one."""
        return max((p.first * p.block_tokens + int(p.valid.sum()) for p in self.pinned), default=0)

    @property
    def grown_tail(self) -> bytes:
        """Key of the reused partial block if the prompt leaves it partial; empty otherwise."""
        tail = self.pinned[-1].tail if self.pinned else None
        return tail.key if tail is not None and len(self.request.keys) == self.pooled_blocks else b""

    @property
    def shared_blocks(self) -> int:
        """Number of leading blocks that are leased in lasting groups, and that other nodes may read as well."""
        if self.rolls_in_prompt or not self.prefix.blocks:
            return 0
        return self.pooled_blocks if self.cut is None else min(self.cut, self.pooled_blocks)


@contextlib.asynccontextmanager
async def prepared(node: WorkerNode, request: Request, *, peak_tokens: int) -> AsyncIterator[Prepared]:
    """Take slots and leases for `request` and return them at the end, once the load has ended. The caller loads the KV
    with `load`.
    """
    block_tokens = node.config.block_tokens
    reusable = reusable_blocks(request, block_tokens)
    rolling = request.rolling_up_to(peak_tokens)
    is_exact = rolling is None and not request.reuses_sibling
    cut = node.parity.cut(request.request_id, reusable) if is_exact else None
    most = request.num_slots(peak_tokens, block_tokens)
    grows = node.engine.computes_in_slots and rolling is None
    num_slots = request.first_slots(most, block_tokens) if grows else most
    if node.slots.must_wait(num_slots):
        node.kv_connector.prefetch(request, reusable)
    taken = await node.slots.take(
        request.key,
        request.keys[: reusable if cut is None else cut],
        num_slots,
        most - num_slots,
        keeps_windows=bool(request.placement.helpers) and rolling is None,
        rolling=rolling,
    )
    # A separate task: even if cancelled, the caller must learn which leases were granted, to return them.
    pinning = asyncio.ensure_future(_pin(node, request, reusable))
    work: Prepared | None = None
    try:
        work = Prepared(
            request,
            taken.slots,
            taken.num_shared,
            await asyncio.shield(pinning),
            cut,
            window=taken.window,
            rolling=rolling,
            known_blocks=0 if node.memory.spec.lasting else taken.num_known,
        )
        yield work
    finally:
        try:
            if work is not None:
                await _end_load(work)
        finally:  # runs even if this task is cancelled again meanwhile
            node.slots.end(request.key)
            node.slots.give(taken.slots, taken.window)
            await shielded(
                asyncio.ensure_future(_unpin(node, pinning, superseded=work is not None and work.is_superseding))
            )


def reusable_blocks(request: Request, block_tokens: int) -> int:
    """Return the number of whole blocks of the prompt that may be reused.

    The last prompt token is always computed, since its logits are needed; a prompt that is to be scored is computed
    whole. With a rolling window, blocks can be reused until it slides.
    """
    if request.scores_prompt:
        return 0
    reusable = (len(request.prompt) - 1) // block_tokens
    return reusable if request.rolling is None else min(reusable, request.rolling.window // block_tokens)


async def _pin(node: WorkerNode, request: Request, reusable: int) -> PinnedPrefix:
    if request.scores_prompt or len(request.prompt) == 1:
        return PinnedPrefix([])
    pinned = await node.kv_connector.pin(request, reusable)
    slides = request.rolling_up_to(len(request.prompt)) is not None
    return pinned.whole() if slides else pinned  # a partial block may lie behind the place where the window slides


async def _unpin(node: WorkerNode, pinning: asyncio.Task[PinnedPrefix], *, superseded: bool) -> None:
    await asyncio.wait([pinning])
    if pinning.exception() is None:
        await node.kv_connector.unpin(pinning.result().all, superseded=superseded)


async def load(node: WorkerNode, work: Prepared, span: Span, *, whole: bool = False) -> None:
    """Load the reused blocks from the pool into their slots; traced in `span`.

    Returns when the first layers are there if the rest can be awaited layer by layer, otherwise and with `whole` when
    all are verified. `reused_tokens` counts blocks that are on their way as reused until the load has ended.
    """
    work.load_began = time.monotonic()
    block_tokens = node.config.block_tokens
    local, pooled = work.local_blocks, work.pooled_blocks
    tail = work.pinned[-1].tail if work.pinned and pooled >= local else None
    wanted = max(0, pooled - local) + (tail is not None)
    seen_from = _reach_windows(work, node.memory.spec.window_blocks, pooled, wanted)
    pool_load = node.kv_connector.begin_load(work.prefix, work.slots[local : local + wanted], local)
    # Blocks that are compared must all be here before any of them is computed, and the sinks before a window slides.
    whole = whole or not node.engine.computes_in_slots or work.rolls_in_prompt or work.request.reuses_sibling
    if pool_load.has_steps and not whole and work.cut is None and pool_load.num_blocks == wanted:
        work.gate = LayerGate(
            len(node.memory.place_of_layer),
            wanted,
            held_blocks=0,
            stall_s=2 * node.config.kv.lease_s,  # every read has ended before
            lost=LoadLost,
            changed=node.engine.wake,
        )
        work.gate.require(wanted)
        spec = node.memory.spec
        work.gate.mark(spec.layers_of(spec.windowed), np.arange(seen_from - local))  # of these, nothing comes
        work.reused_tokens = pooled * block_tokens + (work.pinned[-1].tail_tokens if tail is not None else 0)
    if work.gate is None:
        await _load(node, work, pool_load, wanted, span)
        if work.request.reuses_sibling and work.rolling is None:
            await _take_up_sibling(node, work, span)
    else:
        work.loading = asyncio.ensure_future(_load(node, work, pool_load, wanted, span))
        await first_of(work.loading, pool_load.begun)
        if work.gate.error is not None:
            await asyncio.shield(work.loading)
        _take_up_load(work)
    work.load_s = time.monotonic() - work.load_began


def _reach_windows(work: Prepared, window_blocks: int, pooled: int, wanted: int) -> int:
    """Hold the window slots of the blocks to load, and return the first; set blocks aside that others wait for."""
    seen_from = max(work.local_blocks, pooled - window_blocks)
    if work.window is None:
        return seen_from
    if wanted:
        work.window.reach(seen_from, work.local_blocks + wanted)
    work.window.keep(i for end in work.shared_ends for i in range(max(0, end - window_blocks), end))
    return min(seen_from, work.local_blocks + wanted)


async def _load(node: WorkerNode, work: Prepared, pool_load: PoolLoad, wanted: int, span: Span) -> None:
    try:
        with span.child("load") as loading:
            good = 0
            if wanted:
                with loading.child("messenger load", "client", blocks=wanted):
                    good = await pool_load.run(work.gate)
                await node.kv_connector.quarantine(work.prefix, pool_load.bad_blocks)
            await _loaded(node, work, good, wanted)
            loading.note(
                reused_tokens=work.reused_tokens, local_blocks=work.local_blocks, pooled_blocks=work.pooled_blocks
            )
    except BaseException as error:
        work.reused_tokens = work.local_blocks * node.config.block_tokens
        if work.gate is not None:
            work.gate.lose(f"the load of reused blocks has ended: {error!r}")
        raise


async def _loaded(node: WorkerNode, work: Prepared, good: int, wanted: int) -> None:
    """Record that `good` of the `wanted` blocks, the partial one included, are in their slots and verified."""
    block_tokens = node.config.block_tokens
    local, pooled = work.local_blocks, work.pooled_blocks
    tail = work.pinned[-1].tail if work.pinned and pooled >= local else None
    work.store_from = pooled
    if work.window is not None and good < wanted:
        good = 0  # the windowed blocks are there for the end of the load only
    work.reused_tokens = (local + min(good, wanted - (tail is not None))) * block_tokens
    if good < wanted:
        work.recomputed_blocks = wanted - good
        node.counters.add("recomputed_blocks", work.recomputed_blocks)
        work.store_from = local + good
    elif tail is not None:
        work.reused_tokens += work.pinned[-1].tail_tokens
    if work.cut is not None and work.cut * block_tokens < work.reused_tokens:
        await _set_aside(node, work, good)
        work.reused_tokens = work.cut * block_tokens
    if work.rolling is None:
        node.slots.index(work.slots[: work.reused_tokens // block_tokens], work.request.keys)


async def _take_up_sibling(node: WorkerNode, work: Prepared, span: Span) -> None:
    """Reuse a sibling's KV after the blocks of the model's own."""
    block_tokens, request = node.config.block_tokens, work.request
    first, most = work.reused_tokens // block_tokens, reusable_blocks(request, block_tokens)
    work.reused_tokens = first * block_tokens  # what follows is overwritten, even if nothing comes of it
    end = await node.reuse_sibling(request, work.slots, range(first, most), span)
    if end > first:
        work.sibling_tokens = (end - first) * block_tokens
        work.reused_tokens = end * block_tokens
        node.counters.add("sibling_tokens", work.sibling_tokens)


def _take_up_load(work: Prepared) -> None:
    """Forget the gate if the load has ended. Raises what the load raised."""
    if work.loading is not None and work.loading.done():
        work.loading.result()
        work.gate = None


async def _end_load(work: Prepared) -> None:
    """Cancel the load if it has not ended; on return nothing is written to the slots any more."""
    if work.loading is not None and not work.loading.done():
        work.loading.cancel()
        await shielded(asyncio.ensure_future(asyncio.wait([work.loading])))
    if work.loading is not None and not work.loading.cancelled():
        work.loading.exception()  # retrieve it: whoever awaited the load has raised it


async def compute(
    node: WorkerNode,
    work: Prepared,
    sequence: EngineSequence,
    settle: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run the sequence in the engine until it leaves. Raises RequestFailed, as `WorkerNode.run_in_engine`.

    If reused KV that was on its way cannot be used, the sequence runs again from the first such block; `settle()` is
    awaited before, after which the blocks that it computed may be overwritten.
    """
    lost: LoadLost | None = None
    try:
        await node.run_in_engine(sequence)
    except LoadLost as error:
        lost = error
    if work.gate is None or work.loading is None:
        return
    if sequence.cancelled and not work.gate.is_open:  # the answer was ended before its reused KV was there
        await _end_load(work)
        sequence.error = None
        sequence.num_computed = min(sequence.num_computed, work.reused_tokens)
        return
    if lost is not None and settle is not None:
        await settle()
    await asyncio.shield(work.loading)
    if lost is not None:
        log.warning("a prompt is computed again from token %d: %s", work.reused_tokens, lost)
        work.load_s = time.monotonic() - work.load_began
        sequence.restart(work.reused_tokens)
        node.timings[id(sequence)] = _timing_of(node, work)
        await node.run_in_engine(sequence)


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
    _take_up_load(work)
    sequence = EngineSequence.of(
        work.request,
        work.slots,
        num_computed=work.reused_tokens,
        prefill_only=prefill_only,
        matcher=matcher,
        window=work.window,
        rolling=work.rolling,
    )
    sequence.queue_entry = node.wait_queue.entry(work.request.key)
    sequence.loading = work.gate
    node.timings[id(sequence)] = _timing_of(node, work)
    node.counters.add("prompt_tokens", len(work.request.prompt))
    if work.gate is None or work.loading is None:
        _count_reuse(node, work)
    else:
        work.loading.add_done_callback(lambda _: _count_reuse(node, work))
    return sequence


def _timing_of(node: WorkerNode, work: Prepared) -> Timing:
    cached = work.reused_tokens - work.sibling_tokens
    is_rounded = node.config.kv.kv_storage == "int8"
    dram, ssd, remote = _tokens_by_tier(work)
    return Timing(
        cached_tokens=cached,
        load_s=work.load_s,
        cached_dram_tokens=dram,
        cached_ssd_tokens=ssd,
        cached_remote_tokens=remote,
        approximate_tokens=max(cached, work.elsewhere_tokens) if is_rounded else work.sibling_tokens,
        sibling_tokens=work.sibling_tokens,
        recomputed_blocks=work.recomputed_blocks,
    )


def _tokens_by_tier(work: Prepared) -> tuple[int, int, int]:
    """Return the reused tokens from this host's memory, from its SSD and from other hosts."""
    tiers = [pin.tokens_by_tier(work.reused_tokens, after_block=work.local_blocks) for pin in work.pinned]
    dram, ssd, remote = (sum(column) for column in zip((0, 0, 0), *tiers, strict=True))
    return dram, ssd, remote


def _count_reuse(node: WorkerNode, work: Prepared) -> None:
    dram, ssd, remote = _tokens_by_tier(work)
    node.counters.add("cached_tokens", work.reused_tokens - work.sibling_tokens)
    node.counters.add("cached_dram_tokens", dram)
    node.counters.add("cached_ssd_tokens", ssd)
    node.counters.add("cached_remote_tokens", remote)


async def save_prefix(node: WorkerNode, work: Prepared, sequence: EngineSequence, *, goes_on: bool = False) -> None:
    """Save computed blocks: index them on this node and store them in the pool.

    With `goes_on` the sequence continues on another node: only whole blocks are saved, since the partial one will grow.
    """
    if sequence.has_sinks or work.request.reuses_sibling:
        return  # what is left is not the KV of a prefix, or follows from another model's
    kept = PrefixSave.of(sequence, node.config.block_tokens)
    aside, work.aside = work.aside, None
    if aside is not None:
        await _compare(node, work, aside)
    if work.rolling is None:
        node.slots.index(work.slots, kept.keys, anew_from=work.cut)
    kept = kept.whole() if goes_on else kept
    await node.kv_connector.retain(work.request, kept.keys)  # first, so that nothing of it is evicted for the rest
    await node.kv_connector.store(
        kept,
        work.slots,
        _first_to_store(work),
        token_s=sequence.token_s,
        window=work.window,
        shared_ends=[end for end in work.shared_ends if end <= len(kept.keys)],  # perhaps not all was computed
    )
    await node.store_inputs(kept, work.slots, _first_to_store(work), token_s=sequence.token_s)
    work.is_superseding = kept.num_tokens(node.config.block_tokens) > work.pooled_tokens


def _first_to_store(work: Prepared) -> int:
    """Return the first block to store in the own host's pool: one that was computed or, if they are to be kept, read
    from another host's pool.
    """
    if not work.request.placement.keep_fetched:
        return work.store_from
    return min([work.store_from, *(pin.first for pin in work.pinned if not pin.is_own)])


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
    await node.kv_connector.quarantine(work.prefix, wrong)
    work.store_from = min(work.store_from, wrong[0])

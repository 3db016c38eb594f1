"""Connection of a worker's slots with KV pools: prefetches, pins, loads and verifies reused blocks, and stores new
ones.

Blocks of this host's pool go through shared memory (`worker.local_pool`) if possible, all others through the messenger.
A store is a two-phase put: allocate slots at a pool node, write the blocks, seal them with their digests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvpool import KvPoolError, Lease, PoolClient, PutTicket, Tail
from messenger import DeadlineExceeded, Messenger, MessengerError, Priority
from moonpool_proto.v1.conductor_pb2 import Holder, NodeRef
from rpc.control import ControlError
from settings.worker import KvSettings
from worker.counters import WorkerCounters
from worker.kv_loading import LoadSettings, PoolLoad
from worker.local_pool import LocalPoolAccess
from worker.policy import CircuitBreaker, WindowHold
from worker.prefix_blocks import (
    PinnedBlocks,
    PinnedPrefix,
    PrefixSave,
    StoredPart,
    StoredParts,
    find_tail,
    key_array,
    names_of_tails,
)
from worker.request import KEY_NBYTES, Request
from worker.shielded_wait import in_thread, shielded
from worker.slot_memory import SlotMemory

log = logging.getLogger(__name__)

# A call to a hanging pool node costs its deadline. The first pause equals the time after which the conductor suspects a
# node; the longest one bounds the delay until a recovered node is used again.
_HOLD_OFF_S, _LONGEST_HOLD_OFF_S = 5.0, 30.0
_MOST_ENDS = 3  # ends of a reusable prefix that are tried until one has its windowed blocks
_LOOK_UP_BLOCKS = 1024  # longest chain that is looked up in this host's pool without a call


@dataclass(frozen=True, slots=True)
class PoolCallSettings:
    """Identity of a worker towards pool nodes, and the settings of its calls."""

    own_target: str  # gRPC target of this host's pool node; empty = none
    owner: str  # node id that holds the leases and puts
    incarnation: int
    kv: KvSettings


class KVConnector:
    """Access of one worker to its host's pool node and to the pool nodes named in placements."""

    def __init__(
        self,
        memory: SlotMemory,
        messenger: Messenger,
        parts: StoredParts,
        settings: PoolCallSettings,
        counters: WorkerCounters,
    ) -> None:
        self._memory = memory
        self._messenger = messenger
        self._parts = parts
        self._settings = settings
        self._counters = counters
        self._own_target = settings.own_target
        self._has_ssd = False
        self._clients: dict[str, PoolClient] = {}
        self._breaker = CircuitBreaker(_HOLD_OFF_S, _LONGEST_HOLD_OFF_S)
        self._now_s = time.monotonic
        self._prefetching: set[asyncio.Task[None]] = set()
        self._local_pool = LocalPoolAccess(
            memory, messenger, parts, owner=settings.owner, incarnation=settings.incarnation
        )
        self._writer = PoolWriter(memory, messenger, ttl_s=settings.kv.put_ttl_s, counters=counters)
        self.own_node_id = ""
        self.num_pinned = 0

    def client(self, target: str) -> PoolClient:
        """Return the client of the pool node at `target`."""
        if target not in self._clients:
            self._clients[target] = PoolClient(
                target, owner=self._settings.owner, owner_incarnation=self._settings.incarnation
            )
        return self._clients[target]

    async def wait_for_own_pool(self) -> None:
        """Request this host's pool node's identity until it answers, since all roles start at once."""
        while self._own_target:
            try:
                description = await self.client(self._own_target).describe()
            except Exception as error:
                log.info("waiting for the pool node at %s: %s", self._own_target, error)
                await asyncio.sleep(0.1)
            else:
                self.own_node_id, self._has_ssd = description.node_id, description.ssd_bytes > 0
                return

    async def close(self) -> None:
        """Cancel prefetches and close all clients."""
        for task in self._prefetching:
            task.cancel()
        await asyncio.gather(*self._prefetching, return_exceptions=True)
        await self._local_pool.close()
        for client in self._clients.values():
            await client.close()

    def prefetch(self, request: Request, num_blocks: int) -> None:
        """Let pool nodes bring the first `num_blocks` blocks of a waiting request to memory. Returns at once."""
        # A request with hints probably continues one for which the pool keeps blocks: they must not be given up now.
        is_hinted = request.proto.HasField("hints")
        others = [
            h for h in request.placement.holders if (h.ssd_blocks or is_hinted) and h.pool.node_id != self.own_node_id
        ]
        asked = [(self._own_target, 0, num_blocks)] if self._own_target and (self._has_ssd or is_hinted) else []
        asked += [(h.pool.target, h.first_block, min(num_blocks, h.first_block + h.num_blocks)) for h in others]
        for target, first, end in asked:
            if first < end:
                tail_keys = self._tail_keys(request, num_blocks)
                if self._parts.lasting is not None:
                    self._begin_prefetch(self._parts.lasting, target, request.keys[first:end], tail_keys)
                if self._parts.windowed is not None:
                    last = min(num_blocks, request.placement.reuse_blocks, end)
                    seen = request.keys[max(0, last - self._parts.window_blocks) : last]
                    self._begin_prefetch(self._parts.windowed, target, seen, tail_keys)

    def _begin_prefetch(self, part: StoredPart, target: str, keys: Sequence[bytes], tail_keys: bytes) -> None:
        task = asyncio.ensure_future(self._prefetch(part, target, keys, tail_keys))
        self._prefetching.add(task)
        task.add_done_callback(self._prefetching.discard)

    async def _prefetch(self, part: StoredPart, target: str, keys: Sequence[bytes], tail_keys: bytes) -> None:
        if self._may_call(target):
            try:
                await self.client(target).prefetch(part.kv_namespace, key_array(keys), tail_keys=tail_keys)
                self._record_call(target)
            except PoolErrors as error:
                self._record_call(target, error)
                log.info("pool at %s rejected a prefetch: %s", target, error)

    def _tail_keys(self, request: Request, num_blocks: int) -> bytes:
        """Return the keys of partial blocks that may follow the leading run whose end the conductor predicted."""
        expected = min(num_blocks, request.placement.reuse_blocks)
        return names_of_tails(request, expected, self._memory.block_tokens)

    async def pin(self, request: Request, num_blocks: int) -> PinnedPrefix:
        """Lease reusable blocks of the request's prompt: at most the first `num_blocks` whole blocks and a partial one.

        Leases the longest leading run available at this host's pool and the placement's holders, and the partial block
        after it, if one holds the prompt's next tokens. With windowed groups, the run ends where a pool also has the
        blocks that the next token sees in them; without lasting groups, these blocks alone are leased. An unreachable
        pool only shortens the run: missing blocks are computed.
        """
        if self._parts.lasting is None:
            return PinnedPrefix([], await self._pin_last_window(request, num_blocks))
        found = await self._pin_lasting(request, num_blocks)
        if not found or self._parts.windowed is None:
            return PinnedPrefix(found)
        return await self._with_windows(request, found)

    async def _pin_last_window(self, request: Request, num_blocks: int) -> list[PinnedBlocks]:
        """Lease the windowed blocks before the last end, among the first `num_blocks`, before which a pool has them.

        Returns one lease, with the partial block after it if there is one, or none.
        """
        part, window_blocks = self._parts[True], self._parts.window_blocks
        chain, tail_keys = key_array(request.keys[:num_blocks]), self._tail_keys(request, num_blocks)
        found: list[PinnedBlocks] = []
        for i, (target, _, most) in enumerate(
            self._targets(request.placement.holders, range(num_blocks), self._own_target)
        ):
            if not target or (found and most <= found[0].end) or not self._may_call(target):
                continue
            lease = await self._pin(
                part, target, chain[:most], tail_keys, request.time_left_s, window_blocks=window_blocks
            )
            if lease is None:
                continue
            block_tokens = self._memory.block_tokens
            pin = PinnedBlocks(lease.first_block, lease, self.client(target), i == 0, block_tokens, is_windowed=True)
            self.num_pinned += 1
            tail = find_tail(request, pin.end, lease.tails, block_tokens)
            if tail is not None:
                pin = replace(pin, tail=tail[0], tail_tokens=tail[1])
            # Blocks may have left the pool since it found them, and one of an earlier version finds no windows.
            is_whole = pin.first == max(0, pin.end - window_blocks) and pin.num_rows > 0
            if is_whole and (not found or pin.end > found[0].end):
                found, superseded = [pin], found
            else:
                superseded = [pin]
            await self.unpin(superseded)
        return found

    async def _with_windows(self, request: Request, pinned: list[PinnedBlocks]) -> PinnedPrefix:
        """Return as much of the leased prefix as there are windowed blocks for; end the other leases."""
        have = max(pin.end for pin in pinned)
        tail = next((pin for pin in pinned if pin.tail is not None), None)
        holders = [h for h in request.placement.holders if h.pool.node_id != self.own_node_id]
        expected = [request.placement.reuse_blocks, *(h.first_block + h.num_blocks for h in holders)]
        ends = sorted({have, *(end for end in expected if 0 < end < have)}, reverse=True)
        for end in ends[:_MOST_ENDS]:
            partial = tail.tail if tail is not None and end == have else None
            window = await self._pin_window(request, end, partial, holders)
            if window is None:
                continue
            if partial is not None and window.tail is None and tail is not None:
                pinned = [replace(pin, tail=None, tail_tokens=0) if pin is tail else pin for pin in pinned]
            kept = [pin for pin in pinned if pin.first < end or pin.tail is not None]
            await self.unpin([pin for pin in pinned if pin.first >= end and pin.tail is None])
            if end < have:
                kept = [_head(pin, end) for pin in kept if pin.first < end]
            return PinnedPrefix(kept, [window], have if end < have else 0)
        await self.unpin(pinned)
        return PinnedPrefix([], branch=have)

    async def _pin_window(
        self, request: Request, end: int, partial: Tail | None, holders: Sequence[Holder]
    ) -> PinnedBlocks | None:
        """Lease the blocks in windowed groups that the first token of block `end` sees, and a partial one, if there.

        Returns None unless some pool node has all of the whole ones, or, if there are none, the partial one.
        """
        assert self._parts.windowed is not None
        first = max(0, end - self._parts.window_blocks)
        chain, tail_keys = key_array(request.keys[first:end]), partial.key if partial is not None else b""
        for i, target in enumerate((self._own_target, *(holder.pool.target for holder in holders))):
            if not target or not self._may_call(target):
                continue
            lease = await self._pin(self._parts.windowed, target, chain, tail_keys, request.time_left_s)
            if lease is None:
                continue
            pin = PinnedBlocks(first, lease, self.client(target), i == 0, self._memory.block_tokens, is_windowed=True)
            self.num_pinned += 1
            found = next((tail for tail in lease.tails if partial is not None and tail.key == partial.key), None)
            if lease.num_blocks == end - first and (found is not None or end > first):
                return pin if found is None else replace(pin, tail=found, tail_tokens=found.num_tokens)
            await self.unpin([pin])
        return None

    async def pin_whole(self, request: Request, blocks: range, holders: Sequence[Holder]) -> list[PinnedBlocks]:
        """Lease the longest leading run of whole `blocks` at this host's pool and these holders."""
        return await self._pin_run(request, blocks, holders, self._own_target, b"")

    async def _pin_lasting(self, request: Request, num_blocks: int) -> list[PinnedBlocks]:
        chain, holders = key_array(request.keys[:num_blocks]), request.placement.holders
        tail_keys = self._tail_keys(request, num_blocks)
        own_target = "" if self._own_lacks(request, chain, tail_keys) else self._own_target
        pinned = await self._pin_run(request, range(num_blocks), holders, own_target, tail_keys)
        have = max((pin.end for pin in pinned), default=0)
        for pin in pinned:
            # A holder that has lost its blocks may still offer partial blocks, so all leases must be searched.
            found = find_tail(request, have, pin.lease.tails, self._memory.block_tokens) if pin.end == have else None
            if found is not None:
                pinned.remove(pin)
                pinned.append(replace(pin, tail=found[0], tail_tokens=found[1]))
                break
        return pinned

    async def _pin_run(
        self, request: Request, blocks: range, holders: Sequence[Holder], own_target: str, tail_keys: bytes
    ) -> list[PinnedBlocks]:
        """Lease the longest leading run of whole `blocks`, and partial ones, by their keys, after it."""
        chain = key_array(request.keys[: blocks.stop])
        pinned: list[PinnedBlocks] = []
        have = blocks.start
        for i, (target, first, end) in enumerate(self._targets(holders, blocks, own_target)):
            is_own = i == 0  # it may hold a partial block even without a whole one
            if not target or first > have or (end <= have and not is_own) or not self._may_call(target):
                continue
            lease = await self._pin(self._parts[False], target, chain[have:end], tail_keys, request.time_left_s)
            if lease is not None:
                pinned.append(PinnedBlocks(have, lease, self.client(target), is_own, self._memory.block_tokens))
                have += lease.num_blocks
                self.num_pinned += 1
        return pinned

    def _targets(self, holders: Sequence[Holder], blocks: range, own_target: str) -> list[tuple[str, int, int]]:
        """Return (gRPC target, first block, end) of the pools that may hold some of `blocks`, this host's first."""
        others = [
            (h.pool.target, h.first_block, min(blocks.stop, h.first_block + h.num_blocks))
            for h in holders
            if h.pool.node_id != self.own_node_id
        ]
        return [(own_target, blocks.start, blocks.stop), *others]

    def _own_lacks(self, request: Request, chain: NDArray[np.uint8], tail_keys: bytes) -> bool:
        """Return True if this host's pool certainly holds nothing of a prompt for which no holder is named."""
        placement = request.placement
        # The shared index does not list blocks on SSD.
        if placement.holders or self._has_ssd or len(chain) > _LOOK_UP_BLOCKS:
            return False
        return self._local_pool.lacks(chain, np.frombuffer(tail_keys, np.uint8).reshape(-1, KEY_NBYTES))

    async def _pin(
        self,
        part: StoredPart,
        target: str,
        chain: NDArray[np.uint8],
        tail_keys: bytes,
        time_left_s: float,
        *,
        window_blocks: int = 0,
    ) -> Lease | None:
        wait_s = max(0.0, min(self._settings.kv.kv_load_wait_s, time_left_s))
        try:
            lease = await self.client(target).pin(
                part.kv_namespace,
                chain,
                lease_s=self._settings.kv.lease_s,
                wait_s=wait_s,
                tails=True,
                tail_keys=tail_keys,
                window_blocks=window_blocks,
            )
        except PoolErrors as error:
            self._record_call(target, error)
            log.warning("no KV is reused from the pool at %s: %s", target, error)
            return None
        self._record_call(target)
        return lease

    async def unpin(self, pinned: Sequence[PinnedBlocks], *, superseded: bool = False) -> None:
        """Return leases; a lease that cannot be returned expires.

        With `superseded` the pool may drop the partial block that was used, since a stored block contains it.
        """
        for pin in pinned:
            self.num_pinned -= 1
            if not self._may_call(pin.client.target):
                continue
            old = pin.tail.key if superseded and pin.tail is not None else b""
            try:
                namespace = self._parts[pin.is_windowed].kv_namespace
                await pin.client.unpin(pin.lease, kv_namespace=namespace, superseded=old)
                self._record_call(pin.client.target)
            except PoolErrors as error:
                self._record_call(pin.client.target, error)
                log.warning("lease %s was not returned and will expire: %s", pin.lease.lease_id, error)

    def begin_load(
        self, pinned: PinnedPrefix, slots: Sequence[int], first: int, *, without: range = range(0)
    ) -> PoolLoad:
        """Return a load of the leased blocks from `first` on, including the partial one, into `slots`.

        Nothing of the model layers `without` is loaded.
        """
        settings = LoadSettings(
            self._memory,
            self._messenger,
            self._local_pool,
            self._counters,
            self._settings.kv.lease_s,
            self._record_call,
        )
        groups = self._parts.lasting.groups if self._parts.lasting is not None else ()
        return PoolLoad(settings, pinned.blocks, slots, first, pinned.windows, groups=groups, without=without)

    async def quarantine(self, pinned: PinnedPrefix, blocks: Sequence[int]) -> None:
        """Remove leased blocks with wrong content from their pools; `blocks` are indices in the prompt.

        They are stored again at the end of the request.
        """
        for pin in pinned.all:
            rows = [block - pin.first for block in blocks if 0 <= block - pin.first < pin.num_rows]
            if not rows:
                continue
            try:
                await pin.client.quarantine(self._parts[pin.is_windowed].kv_namespace, pin.keys[rows])
            except PoolErrors as error:
                log.warning("a corrupt block could not be reported to its pool: %s", error)

    async def store(
        self,
        kept: PrefixSave,
        slots: Sequence[int],
        first: int,
        *,
        pool: NodeRef | None = None,
        token_s: float = 0.0,
        window: WindowHold | None = None,
        shared_ends: Sequence[int] = (),
    ) -> None:
        """Put blocks from `first` on into `pool`, or into this host's pool; `token_s` as in `PoolWriter.put`.

        In windowed groups, puts the blocks that the next token sees, and those that the tokens after `shared_ends` see,
        as far as `window` still holds all of them. A failure is only logged and counted: the blocks cannot be
        reused then.
        """
        puts = [(self._parts.lasting, kept, first)] if self._parts.lasting is not None else []
        if window is not None and self._parts.windowed is not None:
            for each in (*map(kept.head, shared_ends), kept):
                tail = window.tail(len(each.keys)) if each.num_blocks else None
                if tail is not None:
                    puts.append((self._parts.windowed, each, tail.start))
        for part, each, begin in puts:
            await self._store(part, each, slots, begin, self._target_of(pool), token_s)

    async def _store(
        self, part: StoredPart, kept: PrefixSave, slots: Sequence[int], first: int, target: str, token_s: float
    ) -> None:
        if first >= kept.num_blocks or not target or not self._may_call(target):
            return
        try:
            await self._put(part, target, kept, slots, first, token_s)
            self._record_call(target)
        except PoolErrors as error:
            self._record_call(target, error)
            self._counters.add("store_failures", 1)
            log.warning("blocks were not stored in the pool: %s", error)
        except Exception:
            self._counters.add("store_failures", 1)
            log.exception("blocks were not stored in the pool")

    async def _put(
        self, part: StoredPart, target: str, kept: PrefixSave, slots: Sequence[int], first: int, token_s: float
    ) -> None:
        client, began = self.client(target), time.perf_counter()
        if target == self._own_target:
            stored = await self._local_pool.put(client, part, kept, slots, first, token_s)
            if stored is not None:
                nbytes = stored * part.spec.block_nbytes
                self._counters.add_transfer("store", nbytes, time.perf_counter() - began)
                return
        await self._writer.put(client, part, kept, slots, first, token_s=token_s)

    async def retain(self, request: Request, keys: Sequence[bytes]) -> None:
        """Let the pool that stores the request's KV keep these leading blocks, if its client announced another request.

        A failure is only logged: the blocks are then evicted as any other.
        """
        hints, target = request.proto.hints, self._target_of(request.placement.pool)
        if hints.lifetime_s <= 0 or not keys or not target or not self._may_call(target):
            return
        try:
            retained = [(self._parts.lasting.kv_namespace, keys)] if self._parts.lasting is not None else []
            if self._parts.windowed is not None:
                retained.append((self._parts.windowed.kv_namespace, keys[-self._parts.window_blocks :]))
            for namespace, chain in retained:
                await self.client(target).retain(
                    namespace,
                    key_array(chain),
                    tenant=request.placement.turn.account,
                    lifetime_s=hints.lifetime_s,
                    pause_s=hints.pause_s,
                    priority=request.placement.turn.priority,
                )
            self._record_call(target)
        except PoolErrors as error:
            self._record_call(target, error)
            log.info("a prompt is not retained by the pool at %s: %s", target, error)

    async def drop(self, superseded: bytes, pool: NodeRef) -> None:
        """Remove the partial block with key `superseded` (empty: none) from the pool, unless it is leased."""
        target = self._target_of(pool)
        if not superseded or not target or not self._may_call(target):
            return
        try:
            for part in self._parts.all:
                await self.client(target).evict(part.kv_namespace, key_array([superseded]))
            self._record_call(target)
        except PoolErrors as error:
            self._record_call(target, error)
            log.info("a superseded partial block remains at %s: %s", target, error)

    def _target_of(self, pool: NodeRef | None) -> str:
        """Return the target of a pool node, or of this host's own if none is named; the own one has its configured
        address.
        """
        elsewhere = pool is not None and pool.target and pool.node_id != self.own_node_id
        return pool.target if pool is not None and elsewhere else self._own_target

    def _may_call(self, target: str) -> bool:
        """Return True if the pool node may be called now.

        Otherwise loads are replaced by computing, stores are dropped and leases expire.
        """
        return self._breaker.try_pass(target, self._now_s())

    def _record_call(self, target: str, error: Exception | None = None) -> None:
        """Record the result of a call. Only a missed deadline counts as a hanging node."""
        if isinstance(error, DeadlineExceeded):
            self._breaker.failed(target, self._now_s())
        else:
            self._breaker.succeeded(target)


PoolErrors = (KvPoolError, ControlError, MessengerError)


class PoolWriter:
    """Writer of blocks from one worker's slots to pool nodes.

    Its methods raise PoolErrors; a failed or cancelled put leaves nothing behind.
    """

    def __init__(self, memory: SlotMemory, messenger: Messenger, *, ttl_s: float, counters: WorkerCounters) -> None:
        self._memory = memory
        self._messenger = messenger
        self._ttl_s = ttl_s
        self._counters = counters

    async def put(
        self,
        client: PoolClient,
        part: StoredPart,
        kept: PrefixSave,
        slots: Sequence[int],
        first: int,
        *,
        token_s: float = 0.0,
    ) -> None:
        """Store blocks [first, kept.num_blocks) of a part from their slots, except those that the pool already has.

        `token_s` is the time that computing one token took, which the pool uses to weigh evictions.
        """
        keys, parents, partial = kept.names(first, alone=not part.is_chained)
        valid = np.array([tokens or self._memory.block_tokens for tokens in partial], np.int32)
        # A separate task: even if cancelled, the caller must learn which slots were allocated, to abort the put.
        allocating = asyncio.ensure_future(
            client.allocate(
                part.kv_namespace,
                part.spec,
                key_array(keys),
                key_array(parents),
                ttl_s=self._ttl_s,
                num_tokens=partial if any(partial) else (),
                compute_s=token_s * int(valid.sum()),
            )
        )
        try:
            ticket = await shielded(allocating)
            if ticket.new_blocks:
                new = [slots[first + i] for i in ticket.new_blocks]
                await self._fill(client, part, ticket, new, valid[ticket.new_blocks])
        except BaseException:
            if not allocating.cancelled() and allocating.exception() is None:
                await shielded(asyncio.ensure_future(self._abort(client, allocating.result())))
            raise

    async def _fill(
        self,
        client: PoolClient,
        part: StoredPart,
        ticket: PutTicket,
        slots: Sequence[int],
        valid: NDArray[np.int32],
    ) -> None:
        began = time.perf_counter()
        await in_thread(self._memory.to_host_now, slots, part.groups)
        digests = await in_thread(lambda: [self._memory.slot_digests(g, slots, valid) for g in part.groups])
        peer = self._messenger.connect(ticket.endpoint)
        assert ticket.key is not None
        slices = self._memory.slot_slices(slots, part.groups, list(ticket.offsets))
        writing = peer.write(
            ticket.key, self._memory.region, slices, deadline_s=self._ttl_s, priority=Priority.BACKGROUND
        )
        done = await shielded(writing)
        await client.seal(ticket, digests)
        self._counters.add_transfer("store", done.nbytes, time.perf_counter() - began)

    async def _abort(self, client: PoolClient, ticket: PutTicket) -> None:
        try:
            await client.abort_put(ticket)
        except PoolErrors as error:
            log.warning("put %s was not aborted and will expire: %s", ticket.put_id, error)


def _head(pin: PinnedBlocks, end: int) -> PinnedBlocks:
    """Return the lease's blocks before block `end` of the prompt, without the partial one."""
    return replace(pin, lease=pin.lease.head(end - pin.first), tail=None, tail_tokens=0)

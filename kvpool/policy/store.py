"""Blocks and their copies in two tiers: keeps index, tier spaces and event log consistent. No puts, no lease times.

A used slot belongs to a copy of a block in the index, to a removed copy with holds (leased, being read or written), or
to the caller of `remove_unsealed`. On SSD, freed slots stay withheld until `TierSpace.take_freed`.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from kvpool.events import PoolEvents, Tier
from kvpool.policy.counters import PolicyMetrics, loss_reason
from kvpool.policy.event_log import EventLog
from kvpool.policy.eviction import RetainRequest, Use
from kvpool.policy.index import BlockIndex
from kvpool.policy.records import (
    DRAM,
    SSD,
    Block,
    BlockCopy,
    BlockKey,
    MissingRun,
    NamespaceState,
    PrefixNode,
    SsdBlock,
    block_key,
    is_evictable,
)
from kvpool.policy.slabs import SlabAllocator
from kvpool.policy.tier_space import NamespaceTable, TierSpace

UNTRACKED = "untracked"  # in place of a put's id, until it has one
_MAX_OFFERED = 4  # partial blocks returned if the tail keys of the prompt are not known


class BlockStore:
    """Blocks of a pool node; adding one evicts others as needed, and visible changes are logged."""

    def __init__(
        self,
        dram: SlabAllocator,
        ssd: SlabAllocator,
        policy: str,
        retained_shares: tuple[float, float],
        quotas: Mapping[bytes, int],
        max_tails: int,
        log: EventLog,
        metrics: PolicyMetrics,
    ) -> None:
        self.index = BlockIndex()
        self.dram = TierSpace(DRAM, dram, policy, retained_shares, self._given_up)
        self.ssd = TierSpace(SSD, ssd, policy, retained_shares, self._given_up)
        self.spaces = self.dram, self.ssd
        self.log = log
        self._dram_changes: list[tuple[bool, Block]] | None = None  # None: not recorded yet
        self.namespaces = NamespaceTable(self.dram, self.ssd, quotas)
        self._max_tails = max_tails
        self._has_ssd = ssd.num_units > 0
        self._metrics = metrics
        self._changed: dict[Block, None] = {}  # blocks with visible changes that are not logged yet

    def find(self, kv_namespace: bytes, chain_key: bytes) -> Block | None:
        """Return the block at this address, sealed or being written; None if there is none."""
        return self.index.get(block_key(kv_namespace, chain_key))

    def leading_run(self, kv_namespace: bytes, chain: Sequence[bytes]) -> list[Block]:
        """Return the longest run of full sealed blocks from the start of `chain`, in any tier."""
        return self.index.leading_run(kv_namespace, chain)

    def expect(self, runs: list[MissingRun], use: Use) -> None:
        """Announce missing blocks to the eviction policy of DRAM (`EvictionPolicy.expect`), and empty the list."""
        for run in runs:
            before = run.before
            parent = None if before.is_root else before.key
            policy = run.namespace.partitions[DRAM].policy
            policy.expect(parent, before.depth + 1, run.keys, run.last_tokens, use)
        runs.clear()

    def try_add(
        self,
        namespace: NamespaceState,
        prefix_node: PrefixNode,
        before: PrefixNode,
        num_tokens: int,
        cost_s: float,
        use: Use,
    ) -> Block | None:
        """Add an unsealed block of a put without an id at an empty node, after its parent's node `before`.

        Returns None if it cannot or should not get slots, or would form a cycle, which genuine keys never do. Then
        nothing has changed, and empty nodes are removed.
        """
        if self.index.would_form_cycle(prefix_node, before):
            self.index.discard(prefix_node)
            return None
        block = Block(prefix_node, namespace, UNTRACKED, num_tokens, cost_s)
        # Counted before anything is evicted for the block, so that the victim cannot be its parent.
        before.num_following += 1
        if not num_tokens or self._make_way_for_tail(before):
            copy = self.new_copy(block, before, DRAM)
            # With an SSD tier every block is admitted to DRAM, since it reaches the SSD through DRAM; the SSD tier's
            # policy then decides on admission.
            if self.dram.take(copy, use, "room", choosy=not self._has_ssd):
                self.add(block, before)
                return block
            self.abandon(copy, before)
        before.num_following -= 1
        self.offer(before.block)
        self.index.discard(prefix_node)
        self.index.discard(before)
        return None

    def add_run(
        self, namespace: NamespaceState, keys: Sequence[BlockKey], before: PrefixNode, cost_s: float
    ) -> list[Block]:
        """Add unsealed full blocks that follow `before` in a row, as `try_add` does, but evict nothing for them.

        Returns those added: all before the first that is in the tree already or for which no slots are free.
        """
        index, allocate = self.index, self.dram.try_slots
        nbytes, is_limited = namespace.nbytes[DRAM], namespace.quotas_nbytes[DRAM] is not None
        blocks: list[Block] = []
        for key in keys:
            prefix_node = index.node_at(key)
            is_new = prefix_node.block is None and prefix_node is not before
            if is_limited or not is_new or (prefix_node.num_following and index.would_form_cycle(prefix_node, before)):
                index.discard(prefix_node)
                break
            offsets = allocate(namespace)
            if offsets is None:
                index.discard(prefix_node)
                break
            block = Block(prefix_node, namespace, UNTRACKED, 0, cost_s)
            parent = None if before.is_root else before.key
            block.dram = copy = BlockCopy(key, parent, nbytes, before.depth + 1, cost_s, block=block, tier=DRAM)
            self.dram.assign(copy, offsets)
            before.following_dram += 1
            before.num_following += 1
            index.add(block, before)
            blocks.append(block)
            before = prefix_node
        namespace.num_blocks += len(blocks)
        return blocks

    def try_adopt(self, namespace: NamespaceState, entry: SsdBlock, use: Use) -> Block | None:
        """Add a block that is stored on SSD; the caller must then `offer` it.

        Returns None, having changed nothing, if its extent cannot be allocated.
        """
        before = self.index.node_at(namespace.kv_namespace + entry.parent)
        prefix_node = self.index.node_at(namespace.kv_namespace + entry.chain_key)
        block = Block(prefix_node, namespace, "", entry.num_tokens, entry.compute_s, entry.digests)
        before.num_following += 1
        copy = self.new_copy(block, before, SSD)
        if self.ssd.adopt(copy, entry.offset):
            self.add(block, before)
            self.ssd.complete(copy, use)
            self.ssd.insert([copy], use)
            self._changed[block] = None
            return block
        self.abandon(copy, before)
        before.num_following -= 1
        self.index.discard(prefix_node)
        self.index.discard(before)
        return None

    def tails_after(self, kv_namespace: bytes, run: Sequence[Block], tail_keys: Sequence[bytes] = ()) -> list[Block]:
        """Return sealed partial blocks after the run's last block, or at a prompt's start if the run is empty.

        That is the first of `tail_keys` that exists; if none does, the four most recently used, latest first.
        """
        prefix_node = run[-1].prefix_node if run else self.index.find_node(kv_namespace + bytes(16))
        if prefix_node is None or not prefix_node.tails:
            return []
        for tail_key in tail_keys:
            named = self.find(kv_namespace, tail_key)
            if named is not None and named.num_tokens and named.sealed and named.prefix_node.parent is prefix_node:
                return [named]
        return heapq.nlargest(_MAX_OFFERED, (tail for tail in prefix_node.tails if tail.sealed), key=_used_ns)

    def add(self, block: Block, before: PrefixNode) -> None:
        """Add the block to the index. `before.num_following` must count it already."""
        self.index.add(block, before)
        block.namespace.num_blocks += 1

    def new_copy(self, block: Block, before: PrefixNode, tier: int) -> BlockCopy:
        """Return a new copy in transit into a tier, without slots. Its parent cannot leave the tier meanwhile."""
        namespace = block.namespace
        copy = BlockCopy(
            block.prefix_node.key,
            None if before.is_root else before.key,
            namespace.nbytes[tier],
            before.depth + 1,
            block.cost_s,
            block.num_tokens,
            block.replicas,
            block=block,
            tier=tier,
        )
        if tier == DRAM:
            block.dram = copy
            before.following_dram += 1
        else:
            block.ssd = copy
            before.following_ssd += 1
        return copy

    def abandon(self, copy: BlockCopy, before: PrefixNode) -> None:
        """Discard a copy in transit that has no slots."""
        _unlink(copy, before)
        self.offer(before.block)

    def complete(self, blocks: Sequence[Block], digests: Sequence[tuple[bytes, ...]], use: Use) -> None:
        """Make unsealed blocks of one put visible to readers. The caller must then `settle` them."""
        self.index.num_sealed += len(blocks)
        for block, block_digests in zip(blocks, digests, strict=True):
            block.put_id, block.digests = "", block_digests
        self.complete_in_dram(blocks, use)

    def settle(self, blocks: Sequence[Block], use: Use) -> None:
        """Pass blocks that `complete` made visible to the eviction policy, and log them."""
        self.dram.insert([copy for block in blocks if (copy := block.dram) is not None], use)
        for block in blocks:
            if not block.prefix_node.num_following:
                self.offer(block)
        self.log_changes()

    def complete_in_dram(self, blocks: Sequence[Block], use: Use) -> None:
        """Record that the copies in DRAM of blocks of one namespace are complete; the eviction policy has yet to know.

        The caller must then `TierSpace.insert` and `offer` them.
        """
        for block in blocks:
            self._changed[block] = None
            if block.dram is not None:
                self.dram.complete(block.dram, use)
        if self._dram_changes is not None:
            self._dram_changes += [(True, block) for block in blocks]

    def hit(self, blocks: Sequence[Block], use: Use) -> None:
        """Record that a request used these sealed blocks of one namespace, in any tier."""
        self.dram.hit([copy for block in blocks if (copy := block.dram) is not None and copy.ready], use)
        if self._has_ssd:
            self.ssd.hit([copy for block in blocks if (copy := block.ssd) is not None and copy.ready], use)

    def retain(self, now_ns: int, kv_namespace: bytes, chain: Sequence[bytes], request: RetainRequest) -> bool:
        """Retain a prefix in both tiers. Returns False if DRAM has no room for it, or the namespace is unknown."""
        namespace = self.namespaces.get(kv_namespace)
        if namespace is None:
            return False
        keys = [kv_namespace + chain_key for chain_key in chain]
        if self._has_ssd:
            self.ssd.retain(now_ns, namespace, keys, request)
        return self.dram.retain(now_ns, namespace, keys, request)

    def await_use(self, now_ns: int, kv_namespace: bytes, chain: Sequence[bytes]) -> None:
        """Record that a request with this prompt has arrived and waits."""
        keys = [kv_namespace + chain_key for chain_key in chain]
        for space in self.spaces:
            space.retention.await_use(now_ns, keys)

    def set_replicas(self, kv_namespace: bytes, chain_key: bytes, replicas: int) -> None:
        """Record how many other nodes hold the block; ignore unknown blocks."""
        block = self.find(kv_namespace, chain_key)
        if block is not None:
            block.replicas = replicas
            for copy in block.copies:
                if copy is not None:
                    copy.replicas = replicas

    def may_remove(self, block: Block) -> bool:
        """Return True if the block is sealed, without holds and without followers."""
        if not block.sealed or block.removed or block.prefix_node.num_following:
            return False
        return not any(copy is not None and (copy.holds or not copy.ready) for copy in block.copies)

    def remove(self, block: Block) -> None:
        """Remove a sealed block; its slots are freed when nothing holds them. `log_changes` logs it."""
        assert block.sealed
        copies = [copy for copy in block.copies if copy is not None]
        parent = block.prefix_node.parent
        assert parent is not None
        for copy in copies:
            if copy.ready:
                self.spaces[copy.tier].leave(copy)
            _unlink(copy, parent)
            if copy.holds:
                _keep(copy)
            self._leave(copy)
        self._changed[block] = None
        self._forget(block)

    def drop(self, copy: BlockCopy, reason: str) -> None:
        """Remove an evictable copy from its tier for another reason than room, and count it."""
        self.spaces[copy.tier].leave(copy)
        self._metrics.record_eviction(copy, reason, None, None)
        self._drop(copy)

    def withdraw(self, copy: BlockCopy) -> None:
        """Discard a copy in transit; its slots are freed when nothing holds them."""
        parent = copy.block.prefix_node.parent
        assert parent is not None
        self._leave(copy)
        _unlink(copy, parent)
        self.offer(parent.block)

    def release(self, copy: BlockCopy) -> None:
        """Release one hold. The slots of a removed copy are freed with the last one."""
        copy.holds -= 1
        if copy.holds:
            return
        if copy.gone:
            self.spaces[copy.tier].free(copy)
        elif not copy.block.prefix_node.following(copy.tier):
            self.spaces[copy.tier].offer(copy)

    def release_all(self, copies: Sequence[BlockCopy]) -> None:
        """Release one hold of each copy."""
        for copy in copies:
            self.release(copy)

    def remove_unsealed(self, blocks: Sequence[Block]) -> list[int]:
        """Remove unsealed blocks, last first; their slots stay used until `dram.free_slots`."""
        offsets: list[int] = []
        for block in reversed(blocks):
            copy, parent = block.dram, block.prefix_node.parent
            assert copy is not None
            assert parent is not None
            offsets += self.dram.hand_over(copy)
            copy.gone = True
            parent.following_dram -= 1
            self._forget(block)
        return offsets

    def hold_after_gap(self, found: Sequence[Block | None]) -> list[BlockCopy]:
        """Hold the DRAM copies after the chain's first missing block (None), so that they are not evicted for it.

        Returns the copies, which the caller must release.
        """
        first = found.index(None) if None in found else len(found)
        copies = [copy for block in found[first:] if block is not None and (copy := block.dram) is not None]
        for copy in copies:
            copy.holds += 1
        return copies

    def in_dram(self) -> Iterator[Block]:
        """Yield the blocks with a complete copy in DRAM."""
        return (b for b in self.index if (copy := b.dram) is not None and copy.ready)

    def take_dram_changes(self) -> list[tuple[bool, Block]]:
        """Implement `PoolCore.take_dram_changes`."""
        changes = self._dram_changes
        if changes is None:
            changes = [(True, block) for block in self.in_dram()]
        self._dram_changes = []
        return changes

    def relocated(self, block: Block) -> None:
        """Record that the block's copy in DRAM has other slots now."""
        if self._dram_changes is not None:
            self._dram_changes += (False, block), (True, block)

    def log_changes(self) -> None:
        """Log visible changes since the last call: one event per namespace and move, removals first."""
        if not self._changed:
            return
        moves: defaultdict[tuple[bytes, Tier | None, Tier | None], bytearray] = defaultdict(bytearray)
        for block in self._changed:
            now = None if block.removed else _tier(block)
            if now is not block.logged_tier and not block.num_tokens:
                key = block.prefix_node.key
                moves[key[:16], block.logged_tier, now] += key[16:]
                block.logged_tier = now
        self._changed.clear()
        for kv_namespace, before, now in sorted(moves, key=_is_stored):
            self.log.append(kv_namespace, bytes(moves[kv_namespace, before, now]), before, now)

    def snapshot(self) -> list[PoolEvents]:
        """Return all full sealed blocks, as the messages that begin an event stream."""
        self.log_changes()
        blocks: defaultdict[tuple[bytes, Tier], bytearray] = defaultdict(bytearray)
        for block in self.index:
            if block.sealed and not block.num_tokens:
                blocks[block.kv_namespace, _tier(block)] += block.chain_key
        return self.log.snapshot(blocks)

    def _make_way_for_tail(self, before: PrefixNode) -> bool:
        """Remove the least recently used partial block after `before` if there are `max_tails`.

        Returns False if none can be removed.
        """
        tails = before.tails or ()
        if len(tails) < self._max_tails:
            return True
        movable = [tail for tail in tails if self.may_remove(tail)]
        if not movable:
            return False
        oldest = min(movable, key=_used_ns)
        self.evict(oldest, "tail")
        return True

    def evict(self, block: Block, reason: str) -> None:
        """Remove a removable block and count it."""
        copies = [copy for copy in block.copies if copy is not None]
        self.remove(block)
        for copy in copies:
            loss = loss_reason(copy, self._has_ssd) if copy is copies[-1] else None
            self._metrics.record_eviction(copy, reason, None, loss)

    def _given_up(self, copy: BlockCopy, reason: str, now_ns: int) -> None:
        """Drop a copy whose room was needed, and count it."""
        is_last = copy.other is None
        self._metrics.record_eviction(copy, reason, now_ns, loss_reason(copy, self._has_ssd) if is_last else None)
        self._drop(copy)

    def _drop(self, copy: BlockCopy) -> None:
        block, other = copy.block, copy.other
        parent = block.prefix_node.parent
        assert parent is not None
        self._leave(copy)
        _unlink(copy, parent)
        self._changed[block] = None
        if other is None:
            self._forget(block)
            return
        if copy.tier == SSD:
            other.in_slower_tier = False
        self.offer(block)
        self.offer(parent.block)

    def _leave(self, copy: BlockCopy) -> None:
        copy.gone = True
        if copy.tier == DRAM and copy.ready and self._dram_changes is not None:
            self._dram_changes.append((False, copy.block))
        if not copy.holds:
            self.spaces[copy.tier].free(copy)

    def _forget(self, block: Block) -> None:
        parent = self.index.remove(block)
        block.namespace.num_blocks -= 1
        self.offer(parent.block)

    def offer(self, block: Block | None) -> None:
        """Offer the block's copies for eviction, after they or their followers changed."""
        if block is not None:
            if block.dram is not None and not block.prefix_node.following_dram:
                self.dram.offer(block.dram)
            if block.ssd is not None and not block.prefix_node.following_ssd:
                self.ssd.offer(block.ssd)


def _unlink(copy: BlockCopy, parent: PrefixNode) -> None:
    """Detach the copy from its block; it no longer keeps its parent in the tier."""
    if copy.tier == DRAM:
        copy.block.dram = None
        parent.following_dram -= 1
    else:
        copy.block.ssd = None
        parent.following_ssd -= 1


def _keep(copy: BlockCopy) -> None:
    """Link a removed block's copy again, for the holders that still use it."""
    if copy.tier == DRAM:
        copy.block.dram = copy
    else:
        copy.block.ssd = copy


def _tier(block: Block) -> Tier:
    dram = block.dram
    return Tier.DRAM if dram is not None and dram.ready else Tier.SSD


def _is_stored(move: tuple[bytes, Tier | None, Tier | None]) -> bool:
    return move[2] is not None


def _used_ns(block: Block) -> int:
    return max(copy.used_ns for copy in block.copies if copy is not None)


def flush(store: BlockStore, kv_namespace: bytes | None, *, dram_only: bool) -> tuple[int, int]:
    """Implement `PoolCore.flush`."""
    matching = [
        block
        for block in store.index
        if (kv_namespace is None or block.kv_namespace == kv_namespace) and (not dram_only or block.dram is not None)
    ]
    left = sorted(matching, key=lambda block: block.prefix_node.depth)
    removed = 0
    while left:
        # Last blocks of chains first. Repeated, because depths are inexact for blocks added without their parent.
        kept = [block for block in reversed(left) if not (_drop(store, block) if dram_only else _remove(store, block))]
        if len(kept) == len(left):
            break
        removed += len(left) - len(kept)
        left = kept[::-1]
    store.log_changes()
    return removed, len(left)


def _remove(store: BlockStore, block: Block) -> bool:
    may = store.may_remove(block)
    if may:
        store.evict(block, "flushed")
    return may


def _drop(store: BlockStore, block: Block) -> bool:
    copy = block.dram
    may = copy is not None and copy.in_slower_tier and is_evictable(copy)
    if copy is not None and may:
        store.drop(copy, "flushed")
    return may

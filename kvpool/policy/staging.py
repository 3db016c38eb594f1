"""Moves of blocks between the tiers: loads from SSD, writes to it, and restoring its contents. Plans only, no I/O.

Chains on SSD are complete: a block is written after those before it in its chain and evicted before them. So a restored
chain can be matched from its start, and an eviction from DRAM never breaks a chain whose end is on SSD.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence

from kvpool.errors import SpecError, SpecMismatch
from kvpool.policy.counters import PolicyMetrics
from kvpool.policy.eviction import Use
from kvpool.policy.records import (
    DRAM,
    SSD,
    Block,
    BlockCopy,
    LoadOutcome,
    NamespaceState,
    SsdBlock,
    TierLoad,
    TierWrite,
)
from kvpool.policy.store import BlockStore

_NUM_AHEAD = 64  # next victims of DRAM considered per call of `next_writes`
_MAX_REUSED = 1 << 16
_MAX_ERRORS = 2  # in a row, of reading or of writing one block


class Staging:
    """Loads and writes in flight, and the choice of the next ones. Each load and write is ended exactly once."""

    def __init__(
        self, store: BlockStore, metrics: PolicyMetrics, write_above: float, least_nbytes: int | None = None
    ) -> None:
        """Set `least_nbytes` if the arena may be shrunk to it: then blocks are written ahead, so that it loses few."""
        self.loads: dict[TierLoad, None] = {}
        self.writes: dict[TierWrite, None] = {}
        self._store = store
        self._metrics = metrics
        self._has_ssd = store.ssd.slabs.num_units > 0
        self.writes_ahead = self._has_ssd and least_nbytes is not None
        self._write_above = write_above
        self._write_above_nbytes = write_above * store.dram.slabs.usable_nbytes
        self._most_unwritten_nbytes = write_above * (least_nbytes or 0)
        self._stored: deque[Block] = deque()  # stored by puts, the oldest first, and possibly not on SSD
        self._stored_nbytes = 0
        self._taken_stored: set[Block] = set()  # taken from it by this call of `next_writes`
        self._reused: deque[Block] = deque(maxlen=_MAX_REUSED)  # used again, and possibly not on SSD
        self._all: deque[Block] = deque()  # while everything is being written: blocks not yet considered

    def resized(self, usable_nbytes: int) -> None:
        """Adapt to another size of the arena's usable part."""
        self._write_above_nbytes = self._write_above * usable_nbytes

    def write_ahead(self, blocks: Sequence[Block]) -> None:
        """Queue blocks that a put stored; the oldest are written while more wait than `write_above` of the least size.

        So what the arena may have to yield at once is on SSD already, apart from what the SSD is too slow for.
        """
        self._stored += blocks
        self._stored_nbytes += sum(block.namespace.nbytes[DRAM] for block in blocks)

    def mark_reused(self, blocks: Sequence[Block]) -> None:
        """Count another use of these blocks, and queue those that are not on SSD to be written."""
        for block in blocks:
            block.num_uses += 1
            if block.num_uses == 1 and self._has_ssd and block.ssd is None:
                self._reused.append(block)

    def load(
        self, now_ns: int, kv_namespace: bytes, chain: Sequence[bytes], tails: bool, tail_keys: Sequence[bytes]
    ) -> list[TierLoad]:
        """Implement `PoolCore.load`."""
        store = self._store
        run = store.leading_run(kv_namespace, chain)
        wanted = [block for block in run if block.dram is None]
        if tails:
            wanted += [tail for tail in store.tails_after(kv_namespace, run, tail_keys) if tail.dram is None]
        if not wanted:
            return []
        held = [copy for block in run if (copy := block.dram) is not None]
        for copy in held:
            copy.holds += 1
        use = Use(now_ns, len(chain))
        loads: list[TierLoad] = []
        for block in wanted:
            load = self._begin_load(block, use)
            if load is None:
                break
            loads.append(load)
        for copy in held:
            store.release(copy)
        store.log_changes()
        self.loads |= dict.fromkeys(loads)
        return loads

    def loaded(self, now_ns: int, load: TierLoad, outcome: LoadOutcome) -> None:
        """Implement `PoolCore.loaded`."""
        del self.loads[load]
        block, store = load.block, self._store
        dram, ssd = block.copies
        assert dram is not None
        assert ssd is not None
        is_loaded = outcome is LoadOutcome.OK and not block.removed
        if is_loaded:
            dram.promoted = True
            use = Use(now_ns)
            store.complete_in_dram([block], use)
            store.dram.insert([dram], use)
        elif not block.removed:
            store.withdraw(dram)
        store.release(dram)
        store.release(ssd)
        if is_loaded:
            block.num_read_errors = 0
            self._metrics.counters["promoted_blocks"] += 1
        elif not block.removed:
            self._load_failed(block, outcome)
        store.log_changes()

    def num_loading(self, kv_namespace: bytes, chain: Sequence[bytes]) -> int:
        """Implement `PoolCore.num_loading`."""
        found = self._store.index.find([kv_namespace + chain_key for chain_key in chain])
        copies = (block.dram for block in found if block is not None and block.sealed)
        return sum(copy is not None and not copy.ready for copy in copies)

    def next_writes(self, now_ns: int, max_nbytes: int, everything: bool) -> list[TierWrite]:
        """Implement `PoolCore.writes`."""
        if not self._has_ssd:
            return []
        store = self._store
        # Per namespace: bytes without an extent, and the use in DRAM up to which copies on SSD are spared.
        wanted: dict[NamespaceState, list[float]] = {}
        skipped: set[Block | None] = set()
        without_extent: list[Block] = []
        self._taken_stored.clear()
        writes: list[TierWrite] = []
        for block, spare_until in self._plan(now_ns, max_nbytes, everything):
            parent = block.prefix_node.parent
            assert parent is not None
            if parent.block in skipped and parent.block is not None:
                skipped.add(block)
                continue
            write, is_worth_room = self._begin_write(block, Use(now_ns), ask=spare_until is not None)
            if write is not None:
                writes.append(write)
                continue
            skipped.add(block)
            if is_worth_room and spare_until is not None:
                need = wanted.setdefault(block.namespace, [0, spare_until])
                need[0] += block.namespace.nbytes[SSD]
                without_extent.append(block)
        if skipped and self._reused:
            self._reused.popleft()  # otherwise a chain that gets no extents would block all others
        if skipped and self._stored_nbytes > self._most_unwritten_nbytes:
            self._take_stored()  # for the same reason
        self.write_ahead([block for block in without_extent if block in self._taken_stored])
        for namespace, (nbytes, spare_until) in wanted.items():
            store.ssd.make_room(namespace, int(nbytes), spare_until, now_ns)
        store.log_changes()
        self.writes |= dict.fromkeys(writes)
        return writes

    def written(self, now_ns: int, write: TierWrite, ok: bool, block_at_fault: bool) -> None:
        """Implement `PoolCore.written`."""
        del self.writes[write]
        block, store = write.block, self._store
        dram, ssd = block.copies
        assert dram is not None
        assert ssd is not None
        if block.removed:
            pass
        elif ok:
            block.num_write_errors = 0
            dram.in_slower_tier = True
            use = Use(now_ns)
            store.ssd.complete(ssd, use)
            store.ssd.insert([ssd], use)
        else:
            block.num_write_errors += block_at_fault
            store.withdraw(ssd)
        self._metrics.counters["ssd_stored_blocks" if ok else "ssd_failed_blocks"] += 1
        store.release(dram)
        store.release(ssd)

    def restore(self, now_ns: int, entries: Sequence[SsdBlock]) -> int:
        """Implement `PoolCore.restore`."""
        by_key = {(entry.kv_namespace, entry.chain_key): entry for entry in entries}
        use = Use(now_ns)
        restored: list[Block] = []
        refused = [entry for entry in entries if by_key[_address(entry)] is not entry]
        for entry in _parents_first(by_key):
            block = self._restore(entry, use)
            if block is None:
                refused.append(entry)
            else:
                restored.append(block)
        for block in restored:
            self._store.offer(block)
        self._store.ssd.refuse([entry.offset for entry in refused])
        self._store.log_changes()
        self._metrics.counters["restored_blocks"] += len(restored)
        self._metrics.counters["ssd_refused_blocks"] += len(refused)
        return len(restored)

    def _begin_load(self, block: Block, use: Use) -> TierLoad | None:
        parent, ssd = block.prefix_node.parent, block.ssd
        assert parent is not None
        assert ssd is not None
        copy = self._store.new_copy(block, parent, DRAM)
        copy.in_slower_tier = True
        if not self._store.dram.take(copy, use, "promotion", choosy=False):
            self._store.abandon(copy, parent)
            return None
        copy.holds += 1
        ssd.holds += 1
        return TierLoad(block, ssd.offsets[0], copy.offsets)

    def _load_failed(self, block: Block, outcome: LoadOutcome) -> None:
        counters = self._metrics.counters
        counters["load_failed_blocks"] += 1
        block.num_read_errors += 1
        if outcome is LoadOutcome.CORRUPT:
            counters["quarantined_blocks"] += 1
            self._store.remove(block)
        elif block.num_read_errors >= _MAX_ERRORS:
            counters["ssd_dropped_blocks"] += 1
            self._store.remove(block)

    def _plan(self, now_ns: int, max_nbytes: int, everything: bool) -> list[tuple[Block, float | None]]:
        """Return the blocks to write, in order, each with the use in DRAM up to which others are spared on SSD.

        None spares all: the block is written only if an extent is free.
        """
        plan: dict[Block, float | None] = {}
        nbytes = 0
        for candidate, spare_until in self._candidates(now_ns, everything):
            if nbytes >= max_nbytes:
                break
            for block in self._unwritten(candidate, everything):
                if block in plan:
                    continue
                nbytes += block.namespace.nbytes[SSD]
                if plan and nbytes > max_nbytes:
                    return list(plan.items())
                plan[block] = spare_until
        return list(plan.items())

    def _candidates(self, now_ns: int, everything: bool) -> Iterator[tuple[Block, float | None]]:
        store = self._store
        if everything:
            yield from ((block, math.inf) for block in _taken(self._all))
            self._all.extend(store.index)
            yield from ((block, math.inf) for block in _taken(self._all))
            return
        if store.dram.slabs.nbytes_used > self._write_above_nbytes:
            for victim in store.dram.next_victims(now_ns, _NUM_AHEAD):
                yield victim.block, victim.last_use
        while self._stored_nbytes > self._most_unwritten_nbytes:
            block = self._stored[0]
            if block.dram is not None and block.ssd is None and not block.removed:
                yield block, block.dram.last_use
            self._take_stored()
        yield from ((block, None) for block in _taken(self._reused))

    def _take_stored(self) -> None:
        block = self._stored.popleft()
        self._stored_nbytes -= block.namespace.nbytes[DRAM]
        self._taken_stored.add(block)

    def _unwritten(self, block: Block, everything: bool) -> list[Block]:
        """Return the block and its ancestors that are not on SSD, first ancestor first.

        Returns an empty list if they cannot all be written, or if the chain's start is missing and not `everything` is
        written.
        """
        found: list[Block] = []
        each: Block | None = block
        while each is not None and each.ssd is None:
            dram, parent = each.dram, each.prefix_node.parent
            is_writable = dram is not None and dram.ready and not each.removed
            if not is_writable or each.num_write_errors >= _MAX_ERRORS or parent is None:
                return []
            found.append(each)
            if parent.is_root:
                break
            each = parent.block
        else:
            if each is None and not everything:
                return []
        found.reverse()
        return found

    def _begin_write(self, block: Block, use: Use, *, ask: bool) -> tuple[TierWrite | None, bool]:
        """Return (the write or None if there is no free extent, True if the block is worth evicting another).

        The second value is False unless `ask` is set.
        """
        store, parent, dram = self._store, block.prefix_node.parent, block.dram
        assert parent is not None
        assert dram is not None
        copy: BlockCopy = store.new_copy(block, parent, SSD)
        if not store.ssd.slabs.fits(copy.nbytes) or not store.ssd.try_take(copy):
            is_worth = ask and store.ssd.slabs.fits(copy.nbytes) and store.ssd.admits(copy, use)
            store.abandon(copy, parent)
            return None, is_worth
        copy.holds += 1
        dram.holds += 1
        return TierWrite(block, dram.offsets, copy.offsets[0]), False

    def _restore(self, entry: SsdBlock, use: Use) -> Block | None:
        store = self._store
        if store.find(entry.kv_namespace, entry.chain_key) is not None:
            return None
        try:
            namespace = store.namespaces.of(entry.kv_namespace, entry.spec)
        except (SpecMismatch, SpecError):
            return None
        return store.try_adopt(namespace, entry, use)


def _taken(blocks: deque[Block]) -> Iterator[Block]:
    """Yield and remove the blocks in order. A block is removed only when the next is requested, as it may not fit."""
    while blocks:
        yield blocks[0]
        blocks.popleft()


def _address(entry: SsdBlock) -> tuple[bytes, bytes]:
    return entry.kv_namespace, entry.chain_key


def _parents_first(entries: dict[tuple[bytes, bytes], SsdBlock]) -> Iterator[SsdBlock]:
    """Yield all entries, each after its parent, otherwise in their order."""
    waiting = dict(entries)
    for entry in entries.values():
        path: list[SsdBlock] = []
        each: SsdBlock | None = waiting.pop(_address(entry), None)
        while each is not None:
            path.append(each)
            each = waiting.pop((each.kv_namespace, each.parent), None)
        yield from reversed(path)

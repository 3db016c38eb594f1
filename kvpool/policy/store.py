"""Blocks and the slots they lie in: index, allocator and event log moved together. No puts, no leases' times.

Slots are held by a block that can be found (in the index), by a removed block that is still leased, or by whoever took
them over with `take_out`; everything else is free.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from kvpool.errors import SpecError, SpecMismatch
from kvpool.events import BlockRun, PoolEvents
from kvpool.policy.event_log import EventLog
from kvpool.policy.index import BlockIndex
from kvpool.policy.records import Block, block_key
from kvpool.policy.slabs import SlabAllocator
from kvpool.spec import KvSpec

__all__ = ["BlockStore"]


class BlockStore:
    """Adds, seals and removes blocks, evicting what new ones need, and logs what readers can see of it."""

    def __init__(self, arena_nbytes: int, slab_nbytes: int, log: EventLog, counters: Counter[str]) -> None:
        self.index = BlockIndex()
        self.slabs = SlabAllocator(arena_nbytes, slab_nbytes)
        self.log = log
        self.num_blocks: Counter[bytes] = Counter()  # with slots, per namespace
        self._specs: dict[bytes, KvSpec] = {}
        self._counters = counters
        self._removed: defaultdict[bytes, bytearray] = defaultdict(bytearray)  # visible before, not yet in the log

    def check_spec(self, kv_namespace: bytes, spec: KvSpec) -> None:
        """Raises SpecMismatch when the namespace has another spec here, SpecError when no slot could ever fit."""
        known = self._specs.get(kv_namespace, spec)
        if known != spec:
            raise SpecMismatch(f"namespace {kv_namespace.hex()} holds blocks of {known}, not of {spec}")
        for g in range(spec.num_groups):
            if not self.slabs.fits(spec.slot_nbytes(g)):
                raise SpecError(f"a slot of group {g} takes {spec.slot_nbytes(g)} bytes: the arena is too small for it")

    def spec_of(self, kv_namespace: bytes) -> KvSpec | None:
        """The spec of a namespace that has blocks here."""
        return self._specs.get(kv_namespace)

    def find(self, kv_namespace: bytes, chain_key: bytes) -> Block | None:
        """The block of this address, sealed or being written."""
        return self.index.get(block_key(kv_namespace, chain_key))

    def leading_run(self, kv_namespace: bytes, chain: Sequence[bytes]) -> list[Block]:
        """The longest run of sealed blocks from the start of `chain`."""
        blocks: list[Block] = []
        for chain_key in chain:
            block = self.find(kv_namespace, chain_key)
            if block is None or not block.sealed:
                break
            blocks.append(block)
        return blocks

    def try_add(self, kv_namespace: bytes, spec: KvSpec, chain_key: bytes, parent: bytes, put_id: str) -> Block | None:
        """A new block, being written by `put_id`; None when its slots cannot be had even by eviction."""
        parent_key = block_key(kv_namespace, parent)
        # Before anything is evicted for it: the victim must not be the parent.
        self.index.hold_parent(parent_key)
        offsets = self._try_take_slots(spec)
        if offsets is None:
            self.index.drop_parent(parent_key)
            return None
        block = Block(block_key(kv_namespace, chain_key), parent_key, spec, offsets, put_id)
        self.index.add(block)
        self._specs[kv_namespace] = spec
        self.num_blocks[kv_namespace] += 1
        return block

    def seal(self, blocks: Sequence[Block], digests: Sequence[tuple[bytes, ...]]) -> None:
        """Readers may have the blocks, all of one namespace, from now on."""
        for block, block_digests in zip(blocks, digests, strict=True):
            self.index.seal(block, block_digests)
        if blocks:
            chain = b"".join(block.chain_key for block in blocks)
            self.log.append(stored=True, run=BlockRun(blocks[0].kv_namespace, chain))

    def remove(self, block: Block) -> None:
        """A sealed block can be found no more; its slots are free when its last lease ends. `flush` logs it."""
        self.index.remove(block)
        self._after_removal(block)

    def unlease(self, block: Block) -> None:
        """One lease less; with the last one a removed block's slots become free."""
        self.index.unlease(block)
        if block.removed and not block.num_leases:
            self._forget(block)

    def take_out(self, blocks: Sequence[Block]) -> list[int]:
        """Take unsealed blocks out, the last first; their slots stay used until `free_slots`."""
        for block in reversed(blocks):
            self.index.remove(block)
            self._uncount(block)
        return [offset for block in blocks for offset in block.offsets]

    def free_slots(self, offsets: Sequence[int]) -> None:
        """The slots have no holder any more."""
        for offset in offsets:
            self.slabs.free(offset)

    def flush(self) -> None:
        """Log what was removed since the last flush: one event per namespace."""
        for kv_namespace, chain in self._removed.items():
            self.log.append(stored=False, run=BlockRun(kv_namespace, bytes(chain)))
        self._removed.clear()

    def snapshot(self) -> list[PoolEvents]:
        """All sealed blocks, as the messages that begin an event stream."""
        blocks: defaultdict[bytes, bytearray] = defaultdict(bytearray)
        for block in self.index:
            if block.sealed:
                blocks[block.kv_namespace] += block.chain_key
        return self.log.snapshot(blocks)

    def _try_take_slots(self, spec: KvSpec) -> tuple[int, ...] | None:
        offsets: list[int] = []
        for g in range(spec.num_groups):
            while (offset := self.slabs.try_allocate(spec.slot_nbytes(g))) is None:
                victim = self.index.pop_victim()
                if victim is None:
                    self.free_slots(offsets)
                    return None
                self._after_removal(victim)
                self._counters["evicted_blocks"] += 1
            offsets.append(offset)
        return tuple(offsets)

    def _after_removal(self, block: Block) -> None:
        self._removed[block.kv_namespace] += block.chain_key
        if not block.num_leases:
            self._forget(block)

    def _forget(self, block: Block) -> None:
        self.free_slots(block.offsets)
        self._uncount(block)

    def _uncount(self, block: Block) -> None:
        self.num_blocks[block.kv_namespace] -= 1
        if not self.num_blocks[block.kv_namespace]:
            del self.num_blocks[block.kv_namespace], self._specs[block.kv_namespace]

"""Self-check of the policy core: consistency of blocks, copies, slots, puts, leases, loads, writes and fences."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping

from kvpool.policy.records import DRAM, SSD, Block, BlockCopy, LeaseRecord, PutRecord, TierLoad, TierWrite
from kvpool.policy.staging import Staging
from kvpool.policy.store import BlockStore


def audit(
    store: BlockStore,
    staging: Staging,
    puts: Mapping[str, PutRecord],
    leases: Mapping[str, LeaseRecord],
    fenced_puts: Mapping[str, list[int]],
) -> list[str]:
    """Return descriptions of all inconsistencies; empty if the state is consistent."""
    blocks = list(store.index)
    holds = _holds(staging, leases)
    held = {id(copy): copy for copy in holds}.values()
    copies = {id(c): c for block in blocks for c in block.copies if c is not None}
    copies |= {id(copy): copy for copy in held}
    problems = [*store.index.validate(), *store.dram.validate(), *store.ssd.validate()]
    for tier, fenced in ((DRAM, fenced_puts), (SSD, {})):
        problems += _slots(store, tier, [copy for copy in copies.values() if copy.tier == tier], fenced)
    problems += _held(copies.values(), holds)
    problems += _tiers(blocks)
    if {id(b) for b in blocks if not b.sealed} != {id(b) for put in puts.values() for b in put.blocks}:
        problems.append("the unsealed blocks differ from the blocks of the puts")
    if Counter(block.kv_namespace for block in blocks) != store.namespaces.num_blocks:
        problems.append("the namespaces' counts of blocks are wrong")
    problems += _namespaces(copies.values())
    return problems


def _holds(staging: Staging, leases: Mapping[str, LeaseRecord]) -> Counter[BlockCopy]:
    """Return the number of holders of each copy: leases, and reads and writes in progress."""
    holds = Counter(copy for lease in leases.values() for copy in lease.copies)
    moves: list[TierLoad | TierWrite] = [*staging.loads, *staging.writes]
    for move in moves:
        holds.update(copy for copy in move.block.copies if copy is not None)
    return holds


def _slots(store: BlockStore, tier: int, copies: list[BlockCopy], fenced: Mapping[str, list[int]]) -> list[str]:
    """Check that every used slot of a tier has one holder, overlaps no other slot and lies within the tier."""
    space, name = store.spaces[tier], ("DRAM", "SSD")[tier]
    spans = [
        (offset, offset + size)
        for copy in copies
        for offset, size in zip(copy.offsets, copy.block.namespace.sizes[tier], strict=True)
    ]
    problems = []
    if {offset: id(copy) for copy in copies for offset in copy.offsets} != {o: id(c) for o, c in space.holders.items()}:
        problems.append(f"the holders of slots in {name} differ from the copies there")
    spans += [(offset, offset + 1) for offsets in fenced.values() for offset in offsets]
    spans += [(offset, offset + nbytes) for offset, nbytes in space.freed.items()]
    spans.sort()
    if len(spans) != space.slabs.num_slots_used:
        problems.append(f"{space.slabs.num_slots_used} slots are used in {name}, {len(spans)} have holders")
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        problems.append(f"two slots overlap in {name}")
    if spans and (spans[0][0] < 0 or spans[-1][1] > space.slabs.num_units * space.slabs.unit_nbytes):
        problems.append(f"a slot lies outside of {name}")
    return problems


def _held(copies: Collection[BlockCopy], holds: Counter[BlockCopy]) -> list[str]:
    """Check every copy's count of holds."""
    return [
        f"a copy of block {copy.block.chain_key.hex()} counts {copy.holds} holds, there are {holds[copy]}"
        for copy in copies
        if copy.holds != holds[copy]
    ]


def _tiers(blocks: list[Block]) -> list[str]:
    """Check that every sealed block has a complete copy, and that its copies are linked and marked correctly."""
    problems = []
    for block in blocks:
        dram, ssd = block.copies
        name = block.chain_key.hex()
        if block.sealed and not any(copy is not None and copy.ready for copy in block.copies):
            problems.append(f"block {name} is sealed but has no complete copy")
        if any(copy is not None and (copy.gone or copy.block is not block) for copy in block.copies):
            problems.append(f"block {name} has a copy that is gone, or of another block")
        if dram is not None and dram.in_slower_tier != (ssd is not None and ssd.ready):
            problems.append(f"block {name} is wrongly marked as being on SSD or not")
    return problems


def _namespaces(copies: Collection[BlockCopy]) -> list[str]:
    problems = []
    namespaces = {id(copy.block.namespace): copy.block.namespace for copy in copies}
    for namespace in namespaces.values():
        mine = [copy for copy in copies if copy.block.namespace is namespace]
        used = [sum(copy.nbytes for copy in mine if copy.tier == tier) for tier in (DRAM, SSD)]
        if namespace.num_copies != len(mine) or namespace.used_nbytes != used:
            problems.append(f"namespace {namespace.kv_namespace.hex()} has a wrong count of copies or bytes")
    return problems

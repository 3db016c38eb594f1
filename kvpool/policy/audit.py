"""The pool node's self-check: whether blocks, slots, puts, leases and fences account for each other."""

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from kvpool.policy.records import Block

if TYPE_CHECKING:
    from kvpool.policy.core import PoolCore

__all__ = ["audit"]


def audit(core: "PoolCore") -> list[str]:
    """What does not fit together, in words; empty when all does."""
    leased = {id(block): block for lease in core.leases.values() for block in lease.blocks}
    holders = [*core.store.index, *(block for block in leased.values() if block.removed)]
    problems = [*core.store.index.validate(), *core.store.slabs.validate()]
    problems += _slots(core, holders)
    problems += _leases(core, holders)
    unsealed = {id(block) for block in core.store.index if not block.sealed}
    if unsealed != {id(block) for put in core.puts.values() for block in put.blocks}:
        problems.append("the unsealed blocks are not those of the puts")
    if Counter(block.kv_namespace for block in holders) != core.store.num_blocks:
        problems.append("the namespaces' numbers of blocks are not those of the blocks")
    return problems


def _slots(core: "PoolCore", holders: list[Block]) -> list[str]:
    """Every used slot has one holder, none reaches into another or out of the arena."""
    spans = [
        (offset, offset + block.spec.slot_nbytes(g)) for block in holders for g, offset in enumerate(block.offsets)
    ]
    spans += [(offset, offset + 1) for offsets in core.fenced.values() for offset in offsets]
    spans.sort()
    problems = []
    if len(spans) != core.store.slabs.num_slots_used:
        problems.append(f"{core.store.slabs.num_slots_used} slots are used, {len(spans)} have holders")
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        problems.append("two slots overlap")
    if spans and (spans[0][0] < 0 or spans[-1][1] > core.limits.arena_nbytes):
        problems.append("a slot lies outside of the arena")
    return problems


def _leases(core: "PoolCore", holders: list[Block]) -> list[str]:
    """Every block knows how many leases it has."""
    counted = Counter(id(block) for lease in core.leases.values() for block in lease.blocks)
    return [
        f"block {block.chain_key.hex()} counts {block.num_leases} leases, there are {counted[id(block)]}"
        for block in holders
        if block.num_leases != counted[id(block)]
    ]

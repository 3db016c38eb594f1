"""Emptying a pool node of what nobody uses, because somebody asks for it."""

from kvpool.policy.index import may_leave
from kvpool.policy.records import Block
from kvpool.policy.store import BlockStore

__all__ = ["flush"]


def flush(store: BlockStore, kv_namespace: bytes | None, *, dram_only: bool) -> tuple[int, int]:
    """See `PoolCore.flush`."""
    asked = [
        block
        for block in store.index
        if (kv_namespace is None or block.kv_namespace == kv_namespace) and (not dram_only or block.dram is not None)
    ]
    left = sorted(asked, key=lambda block: block.place.depth)
    removed = 0
    while left:
        # The last of a chain first; again, as depths of blocks whose beginning was missing once are not exact.
        kept = [block for block in reversed(left) if not (_drop(store, block) if dram_only else _remove(store, block))]
        if len(kept) == len(left):
            break
        removed += len(left) - len(kept)
        left = kept[::-1]
    store.tell()
    return removed, len(left)


def _remove(store: BlockStore, block: Block) -> bool:
    may = store.may_remove(block)
    if may:
        store.evict(block, "flushed")
    return may


def _drop(store: BlockStore, block: Block) -> bool:
    copy = block.dram
    may = copy is not None and copy.kept_below and may_leave(copy)
    if copy is not None and may:
        store.drop(copy, "flushed")
    return may

"""The blocks of a pool node by full address, their tree, and who is evicted next. It knows neither bytes nor time.

Eviction takes the least recently used leaf: a block without children here, sealed, not leased. So a block never leaves
before the blocks that follow it in some prompt, which could not be matched without it; a use of a prompt touches its
whole path. A block may be here without its parent, when the parent was removed as corrupt or its put failed: it can be
matched again once the parent is back.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator

from kvpool.policy.records import Block, BlockKey

__all__ = ["BlockIndex"]


class BlockIndex:
    """All blocks that can be found: those being written (not visible to readers) and the sealed ones."""

    def __init__(self) -> None:
        self.num_sealed = 0
        self._blocks: dict[BlockKey, Block] = {}
        self._num_children: dict[BlockKey, int] = defaultdict(int)
        self._uses = 0
        self._leaves: list[tuple[int, BlockKey]] = []  # heap of (last_use, key); entries go stale and are skipped

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: BlockKey) -> Block | None:
        """The block of this address, sealed or not."""
        return self._blocks.get(key)

    def hold_parent(self, parent: BlockKey) -> None:
        """A child of `parent` is coming: do not evict it. Ends with `drop_parent` or with the child's removal."""
        self._num_children[parent] += 1

    def drop_parent(self, parent: BlockKey) -> None:
        """One child of `parent` less."""
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            self._offer(self._blocks.get(parent))

    def add(self, block: Block) -> None:
        """Take in a block whose parent is held already."""
        assert block.key not in self._blocks
        self._blocks[block.key] = block
        self._touch(block)

    def seal(self, block: Block, digests: tuple[bytes, ...]) -> None:
        """The block is complete: readers may have it."""
        block.put_id, block.digests = "", digests
        self.num_sealed += 1
        self.touch(block)

    def remove(self, block: Block) -> None:
        """Nobody finds the block any more. Its slots stay its holder's affair."""
        del self._blocks[block.key]
        block.removed = True
        self.num_sealed -= block.sealed
        self.drop_parent(block.parent)

    def touch(self, block: Block) -> None:
        """The block was used now."""
        self._touch(block)
        self._offer(block)

    def lease(self, block: Block) -> None:
        """One lease more on a sealed block, which is a use of it."""
        block.num_leases += 1
        self._touch(block)

    def unlease(self, block: Block) -> None:
        """One lease less."""
        block.num_leases -= 1
        self._offer(block)

    def is_evictable(self, block: Block) -> bool:
        """Sealed, found here, not leased, and nothing here follows it."""
        free = block.sealed and not block.removed and not block.num_leases
        return free and block.key not in self._num_children

    def pop_victim(self) -> Block | None:
        """Remove and return the least recently used evictable block; None when there is none."""
        while self._leaves:
            last_use, key = heapq.heappop(self._leaves)
            block = self._blocks.get(key)
            if block is not None and block.last_use == last_use and self.is_evictable(block):
                self.remove(block)
                return block
        return None

    def validate(self) -> list[str]:
        """What does not fit together, in words; empty when all does."""
        problems = []
        children: dict[BlockKey, int] = defaultdict(int)
        for block in self._blocks.values():
            children[block.parent] += 1
        if children != self._num_children:
            problems.append("the numbers of children are not those of the blocks")
        sealed = sum(block.sealed for block in self._blocks.values())
        if sealed != self.num_sealed:
            problems.append(f"{sealed} blocks are sealed, {self.num_sealed} are counted")
        if any(block.removed or block.key != key for key, block in self._blocks.items()):
            problems.append("a removed block, or one under another key, can be found")
        offered = set(self._leaves)
        for block in filter(self.is_evictable, self._blocks.values()):
            if (block.last_use, block.key) not in offered:
                problems += [f"block {block.chain_key.hex()} could be evicted but is not offered"]
        return problems

    def _touch(self, block: Block) -> None:
        self._uses += 1
        block.last_use = self._uses

    def _offer(self, block: Block | None) -> None:
        if block is None or not self.is_evictable(block):
            return
        heapq.heappush(self._leaves, (block.last_use, block.key))
        if len(self._leaves) > 2 * len(self._blocks) + 64:
            self._leaves = [(b.last_use, b.key) for b in self._blocks.values() if self.is_evictable(b)]
            heapq.heapify(self._leaves)

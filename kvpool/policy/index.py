"""Blocks of a pool node by full address, in a prefix tree. Knows neither space nor time.

A block may be here without its parent, if that was removed as corrupt or its put failed; it can be matched again once
the parent is back.
"""

from collections.abc import Iterator, Sequence

from kvpool.policy.records import DRAM, SSD, Block, BlockKey, PrefixNode


class BlockIndex:
    """All blocks that can be found: those being written by puts (invisible to readers) and sealed ones."""

    def __init__(self) -> None:
        self.num_sealed = 0
        self.num_blocks = 0
        self._nodes: dict[BlockKey, PrefixNode] = {}

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[Block]:
        return (node.block for node in self._nodes.values() if node.block is not None)

    def addresses(self) -> list[BlockKey]:
        """Return all known addresses, fast even for many; some have no block."""
        return list(self._nodes)

    def get(self, key: BlockKey) -> Block | None:
        """Return the block of this address, sealed or not."""
        node = self._nodes.get(key)
        return None if node is None else node.block

    def find(self, kv_namespace: bytes, chain: Sequence[bytes]) -> list[Block | None]:
        """Return the blocks of these addresses, sealed or not."""
        nodes = self._nodes
        found = [nodes.get(kv_namespace + chain_key) for chain_key in chain]
        return [None if node is None else node.block for node in found]

    def find_node(self, key: BlockKey) -> PrefixNode | None:
        """Return the node of this address, if it has a block or followers."""
        return self._nodes.get(key)

    def node_at(self, key: BlockKey) -> PrefixNode:
        """Return the node of this address, created if missing; give a node that stays empty to `discard`."""
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = PrefixNode(key)
        return node

    def discard(self, node: PrefixNode) -> None:
        """Remove the node if it has neither block nor followers."""
        if node.block is None and not node.num_following:
            self._nodes.pop(node.key, None)

    def leading_run(self, kv_namespace: bytes, chain: Sequence[bytes]) -> list[Block]:
        """Return the longest run of full sealed blocks from the start of `chain`, in whatever tier."""
        blocks: list[Block] = []
        nodes = self._nodes
        for chain_key in chain:
            node = nodes.get(kv_namespace + chain_key)
            if node is None or (block := node.block) is None or block.put_id or block.num_tokens:
                break
            blocks.append(block)
        return blocks

    def would_form_cycle(self, node: PrefixNode, before: PrefixNode) -> bool:
        """Return True if a block at this empty node, placed after `before`, would form a cycle."""
        if node is before:
            return True
        each: PrefixNode | None = before if node.num_following else None
        while each is not None and each is not node:
            each = each.parent if each.block is not None else None
        return each is not None

    def add(self, block: Block, parent: PrefixNode) -> None:
        """Add a block at its empty node; `parent.num_following` counts it already."""
        node = block.prefix_node
        assert node.block is None
        # The last that followed the empty place may have been evicted for this block, and the place with it.
        self._nodes[node.key] = node
        node.block = block
        node.depth = parent.depth + 1
        node.parent = parent
        node.previous, node.next = None, parent.first
        if parent.first is not None:
            parent.first.previous = node
        parent.first = node
        if block.num_tokens:
            if parent.tails is None:
                parent.tails = []
            parent.tails.append(block)
        self.num_blocks += 1
        self.num_sealed += not block.put_id

    def remove(self, block: Block) -> PrefixNode:
        """Remove the block. Returns its parent's node, which then has one follower less."""
        node, parent = block.prefix_node, block.prefix_node.parent
        assert node.block is block
        assert parent is not None
        if node.previous is None:
            parent.first = node.next
        else:
            node.previous.next = node.next
        if node.next is not None:
            node.next.previous = node.previous
        if block.num_tokens and parent.tails is not None:
            parent.tails.remove(block)
        node.block = node.next = node.previous = None
        node.depth = -1
        parent.num_following -= 1
        block.removed = True
        self.num_blocks -= 1
        self.num_sealed -= not block.put_id
        self.discard(node)
        self.discard(parent)
        return parent

    def validate(self) -> list[str]:
        """Return descriptions of all inconsistencies; empty if consistent. Call it only while no block is being
        added.
        """
        problems = []
        blocks = list(self)
        for key, node in self._nodes.items():
            following = [child.block for child in node.children()]
            held = [sum(b is not None and b.copies[tier] is not None for b in following) for tier in (DRAM, SSD)]
            counted = [node.following(tier) for tier in (DRAM, SSD)]
            if node.key != key or node.num_following != len(following) or counted != held:
                problems.append(f"the place of {key.hex()} counts its followers wrongly")
            if any(child.parent is not node or child.block is None for child in node.children()):
                problems.append(f"the place of {key.hex()} is followed by a block of another")
            if node.block is None and not following:
                problems.append(f"the place of {key.hex()} is kept for nothing")
            if any(tail not in following or not tail.num_tokens for tail in node.tails or ()):
                problems.append(f"the place of {key.hex()} has other tails than those that follow")
        if any(block.removed or block.prefix_node.block is not block for block in blocks):
            problems.append("a removed block, or one at another place, can be found")
        if len(blocks) != self.num_blocks or sum(block.sealed for block in blocks) != self.num_sealed:
            problems.append("the numbers of blocks are not those of the blocks")
        if sum(len(node.tails or ()) for node in self._nodes.values()) != sum(bool(b.num_tokens) for b in blocks):
            problems.append("a partial block is not among its parent's tails")
        return problems

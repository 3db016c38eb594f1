"""Prefix tree of a pool node's blocks, by full address. Independent of space and time.

A block may be in the tree without its parent, if the parent was removed as corrupt or its put failed; it can be matched
again once the parent is stored again.
"""

from collections.abc import Iterator, Sequence

from kvpool.policy.records import DRAM, SSD, Block, BlockKey, PrefixNode


class BlockIndex:
    """All blocks of the node: sealed ones, and those being written by puts, which are invisible to readers."""

    def __init__(self) -> None:
        self.num_sealed = 0
        self.num_blocks = 0
        self._nodes: dict[BlockKey, PrefixNode] = {}

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[Block]:
        return (node.block for node in self._nodes.values() if node.block is not None)

    def addresses(self) -> list[BlockKey]:
        """Return the addresses of all nodes of the tree, some of which have no block. Fast even for many."""
        return list(self._nodes)

    def get(self, key: BlockKey) -> Block | None:
        """Return the block at this address, sealed or not; None if there is none."""
        node = self._nodes.get(key)
        return None if node is None else node.block

    def find(self, keys: Sequence[BlockKey]) -> list[Block | None]:
        """Return the blocks at these addresses, sealed or not; None for each that is missing."""
        nodes = self._nodes
        return [None if (node := nodes.get(key)) is None else node.block for key in keys]

    def find_node(self, key: BlockKey) -> PrefixNode | None:
        """Return the node at this address; None if it has neither a block nor followers."""
        return self._nodes.get(key)

    def node_at(self, key: BlockKey) -> PrefixNode:
        """Return the node at this address, created if missing. A node that stays empty must be passed to `discard`."""
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = PrefixNode(key)
        return node

    def discard(self, node: PrefixNode) -> None:
        """Remove the node if it has neither block nor followers."""
        if node.block is None and not node.num_following:
            self._nodes.pop(node.key, None)

    def leading_run(self, kv_namespace: bytes, chain: Sequence[bytes]) -> list[Block]:
        """Return the longest run of full sealed blocks from the start of `chain`, in any tier."""
        blocks: list[Block] = []
        nodes = self._nodes
        for chain_key in chain:
            node = nodes.get(kv_namespace + chain_key)
            if node is None or (block := node.block) is None or block.put_id or block.num_tokens:
                break
            blocks.append(block)
        return blocks

    def last_window(self, kv_namespace: bytes, chain: Sequence[bytes], window_blocks: int) -> range:
        """Return the last `window_blocks` full sealed blocks of `chain` that follow each other, in any tier; if the
        longest run from its start has no more, that run.
        """
        end = len(chain)
        for i in range(len(chain) - 1, -1, -1):
            block = self.get(kv_namespace + chain[i])
            if block is None or block.put_id or block.num_tokens:
                end = i
            elif end - i == window_blocks:
                return range(i, end)
        return range(end)

    def would_form_cycle(self, node: PrefixNode, before: PrefixNode) -> bool:
        """Return True if adding a block at the empty `node`, after `before`, would form a cycle."""
        if node is before:
            return True
        each: PrefixNode | None = before if node.num_following else None
        while each is not None and each is not node:
            each = each.parent if each.block is not None else None
        return each is not None

    def add(self, block: Block, parent: PrefixNode) -> None:
        """Add a block at its empty node. `parent.num_following` must count it already."""
        node = block.prefix_node
        assert node.block is None
        # The node's last follower may have been evicted for this block, which removed the empty node from the tree.
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
        """Remove the block. Returns its parent's node, whose count of followers is decremented."""
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
        """Return descriptions of all inconsistencies. Must not be called while a block is being added."""
        problems = []
        blocks = list(self)
        for key, node in self._nodes.items():
            following = [child.block for child in node.children()]
            held = [sum(b is not None and b.copies[tier] is not None for b in following) for tier in (DRAM, SSD)]
            counted = [node.following(tier) for tier in (DRAM, SSD)]
            if node.key != key or node.num_following != len(following) or counted != held:
                problems.append(f"node {key.hex()} has a wrong count of followers")
            if any(child.parent is not node or child.block is None for child in node.children()):
                problems.append(f"node {key.hex()} has a follower that is empty or has another parent")
            if node.block is None and not following:
                problems.append(f"node {key.hex()} has neither a block nor followers")
            if any(tail not in following or not tail.num_tokens for tail in node.tails or ()):
                problems.append(f"node {key.hex()} has tails that are not partial followers")
        if any(block.removed or block.prefix_node.block is not block for block in blocks):
            problems.append("the tree contains a removed block or a block of another node")
        if len(blocks) != self.num_blocks or sum(block.sealed for block in blocks) != self.num_sealed:
            problems.append("the counts of blocks are wrong")
        if sum(len(node.tails or ()) for node in self._nodes.values()) != sum(bool(b.num_tokens) for b in blocks):
            problems.append("a partial block is missing from its parent's tails")
        return problems

"""The blocks of a pool node by full address, and the tree of their chains. It knows neither room nor time.

A block may be here without its parent, when that was removed as corrupt or its put failed: it can be matched again once
the parent is back.
"""

from collections.abc import Iterator, Sequence

from kvpool.policy.records import DRAM, SSD, Block, BlockKey, Place


class BlockIndex:
    """All blocks that can be found: those being written by puts (not visible to readers) and the sealed ones."""

    def __init__(self) -> None:
        self.num_sealed = 0
        self.num_blocks = 0
        self._places: dict[BlockKey, Place] = {}

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[Block]:
        return (place.block for place in self._places.values() if place.block is not None)

    def addresses(self) -> list[BlockKey]:
        """All that are known, quickly also if they are many; at some of them there is no block."""
        return list(self._places)

    def get(self, key: BlockKey) -> Block | None:
        """The block of this address, sealed or not."""
        place = self._places.get(key)
        return None if place is None else place.block

    def find(self, kv_namespace: bytes, chain: Sequence[bytes]) -> list[Block | None]:
        """The blocks of these addresses, sealed or not."""
        places = self._places
        found = [places.get(kv_namespace + chain_key) for chain_key in chain]
        return [None if place is None else place.block for place in found]

    def find_place(self, key: BlockKey) -> Place | None:
        """The place of this address, if there is something at it or follows it."""
        return self._places.get(key)

    def place(self, key: BlockKey) -> Place:
        """The place of this address, made if there is none; a place that stays empty must be given to `discard`."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = Place(key)
        return place

    def discard(self, place: Place) -> None:
        """Forget the place if nothing is at it and nothing follows it."""
        if place.block is None and not place.num_following:
            self._places.pop(place.key, None)

    def leading_run(self, kv_namespace: bytes, chain: Sequence[bytes]) -> list[Block]:
        """The longest run of full sealed blocks from the start of `chain`, in whatever tier."""
        blocks: list[Block] = []
        places = self._places
        for chain_key in chain:
            place = places.get(kv_namespace + chain_key)
            if place is None or (block := place.block) is None or block.put_id or block.num_tokens:
                break
            blocks.append(block)
        return blocks

    def would_follow_itself(self, place: Place, before: Place) -> bool:
        """Whether a block at this empty place, put after `before`, would close a circle."""
        if place is before:
            return True
        each: Place | None = before if place.num_following else None
        while each is not None and each is not place:
            each = each.parent if each.block is not None else None
        return each is not None

    def add(self, block: Block, parent: Place) -> None:
        """Take in a block at its empty place; `parent.num_following` counts it already."""
        place = block.place
        assert place.block is None
        # The last that followed the empty place may have been evicted for this block, and the place with it.
        self._places[place.key] = place
        place.block = block
        place.depth = parent.depth + 1
        place.parent = parent
        place.previous, place.next = None, parent.first
        if parent.first is not None:
            parent.first.previous = place
        parent.first = place
        if block.num_tokens:
            if parent.tails is None:
                parent.tails = []
            parent.tails.append(block)
        self.num_blocks += 1
        self.num_sealed += not block.put_id

    def remove(self, block: Block) -> Place:
        """Nobody finds the block any more. Returns its parent's place, which one block less follows."""
        place, parent = block.place, block.place.parent
        assert place.block is block
        assert parent is not None
        if place.previous is None:
            parent.first = place.next
        else:
            place.previous.next = place.next
        if place.next is not None:
            place.next.previous = place.previous
        if block.num_tokens and parent.tails is not None:
            parent.tails.remove(block)
        place.block = place.next = place.previous = None
        place.depth = -1
        parent.num_following -= 1
        block.removed = True
        self.num_blocks -= 1
        self.num_sealed -= not block.put_id
        self.discard(place)
        self.discard(parent)
        return parent

    def validate(self) -> list[str]:
        """What does not fit together, in words; empty when all does. At a moment when no block is being added."""
        problems = []
        blocks = list(self)
        for key, place in self._places.items():
            following = [child.block for child in place.children()]
            held = [sum(b is not None and b.copies[tier] is not None for b in following) for tier in (DRAM, SSD)]
            counted = [place.following(tier) for tier in (DRAM, SSD)]
            if place.key != key or place.num_following != len(following) or counted != held:
                problems.append(f"the place of {key.hex()} counts its followers wrongly")
            if any(child.parent is not place or child.block is None for child in place.children()):
                problems.append(f"the place of {key.hex()} is followed by a block of another")
            if place.block is None and not following:
                problems.append(f"the place of {key.hex()} is kept for nothing")
            if any(tail not in following or not tail.num_tokens for tail in place.tails or ()):
                problems.append(f"the place of {key.hex()} has other tails than those that follow")
        if any(block.removed or block.place.block is not block for block in blocks):
            problems.append("a removed block, or one at another place, can be found")
        if len(blocks) != self.num_blocks or sum(block.sealed for block in blocks) != self.num_sealed:
            problems.append("the numbers of blocks are not those of the blocks")
        if sum(len(place.tails or ()) for place in self._places.values()) != sum(bool(b.num_tokens) for b in blocks):
            problems.append("a partial block is not among its parent's tails")
        return problems

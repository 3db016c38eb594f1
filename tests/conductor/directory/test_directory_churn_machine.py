"""The directory against plain arrays while contents of many nodes come and go: slots, rows and numbers used again.

Of each node it is known what it holds of either namespace, and every match is computed anew from that. Contents are
large enough for a lost node to be cleared up in many slices, with events, restarts and other losses in between, and
shared by enough nodes for rows of every kind.
"""

import itertools
from collections import deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from conductor.directory import Directory, Match
from kvpool import BlockRun, PoolEvents, keys_from_bytes, keys_u64
from kvpool.events import Tier

NAMESPACES = (b"n" * 16, b"o" * 16)
KEYS = np.random.default_rng(7).integers(0, 256, (9000, 16), np.uint8)
SHORT = keys_u64(keys_from_bytes(KEYS.tobytes()))
NODES = tuple(f"node-{i:02}" for i in range(72))
TIERS = (Tier.DRAM, Tier.SSD)
NOBODY, HELD, ON_SSD = 0, 1, 2
Blocks = NDArray[np.int64]


def some(first: int, count: int, step: int = 1) -> Blocks:
    return np.arange(first, min(first + count, len(KEYS)), step)


class ChurnMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.held = np.zeros((len(NODES), len(NAMESPACES), len(KEYS)), np.int8)
        self.seqs = [0] * len(NODES)
        self.incarnations = [0] * len(NODES)  # 0: it is not there
        self.fresh = itertools.count(1)
        self.edges: deque[int] = deque([0, 7000], maxlen=8)  # where runs began and ended lately
        for number in range(2):
            self.store(number, 0, 0, 6000, Tier.DRAM)

    numbers = st.integers(0, len(NODES) - 1)
    few = st.integers(0, 3)  # nodes that very much happens to
    spaces = st.integers(0, len(NAMESPACES) - 1)
    tiers = st.sampled_from(TIERS)
    starts = st.integers(0, len(KEYS) - 1)

    def blocks(self, first: int, count: int, step: int = 1) -> Blocks:
        """Blocks of the one long chain that all keys are."""
        self.edges += (first, first + count)
        return some(first, count, step)

    def run(self, space: int, blocks: Blocks, tier: Tier = Tier.DRAM) -> tuple[BlockRun, ...]:
        return (BlockRun(NAMESPACES[space], KEYS[blocks].tobytes(), tier),)

    def happens(self, number: int, **what: tuple[BlockRun, ...]) -> None:
        if not self.incarnations[number]:
            self.comes(number)
        self.seqs[number] += 1
        assert self.directory.apply(NODES[number], PoolEvents(self.incarnations[number], self.seqs[number], **what))

    def comes(self, number: int) -> None:
        self.incarnations[number], self.seqs[number] = next(self.fresh), 0
        self.held[number] = NOBODY
        empty = PoolEvents(self.incarnations[number], 0, snapshot_begin=True, snapshot_end=True)
        assert self.directory.apply(NODES[number], empty)

    @rule(number=few, space=spaces, first=starts, count=st.integers(1, 4500), tier=tiers)
    def store(self, number: int, space: int, first: int, count: int, tier: Tier) -> None:
        blocks = self.blocks(first, count)
        self.happens(number, stored=self.run(space, blocks, tier))
        self.held[number, space, blocks] = ON_SSD if tier is Tier.SSD else HELD

    @rule(number=numbers, others=st.integers(1, 71), space=spaces, first=starts, count=st.integers(1, 40), tier=tiers)
    def share(self, number: int, others: int, space: int, first: int, count: int, tier: Tier) -> None:
        blocks = self.blocks(first, count)
        for each in range(number, number + others):
            self.happens(each % len(NODES), stored=self.run(space, blocks, tier))
            self.held[each % len(NODES), space, blocks] = ON_SSD if tier is Tier.SSD else HELD

    @rule(number=few, space=spaces, first=starts, count=st.integers(1, 4500), step=st.integers(1, 5))
    def remove(self, number: int, space: int, first: int, count: int, step: int) -> None:
        """Also out of the middle, which leaves holes for others' blocks."""
        blocks = self.blocks(first, count, step)
        self.happens(number, removed=self.run(space, blocks))
        self.held[number, space, blocks] = NOBODY

    @rule(number=few, space=spaces, first=starts, count=st.integers(1, 300), tier=tiers)
    def come_back(self, number: int, space: int, first: int, count: int, tier: Tier) -> None:
        """To slots of their own: the former ones stay as they were, free."""
        self.remove(number, space, first, count, 1)
        self.store(number, space, first, count, tier)

    @rule(number=numbers, space=spaces, first=starts, count=st.integers(1, 4500), anew=st.booleans())
    def snapshot(self, number: int, space: int, first: int, count: int, anew: bool) -> None:
        """Draw a node of the same incarnation, or of a new one while the former one's blocks are still there."""
        if anew or not self.incarnations[number]:
            self.comes(number)
        blocks = self.blocks(first, count)
        half = len(blocks) // 2
        at = self.incarnations[number], self.seqs[number]
        parts = self.run(space, blocks[:half], Tier.SSD), self.run(space, blocks[half:])
        assert self.directory.apply(NODES[number], PoolEvents(*at, snapshot_begin=True, stored=parts[0]))
        self.agree(NAMESPACES[space], some(max(0, first - 3), 400), space)
        assert self.directory.apply(NODES[number], PoolEvents(*at, snapshot_end=True, stored=parts[1]))
        self.held[number] = NOBODY
        self.held[number, space, blocks[:half]], self.held[number, space, blocks[half:]] = ON_SSD, HELD

    @precondition(lambda self: any(self.incarnations))
    @rule(number=numbers, others=st.integers(0, 20))
    def lose(self, number: int, others: int) -> None:
        for each in range(number, min(number + others + 1, len(NODES))):
            self.directory.drop_node(NODES[each])
            self.incarnations[each], self.held[each] = 0, NOBODY

    @rule(num_parts=st.integers(1, 3))
    def purge(self, num_parts: int) -> None:
        self.directory.purge(num_parts)

    @rule(space=spaces, first=starts, count=st.integers(1, 300), then=starts, backwards=st.booleans())
    def ask(self, space: int, first: int, count: int, then: int, backwards: bool) -> None:
        """A prompt that leaves one chain for another's middle."""
        blocks = np.concatenate([some(first, count), some(then, count)])
        self.agree(NAMESPACES[space], blocks[::-1] if backwards else blocks, space)

    def agree(self, namespace: bytes, blocks: Blocks, space: int) -> None:
        found = self.directory.match(namespace, SHORT[blocks])
        here = self.held[:, space, blocks]
        runs = np.logical_and.accumulate(here != NOBODY, axis=1)
        wanted = {
            node: Match(int(runs[i].sum()), int((here[i][runs[i]] == ON_SSD).sum()))
            for i, node in enumerate(NODES)
            if runs[i, 0]
        }
        assert dict(found.items()) == wanted

    @invariant()
    def all_is_known_of_every_node(self) -> None:
        for number in (*range(4), 30, len(NODES) - 1):
            in_dram, on_ssd = (int(np.count_nonzero(self.held[number] == kind)) for kind in (HELD, ON_SSD))
            assert self.directory.blocks_by_tier(NODES[number]) == (in_dram, on_ssd)
        for space, edge in itertools.product(range(len(NAMESPACES)), self.edges):
            self.agree(NAMESPACES[space], some(min(max(0, edge - 9), len(KEYS) - 1), 99), space)

    def teardown(self) -> None:
        """Once all are gone, nothing of them is left, and what comes then finds its room again."""
        assert self.directory.validate() == []
        for node in NODES:
            self.directory.drop_node(node)
        while self.directory.purge(2):
            pass
        table = self.directory._table
        assert table.num_keys == 0
        assert table.validate() == []
        parts, rows = table.num_parts, int(table._t.meta[1])
        for _ in range(3):
            self.incarnations = [0] * len(NODES)
            for number in range(4):
                self.happens(number, stored=self.run(0, some(0, min(parts * 1024, 9000))))
                self.directory.drop_node(NODES[number])
                while self.directory.purge():
                    pass
        assert table.num_parts <= max(parts, 6)
        assert int(table._t.meta[1]) == rows


TestChurnMachine = ChurnMachine.TestCase
TestChurnMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None, derandomize=True)

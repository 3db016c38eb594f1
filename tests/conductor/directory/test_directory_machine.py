"""The directory under whatever a stream of events can suffer: what it calls EXACT is the truth, at every step.

Pool nodes are modelled as what they are: contents, an event log, an incarnation. Between them and the directory lies a
wire that loses, repeats and reorders messages, breaks off snapshots, and a conductor that restarts from a dump.
"""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.directory import Directory, DirectoryState, Match
from conductor.directory.directory import DumpedNode
from conductor.directory.table import Replicas
from kvpool import BlockRun, PoolEvents, keys_from_bytes, keys_u64
from kvpool.events import Tier, contents_sum

NAMESPACES = (b"n" * 16, b"o" * 16)
NODES = ("a", "b", "c")
TIERS = (Tier.DRAM, Tier.SSD)
Block = tuple[bytes, int]


def key(i: int) -> bytes:
    return (i * 0x9E37_79B9_7F4A_7C15 % 2**64).to_bytes(8, "little") + bytes(8)


def runs_of(blocks: dict[Block, Tier]) -> tuple[BlockRun, ...]:
    groups: dict[tuple[bytes, Tier], bytes] = {}
    for (ns, block), tier in sorted(blocks.items()):
        groups[ns, tier] = groups.get((ns, tier), b"") + key(block)
    return tuple(BlockRun(ns, chain, tier) for (ns, tier), chain in groups.items())


@dataclass
class Node:
    """A pool node's truth and its log; `sums`: whether it tells what its contents sum up to."""

    incarnation: int
    sums: bool
    contents: dict[Block, Tier] = field(default_factory=dict)
    log: list[PoolEvents] = field(default_factory=list)

    @property
    def seq(self) -> int:
        return self.log[-1].seq if self.log else 0

    def happen(self, stored: dict[Block, Tier], removed: dict[Block, Tier]) -> None:
        for block in removed:
            self.contents.pop(block, None)
        self.contents.update(stored)
        out, into = runs_of(removed), runs_of(stored)
        if out or into:
            seq = self.seq + len(out) + len(into)
            self.log.append(self.summed(PoolEvents(self.incarnation, seq, stored=into, removed=out)))

    def snapshot(self) -> list[PoolEvents]:
        begin = PoolEvents(self.incarnation, self.seq, snapshot_begin=True)
        parts = [PoolEvents(self.incarnation, self.seq, stored=(run,)) for run in runs_of(self.contents)]
        return [begin, *parts, self.summed(PoolEvents(self.incarnation, self.seq, snapshot_end=True))]

    def after(self, seq: int) -> list[PoolEvents]:
        return [message for message in self.log if message.seq > seq]

    def summed(self, message: PoolEvents) -> PoolEvents:
        if not self.sums:
            return message
        total = sum(contents_sum(run.kv_namespace, run.chain, run.tier) for run in runs_of(self.contents))
        return replace(message, contents_sum=total % 2**64)


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.incarnations = itertools.count(1)
        self.pools = {name: Node(next(self.incarnations), sums=name != "c") for name in NODES}
        # What each node held at each event.
        self.history: dict[tuple[str, int, int], dict[Block, Tier]] = {}
        self.remember()

    nodes = st.sampled_from(NODES)
    blocks = st.dictionaries(
        st.tuples(st.sampled_from(NAMESPACES), st.integers(0, 60)), st.sampled_from(TIERS), max_size=25
    )

    def remember(self) -> None:
        for name, pool in self.pools.items():
            self.history[name, pool.incarnation, pool.seq] = dict(pool.contents)

    @rule(name=nodes, stored=blocks, removed=blocks)
    def change(self, name: str, stored: dict[Block, Tier], removed: dict[Block, Tier]) -> None:
        self.pools[name].happen(stored, removed)
        self.remember()

    @rule(name=nodes, first=st.integers(0, 500), count=st.integers(100, 900), tier=st.sampled_from(TIERS))
    def store_many(self, name: str, first: int, count: int, tier: Tier) -> None:
        self.pools[name].happen({(NAMESPACES[0], block): tier for block in range(first, first + count)}, {})
        self.remember()

    @rule(name=nodes)
    def follow(self, name: str) -> None:
        """As a feed does it that meets no trouble."""
        pool, position = self.pools[name], self.directory.position(name)
        goes_on = position.incarnation == pool.incarnation
        for message in pool.after(position.seq) if goes_on else pool.snapshot():
            if not self.directory.apply(name, message):
                return
        if self.directory.position(name) == (pool.incarnation, pool.seq) and not goes_on:
            assert self.directory.state(name) is DirectoryState.EXACT

    @rule(name=nodes, data=st.data())
    def disturbed(self, name: str, data: st.DataObject) -> None:
        """Messages of old and new, lost, twice, out of order, of a former incarnation, snapshots cut and mixed in."""
        pool = self.pools[name]
        wire = [*pool.log[-4:], *pool.snapshot()[: data.draw(st.integers(0, 4))], *pool.snapshot()]
        for i in data.draw(st.lists(st.integers(0, len(wire) - 1), max_size=6)):
            self.directory.apply(name, wire[i])

    @rule(name=nodes)
    def restart(self, name: str) -> None:
        self.pools[name] = Node(next(self.incarnations), sums=name != "c")
        self.remember()

    @rule(name=nodes, malformed=st.booleans())
    def stream_breaks(self, name: str, malformed: bool) -> None:
        self.directory.mark_degraded(name, malformed=malformed)

    @rule(name=nodes)
    def lost(self, name: str) -> None:
        self.directory.drop_node(name)
        assert not any(name in self.directory.match(ns, self.query(range(3))) for ns in NAMESPACES)

    @rule(segments=st.integers(1, 20))
    def purge(self, segments: int) -> None:
        self.directory.purge(segments)

    @rule(data=st.data())
    def conductor_restarts(self, data: st.DataObject) -> None:
        """From a dump during which messages came in."""
        dumped, parts = self.directory.begin_dump(), list[Replicas]()
        for part in self.directory.dump(frozenset(node.number for node in dumped), 5):
            parts.append(part)
            name = data.draw(self.nodes)
            self.follow(name)
        self.restore(self.directory.end_dump(dumped), parts)

    def restore(self, dumped: list[DumpedNode], parts: list[Replicas]) -> None:
        self.directory = Directory()
        numbers = np.zeros(1 + max((node.number for node in dumped), default=0), np.uint32)
        for node in dumped:
            numbers[node.number] = self.directory.restore_node(node)
        for keys, codes in parts:
            known = np.isin(codes >> 1, np.array([node.number for node in dumped], np.uint32))
            now = numbers[codes[known] >> 1] * 2 + (codes[known] & 1)
            self.directory.restore(Replicas(keys[known], now.astype(np.uint32)))

    @staticmethod
    def query(blocks: range) -> np.ndarray:
        return keys_u64(keys_from_bytes(b"".join(map(key, blocks))))

    @invariant()
    def exact_is_the_truth(self) -> None:
        for name in NODES:
            position = self.directory.position(name)
            if self.directory.state(name) is DirectoryState.EXACT:
                truth = self.history[name, position.incarnation, position.seq]
                in_dram = sum(tier is Tier.DRAM for tier in truth.values())
                assert self.directory.blocks_by_tier(name) == (in_dram, len(truth) - in_dram)
        for ns, first in itertools.product(NAMESPACES, (0, 7, 31)):
            matches = self.directory.match(ns, self.query(range(first, first + 30)))
            for name in NODES:
                if self.directory.state(name) is DirectoryState.EXACT:
                    position = self.directory.position(name)
                    truth = self.history[name, position.incarnation, position.seq]
                    held = list(itertools.takewhile(truth.__contains__, ((ns, b) for b in range(first, first + 30))))
                    want = Match(len(held), sum(truth[block] is Tier.SSD for block in held))
                    assert matches.get(name, Match(0, 0)) == want

    def teardown(self) -> None:
        assert self.directory.validate() == []


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)

"""The directory: matches against a model of plain sets, snapshots, gaps, restarts, many nodes."""

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool import BlockRun, Directory, DirectoryState, Match, PoolEvents, keys_from_bytes, keys_u64
from kvpool.errors import AddressError
from kvpool.tiers import Tier

NS = b"n" * 16
OTHER = b"o" * 16


def key(i: int) -> bytes:
    return i.to_bytes(8, "little") + bytes(8)


def run(*blocks: int, ns: bytes = NS, tier: Tier = Tier.DRAM) -> BlockRun:
    return BlockRun(ns, b"".join(map(key, blocks)), tier)


def short(*blocks: int) -> np.ndarray:
    return keys_u64(keys_from_bytes(b"".join(map(key, blocks))))


def snapshot(*runs: BlockRun, incarnation: int = 1, seq: int = 0) -> PoolEvents:
    return PoolEvents(incarnation, seq, snapshot_begin=True, snapshot_end=True, stored=runs)


def test_match_is_the_leading_run_of_each_node_in_order_of_node_id() -> None:
    directory = Directory()
    assert directory.apply("b", snapshot(run(1, 2, 3, 5)))
    assert directory.apply("a", snapshot(run(1, 2)))
    assert directory.apply("c", snapshot(run(2, 3)))
    assert list(directory.match(NS, short(1, 2, 3, 4, 5)).items()) == [("a", Match(2, 0)), ("b", Match(3, 0))]
    assert directory.match(OTHER, short(1)) == {}
    assert directory.match(NS, short()) == {}


def test_events_that_continue_the_stream_are_taken_in() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1), seq=7))
    assert directory.apply("a", PoolEvents(1, 8, stored=(run(2),)))
    assert directory.apply("a", PoolEvents(1, 10, removed=(run(1),), stored=(run(3),)))
    assert directory.apply("a", PoolEvents(1, 10))
    assert directory.match(NS, short(2, 3)) == {"a": Match(2, 0)}
    assert directory.match(NS, short(1)) == {}
    assert directory.position("a") == (1, 10)


def test_a_gap_is_refused_and_shows_as_degraded_until_a_snapshot() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1)))
    assert not directory.apply("a", PoolEvents(1, 5, stored=(run(2),)))
    assert directory.state("a") is DirectoryState.DEGRADED
    assert directory.position("a") == (0, 0)
    assert not directory.apply("a", PoolEvents(1, 6, stored=(run(3),)))
    assert directory.match(NS, short(1)) == {"a": Match(1, 0)}
    assert directory.apply("a", snapshot(run(4), seq=6))
    assert directory.state("a") is DirectoryState.EXACT
    assert directory.match(NS, short(1)) == {}


def test_former_contents_serve_until_the_snapshot_of_the_same_incarnation_is_complete() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1)))
    directory.apply("a", PoolEvents(1, 3, snapshot_begin=True, stored=(run(2),)))
    assert directory.match(NS, short(1)) == {"a": Match(1, 0)}
    assert directory.state("a") is DirectoryState.DEGRADED
    directory.apply("a", PoolEvents(1, 3, snapshot_end=True, stored=(run(3),)))
    assert [directory.match(NS, short(i)) for i in (1, 2, 3)] == [{}, {"a": Match(1, 0)}, {"a": Match(1, 0)}]


def test_a_restarted_node_holds_nothing_at_once() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1)))
    directory.apply("a", PoolEvents(2, 0, snapshot_begin=True))
    assert directory.match(NS, short(1)) == {}
    directory.apply("a", PoolEvents(2, 0, snapshot_end=True))
    assert directory.state("a") is DirectoryState.EXACT
    assert directory.validate() == []


def test_a_broken_stream_degrades_and_its_continuation_makes_exact_again() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1), seq=4))
    directory.mark_degraded("a")
    assert directory.state("a") is DirectoryState.DEGRADED
    assert directory.position("a") == (1, 4)
    assert directory.apply("a", PoolEvents(1, 5, stored=(run(2),)))
    assert directory.state("a") is DirectoryState.EXACT
    assert directory.match(NS, short(1, 2)) == {"a": Match(2, 0)}


def test_a_dropped_node_is_forgotten_and_its_number_used_again() -> None:
    directory = Directory()
    for name in ("a", "b"):
        directory.apply(name, snapshot(run(1), run(9, ns=OTHER)))
    directory.drop_node("a")
    assert directory.match(NS, short(1)) == {"b": Match(1, 0)}
    assert directory.state("a") is DirectoryState.DEGRADED
    directory.apply("c", snapshot(run(2)))
    assert directory.match(NS, short(1)) == {"b": Match(1, 0)}
    directory.drop_node("b")
    directory.drop_node("c")
    assert directory.nodes == []
    assert directory.validate() == []


def test_two_hundred_nodes_and_ten_thousand_blocks() -> None:
    directory = Directory()
    for i in range(200):
        directory.apply(f"n{i:03}", snapshot(run(*range(i % 50))))
    directory.apply("big", snapshot(run(*range(10_000))))
    matches = directory.match(NS, short(*range(100)))
    assert matches == {"big": Match(100, 0)} | {f"n{i:03}": Match(i % 50, 0) for i in range(200) if i % 50}
    assert directory.validate() == []


def test_a_stored_run_moves_known_blocks_between_tiers() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1, 2, 3), run(9, tier=Tier.SSD), run(4, tier=Tier.SSD, ns=OTHER)))
    assert directory.match(NS, short(1, 2, 3, 9)) == {"a": Match(4, 1)}
    directory.apply("a", PoolEvents(1, 2, stored=(run(2, 3, tier=Tier.SSD), run(9))))
    assert directory.match(NS, short(1, 2, 3, 9)) == {"a": Match(4, 2)}
    directory.apply("a", PoolEvents(1, 3, removed=(run(3),)))
    directory.apply("a", PoolEvents(1, 4, stored=(run(3),)))
    assert directory.match(NS, short(1, 2, 3, 9)) == {"a": Match(4, 1)}
    assert directory.match(OTHER, short(4)) == {"a": Match(1, 1)}
    assert directory.num_blocks("a") == 5
    assert directory.validate() == []


def test_malformed_runs_are_refused() -> None:
    with pytest.raises(AddressError):
        Directory().apply("a", snapshot(BlockRun(NS, b"x" * 15)))
    with pytest.raises(AddressError):
        Directory().apply("a", snapshot(BlockRun(b"short", key(1))))


def test_the_wire_form_round_trips() -> None:
    events = PoolEvents(2**63, 9, snapshot_begin=True, stored=(run(1, 2),), removed=(run(3, ns=OTHER),))
    assert PoolEvents.from_proto(events.to_proto()) == events


class DirectoryMachine(RuleBasedStateMachine):
    """The directory against sets, over nodes, namespaces and enough keys to rebuild the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.model: dict[str, set[tuple[bytes, int]]] = {}
        self.seq: dict[str, int] = {}

    nodes = st.sampled_from(["a", "b", "c"])
    namespaces = st.sampled_from([NS, OTHER])
    starts = st.integers(0, 2000)
    lengths = st.integers(1, 900)

    @rule(node=nodes, ns=namespaces, start=starts, length=lengths)
    def snapshot(self, node: str, ns: bytes, start: int, length: int) -> None:
        blocks = range(start, start + length)
        assert self.directory.apply(node, snapshot(run(*blocks, ns=ns), seq=3))
        self.model[node], self.seq[node] = {(ns, b) for b in blocks}, 3

    @rule(node=nodes, ns=namespaces, start=starts, length=lengths, stored=st.booleans())
    def change(self, node: str, ns: bytes, start: int, length: int, stored: bool) -> None:
        blocks = {(ns, b) for b in range(start, start + length)}
        runs = (run(*range(start, start + length), ns=ns),)
        seq = self.seq.get(node, 0) + 1
        events = PoolEvents(1, seq, stored=runs) if stored else PoolEvents(1, seq, removed=runs)
        assert self.directory.apply(node, events) == (node in self.model)
        if node in self.model:
            self.seq[node] = seq
            self.model[node] = self.model[node] | blocks if stored else self.model[node] - blocks

    @rule(node=nodes)
    def drop(self, node: str) -> None:
        self.directory.drop_node(node)
        self.model.pop(node, None)
        self.seq.pop(node, None)

    @rule(ns=namespaces, start=starts, length=st.integers(0, 40))
    def match(self, ns: bytes, start: int, length: int) -> None:
        chain = range(start, start + length)
        want = {
            node: Match(depth, 0)
            for node, held in sorted(self.model.items())
            if (depth := sum(1 for _ in itertools.takewhile(held.__contains__, ((ns, b) for b in chain))))
        }
        assert self.directory.match(ns, short(*chain)) == want

    @invariant()
    def consistent(self) -> None:
        assert self.directory.validate() == []
        assert {n: self.directory.num_blocks(n) for n in self.model} == {n: len(h) for n, h in self.model.items()}


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True)

"""The directory: matches, snapshots, gaps, restarts, sums of contents, dumps, many nodes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.directory import Directory, DirectoryState, Match, WindowedBlocks
from conductor.directory.directory import DumpedNode, Position
from conductor.directory.table import Replicas
from kvpool import BlockRun, PoolEvents, keys_from_bytes, keys_u64
from kvpool.errors import AddressError
from kvpool.events import Tier, contents_sum

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


def summed(events: PoolEvents, contents: dict[tuple[bytes, int], Tier]) -> PoolEvents:
    """The message with what these contents sum up to."""
    total = sum(contents_sum(ns, key(block), tier) for (ns, block), tier in contents.items())
    return replace(events, contents_sum=total % 2**64)


def test_contents_that_do_not_sum_up_are_not_exact_and_a_snapshot_mends_them() -> None:
    directory = Directory()
    truth = {(NS, 1): Tier.DRAM, (NS, 2): Tier.SSD}
    whole = summed(snapshot(run(1), run(2, tier=Tier.SSD)), truth)
    assert directory.apply("a", whole)
    assert directory.state("a") is DirectoryState.EXACT
    lost = summed(PoolEvents(1, 1, stored=(run(3),)), truth | {(NS, 3): Tier.DRAM, (NS, 4): Tier.DRAM})
    assert not directory.apply("a", lost)
    assert directory.state("a") is DirectoryState.DEGRADED
    assert directory.position("a") == (0, 0)
    assert (directory.mismatches["a"], directory.resyncs["mismatch"]) == (1, 1)
    assert directory.apply("a", replace(whole, seq=1))
    assert directory.state("a") is DirectoryState.EXACT
    assert directory.snapshots == {"new": 1, "mismatch": 1}


def test_a_wrong_tier_is_noticed_by_the_sum() -> None:
    directory = Directory()
    assert not directory.apply("a", summed(snapshot(run(1)), {(NS, 1): Tier.SSD}))
    assert directory.state("a") is DirectoryState.DEGRADED


def test_a_node_that_never_sums_up_is_used_as_degraded_and_not_asked_for_snapshots_for_ever() -> None:
    directory, asked = Directory(), 0
    directory.apply("a", replace(snapshot(run(1)), contents_sum=5))
    for seq in range(1, 10_000):
        if directory.position("a") == (0, 0):
            asked += 1
            directory.apply("a", replace(snapshot(run(1), seq=seq), contents_sum=5))
        else:
            directory.apply("a", PoolEvents(1, seq, stored=(run(2),), contents_sum=5))
        assert directory.state("a") is DirectoryState.DEGRADED
        assert directory.match(NS, short(1)) == {"a": Match(1, 0)}
    assert 1 <= asked <= 4


def test_a_malformed_message_is_followed_by_a_snapshot() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1)))
    with pytest.raises(AddressError):
        directory.apply("a", PoolEvents(1, 2, stored=(run(2), BlockRun(NS, b"x"))))
    assert directory.state("a") is DirectoryState.DEGRADED
    assert not directory.apply("a", PoolEvents(1, 2))
    assert directory.apply("a", snapshot(run(1), seq=2))
    assert directory.snapshots["malformed"] == 1


def test_blocks_of_two_namespaces_and_equal_keys_are_kept_apart() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1, 2), run(1, ns=OTHER)))
    directory.apply("a", PoolEvents(1, 1, removed=(run(1),)))
    assert directory.match(NS, short(1)) == {}
    assert directory.match(OTHER, short(1, 2)) == {"a": Match(1, 0)}


def test_a_dump_taken_while_events_come_in_is_right_once_they_are_taken_in_again() -> None:
    directory = Directory()
    blocks = [run(*range(i, i + 500)) for i in range(0, 20_000, 500)]
    for node in ("a", "b"):
        directory.apply(node, snapshot(*blocks))
    directory.apply("late", snapshot(run(1)))
    later = [PoolEvents(1, i + 1, removed=(blocks[i],)) for i in range(20)]
    later += [PoolEvents(1, i + 1, stored=(run(*range(i * 500, i * 500 + 300), tier=Tier.SSD),)) for i in range(20, 40)]
    dumped, parts = directory.begin_dump(), []
    for i, part in enumerate(directory.dump(frozenset(node.number for node in dumped), 1)):
        parts.append(part)
        if i < len(later):
            directory.apply("a", later[i])
        if i == 3:
            directory.apply("late", snapshot(run(2), seq=1))
    done = directory.end_dump(dumped)
    assert [(node.node, node.position.seq, node.right_at) for node in done] == [("a", 0, len(parts)), ("b", 0, 0)]
    copy = Directory()
    numbers = {node.number: copy.restore_node(node) for node in reversed(done)}
    for part in parts:
        known = np.isin(part.codes >> 1, list(numbers))
        moved = np.array([numbers[c >> 1] * 2 + (c & 1) for c in part.codes[known].tolist()], np.uint32)
        copy.restore(Replicas(part.keys[known], moved))
    assert {copy.state(node) for node in ("a", "b")} == {DirectoryState.DEGRADED}
    for event in later:
        exact_before = copy.state("a") is DirectoryState.EXACT
        assert copy.apply("a", event)
        assert exact_before == (event.seq > len(parts))
        if event.seq > len(parts):
            directory.apply("a", event)
    assert copy.apply("b", PoolEvents(1, 0))
    for node in ("a", "b"):
        assert copy.state(node) is DirectoryState.EXACT
        assert copy.blocks_by_tier(node) == directory.blocks_by_tier(node)
    for block in range(0, 20_000, 37):
        assert copy.match(NS, short(block)) == {
            node: match for node, match in directory.match(NS, short(block)).items() if node != "late"
        }
    assert copy.validate() == []


@pytest.mark.parametrize(
    "order", [(0, 1, 1), (0, 1, 0), (1,), (0, 2)], ids=["twice", "an old one again", "too early", "one lost"]
)
def test_messages_repeated_lost_or_out_of_order_are_refused_and_nothing_is_exact(order: tuple[int, ...]) -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1)))
    messages = [PoolEvents(1, 1, removed=(run(1),)), PoolEvents(1, 2, stored=(run(1),)), PoolEvents(1, 3)]
    taken = [directory.apply("a", messages[i]) for i in order]
    assert taken == [True] * (len(order) - 1) + [False]
    assert directory.state("a") is DirectoryState.DEGRADED
    assert directory.position("a") == (0, 0)


def test_a_dump_does_not_tell_of_a_node_that_was_lost_and_came_back_meanwhile() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(1, 2, 3)))
    dumped = directory.begin_dump()
    directory.drop_node("a")
    while directory.purge():
        pass
    directory.apply("a", snapshot(run(4)))
    assert directory.end_dump(dumped) == []


def test_what_a_node_held_that_was_lost_while_another_was_cleared_up_is_nobody_elses() -> None:
    directory = Directory()
    held = {node: run(*range(i * 20_000, (i + 1) * 20_000)) for i, node in enumerate("abc")}
    for node, blocks in held.items():
        directory.apply(node, snapshot(blocks))
    for node in held:
        directory.drop_node(node)
        assert directory.purge(3)
    while directory.purge(5):
        directory.apply(f"later-{len(directory.nodes)}", snapshot(run(99_999)))
        blocks = short(*range(0, 60_000, 41))
        assert [directory.match(NS, blocks[i : i + 1]) for i in range(len(blocks))] == [{}] * len(blocks)
    for node in directory.nodes:
        assert directory.num_blocks(node) == 1
    assert directory.validate() == []


def test_what_a_dump_tells_of_nodes_that_are_lost_while_it_is_read_is_nobody_elses() -> None:
    directory = Directory()
    numbers = [directory.restore_node(DumpedNode(f"lost-{i}", i, 0, Position(1, 5), 5)) for i in range(4)]
    for i in range(4):
        directory.drop_node(f"lost-{i}")
    directory.restore(Replicas(np.repeat(short(1, 2), 4), np.array(numbers * 2, np.uint32) * 2))
    directory.apply("later", snapshot(run(3)))
    assert directory.match(bytes(16), short(1)) == {}
    assert directory.num_blocks("later") == 1
    assert directory.validate() == []


def test_one_slice_of_clearing_up_is_short_whatever_a_lost_node_held() -> None:
    """Its blocks lie side by side, so that a slice of the table may be nothing else."""
    directory = Directory()
    directory.apply("a", snapshot(run(*range(50_000))))
    directory.drop_node("a")
    left = [directory._table.num_keys]
    while left[-1]:
        directory.purge()
        left.append(directory._table.num_keys)
    assert max(before - after for before, after in itertools.pairwise(left)) <= 20_000


@settings(max_examples=150, deadline=None)
@given(
    held=st.dictionaries(st.sampled_from("abcd"), st.tuples(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))),
    num_seen=st.integers(1, 4),
    length=st.integers(0, 12),
)
def test_a_match_ends_where_the_node_has_the_windowed_blocks_before(
    held: dict[str, tuple[set[int], set[int]]], num_seen: int, length: int
) -> None:
    directory = Directory()
    for node, (blocks, windowed) in held.items():
        directory.apply(node, snapshot(run(*sorted(blocks)), run(*sorted(windowed), ns=OTHER)))
    expected = {}
    for node, (blocks, windowed) in held.items():
        leading = next((i for i in range(length) if i not in blocks), length)
        ends = [end for end in range(1, leading + 1) if set(range(max(0, end - num_seen), end)) <= windowed]
        expected |= {node: Match(ends[-1], 0)} if ends else {}
    found = directory.match(NS, short(*range(length)), WindowedBlocks(OTHER, num_seen))
    assert found == expected
    assert found.longest == max((match.blocks for match in expected.values()), default=0)


@settings(max_examples=150, deadline=None)
@given(
    held=st.dictionaries(st.sampled_from("abcd"), st.sets(st.integers(0, 11))),
    num_seen=st.integers(1, 4),
    length=st.integers(0, 12),
)
def test_without_other_blocks_a_match_ends_after_the_last_windowed_ones(
    held: dict[str, set[int]], num_seen: int, length: int
) -> None:
    directory = Directory()
    expected = {}
    for node, windowed in held.items():
        directory.apply(node, snapshot(run(*sorted(windowed))))
        ends = [end for end in range(1, length + 1) if set(range(max(0, end - num_seen), end)) <= windowed]
        expected |= {node: Match(ends[-1], 0)} if ends else {}
    found = directory.match(NS, short(*range(length)), WindowedBlocks(NS, num_seen))
    assert found == expected
    assert found.longest == max((match.blocks for match in expected.values()), default=0)


def test_blocks_on_ssd_are_the_last_ones_of_a_shortened_match() -> None:
    directory = Directory()
    directory.apply("a", snapshot(run(0, 1), run(2, 3, tier=Tier.SSD), run(1, 2, ns=OTHER)))
    assert directory.match(NS, short(0, 1, 2, 3), WindowedBlocks(OTHER, 2)) == {"a": Match(3, 1)}
    assert directory.match(NS, short(0, 1, 2, 3), WindowedBlocks(OTHER, 1)) == {"a": Match(3, 1)}

"""The directory's table against plain dicts: growth, rows of every kind, deletion, purging, hostile keys."""

import numpy as np
import pytest
from numpy.typing import NDArray

from conductor.directory.table import DirectoryTable
from kvpool.events import Tier

FOLD = 0x1234_5678_9ABC_DEF0
SEED = 0xFEED_F00D_1234_5679
_NUMBERS = 4096


def keys_of(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def codes(number: int, count: int, tier: Tier = Tier.DRAM) -> NDArray[np.uint32]:
    return np.full(count, number * 2 + (tier is Tier.SSD), np.uint32)


def matched(table: DirectoryTable, keys: NDArray[np.uint64]) -> list[list[int]]:
    """[number, leading keys held, of these on SSD only] of those that hold the first."""
    found = np.zeros((2, _NUMBERS), np.int64)
    longest = table.match(keys, FOLD, np.arange(_NUMBERS), found)
    held = np.flatnonzero(found[0])
    assert found[0].max(initial=0) == longest
    return np.column_stack([held, *found[:, held]]).tolist()


def held(table: DirectoryTable, key: int) -> list[list[int]]:
    return matched(table, keys_of(key))


def test_a_table_grows_without_losing_anything() -> None:
    table = DirectoryTable(SEED)
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, 200_000, dtype=np.uint64)
    for begin in range(0, len(keys), 9_973):
        part = keys[begin : begin + 9_973]
        table.store(part, codes(1, len(part)), FOLD)
    assert table.num_keys == len(keys)
    assert table.num_blocks(1) == (len(keys), 0)
    assert matched(table, keys) == [[1, len(keys), 0]]
    assert matched(table, keys[::-1].copy()) == [[1, len(keys), 0]]
    assert table.validate() == []


@pytest.mark.parametrize(("array", "num_holders"), [("_places", 1), ("_rows", 2), ("_keys", 1), ("_held", 1)])
def test_a_table_that_could_not_grow_still_knows_what_it_knew(array: str, num_holders: int) -> None:
    """As where the system has no memory: an array that somebody holds cannot be moved either."""
    table = DirectoryTable(SEED)
    keys = np.random.default_rng(1).integers(0, 2**64, 60_000, dtype=np.uint64)
    table.store(keys[:100], codes(1, 100), FOLD)
    held_by_another = getattr(table, array).array
    replicas = np.tile(keys, num_holders), np.repeat(np.arange(num_holders, dtype=np.uint32) * 2 + 2, len(keys))
    with pytest.raises(BufferError):
        table.store(*replicas, FOLD)
    assert matched(table, keys[:100])[0] == [1, 100, 0]
    assert table.validate() == []
    del held_by_another
    table.store(*replicas, FOLD)
    assert matched(table, keys) == [[number, len(keys), 0] for number in range(1, num_holders + 1)]


@pytest.mark.parametrize("num_holders", [1, 2, 3, 4, 7, 8, 63, 64, 65, 300, 1200])
def test_holders_come_and_go_one_by_one(num_holders: int) -> None:
    table = DirectoryTable(SEED)
    table.reserve_numbers(num_holders + 1)
    rng = np.random.default_rng(num_holders)
    order = rng.permutation(num_holders) + 1
    for i, number in enumerate(order.tolist()):
        table.store(keys_of(5), codes(number, 1, Tier.SSD if number % 3 == 0 else Tier.DRAM), FOLD)
        if i % 50 == 0:
            assert held(table, 5) == [[n, 1, int(n % 3 == 0)] for n in sorted(order[: i + 1].tolist())]
    table.store(np.repeat(keys_of(5), num_holders), np.array(order * 2 + 1, np.uint32), FOLD)
    assert held(table, 5) == [[n, 1, 1] for n in range(1, num_holders + 1)]
    for i, number in enumerate(rng.permutation(order).tolist()):
        table.remove(number, keys_of(5), FOLD)
        table.remove(number, keys_of(5), FOLD)
        assert table.num_blocks(number) == (0, 0)
        assert len(held(table, 5)) == num_holders - i - 1
        assert table.contents_sum(number) == 0
    assert table.num_keys == 0
    assert table.validate() == []


def test_more_numbers_than_a_dense_row_was_made_for() -> None:
    table = DirectoryTable(SEED)
    for number in range(1, 3000):
        table.reserve_numbers(number + 1)
        table.store(keys_of(7, 8), codes(number, 2), FOLD)
    assert held(table, 8) == [[number, 1, 0] for number in range(1, 3000)]
    assert table.validate() == []


def test_a_hot_prefix_with_a_tail_of_ones_own_matches_as_far_as_each_has_it() -> None:
    table = DirectoryTable(SEED)
    table.reserve_numbers(501)
    chain = np.random.default_rng(2).integers(0, 2**64, 40, dtype=np.uint64)
    depth = {number: 1 + (number * 7) % 30 for number in range(1, 501)} | {13: 40, 14: 35}
    for number, blocks in depth.items():
        on_ssd = np.arange(blocks) % 4 == number % 4
        table.store(chain[:blocks], (number * 2 + on_ssd).astype(np.uint32), FOLD)
    want = [[n, b, int((np.arange(b) % 4 == n % 4).sum())] for n, b in sorted(depth.items())]
    for _ in range(2):
        assert matched(table, chain) == want
    assert matched(table, chain[:5]) == [
        [n, min(b, 5), int((np.arange(min(b, 5)) % 4 == n % 4).sum())] for n, b in sorted(depth.items())
    ]
    assert matched(table, chain[::-1].copy()) == [[13, 40, 10]]


def test_holes_do_not_add_up_however_long_blocks_come_and_go() -> None:
    table = DirectoryTable(SEED)
    keys = np.random.default_rng(3).integers(0, 2**64, 400_000, dtype=np.uint64)
    window = 10_000
    table.store(keys[:window], codes(1, window), FOLD)
    segments = table.num_parts
    for begin in range(0, len(keys) - window, window):
        table.store(keys[begin + window : begin + 2 * window], codes(1, window), FOLD)
        table.remove(1, keys[begin : begin + window], FOLD)
    assert table.num_keys == window
    assert table.num_parts <= 4 * segments
    assert table.validate() == []


def test_a_node_is_purged_in_slices_and_nothing_else_goes() -> None:
    table = DirectoryTable(SEED)
    table.reserve_numbers(400)
    keys = np.random.default_rng(4).integers(0, 2**64, 30_000, dtype=np.uint64)
    for number in (1, 2, 3):
        part = keys[number::3].copy()
        table.store(part, codes(number, len(part), Tier(1 + number % 2)), FOLD)
    for number in range(4, 300):
        table.store(keys[:20], codes(number, 20), FOLD)
    table.store(keys[:9000], codes(2, 9000), FOLD)
    kept = {n: (table.num_blocks(n), table.contents_sum(n)) for n in [1, 3, *range(6, 300)]}
    begin, slices = 0, 0
    while begin < table.num_parts:
        begin, slices = table.purge({2, 4, 5}, begin, 3), slices + 1
    assert slices > 1
    assert [(table.num_blocks(n), table.contents_sum(n)) for n in (2, 4, 5)] == [((0, 0), 0)] * 3
    assert {n: (table.num_blocks(n), table.contents_sum(n)) for n in kept} == kept
    assert [n for n, *_ in held(table, int(keys[19]))] == [1, *range(6, 300)]
    assert table.validate() == []


def test_keys_made_to_collide_in_a_table_with_a_known_seed_do_not_in_one_with_another() -> None:
    """An attacker can choose keys, but not know the seed: a flood that fills one segment of one table spreads here."""
    known, keys = DirectoryTable(SEED), []
    rng = np.random.default_rng(5)
    while len(keys) < 1500:
        candidates = rng.integers(0, 2**64, 200_000, dtype=np.uint64)
        h = (candidates ^ np.uint64(FOLD) ^ np.uint64(SEED)) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
        keys += candidates[h >> np.uint64(57) == 3].tolist()
    flood = np.array(keys, np.uint64)
    known.store(flood, codes(1, len(flood)), FOLD)
    other = DirectoryTable(SEED ^ 0xABCDEF0123456789)
    other.store(flood, codes(1, len(flood)), FOLD)
    assert np.max(known._t.fill) >= 1000
    assert np.max(other._t.fill) <= 300
    for table in (known, other):
        assert matched(table, flood) == [[1, len(flood), 0]]
        assert table.validate() == []


def test_extracted_replicas_make_an_equal_table() -> None:
    table, copy = DirectoryTable(SEED), DirectoryTable(SEED + 2)
    keys = np.random.default_rng(6).integers(0, 2**64, 5_000, dtype=np.uint64)
    for each in (table, copy):
        each.reserve_numbers(200)
    for number in range(1, 150):
        table.store(keys[number:], codes(number, len(keys) - number, Tier(1 + number % 2)), FOLD)
    begin = 0
    while begin < table.num_parts:
        copy.store(*table.extract(set(range(1, 149)), begin, 2))
        begin += 2
    assert [copy.num_blocks(n) for n in range(151)] == [table.num_blocks(n) if n != 149 else (0, 0) for n in range(151)]
    assert [copy.contents_sum(n) for n in range(1, 149)] == [table.contents_sum(n) for n in range(1, 149)]
    assert copy.validate() == []

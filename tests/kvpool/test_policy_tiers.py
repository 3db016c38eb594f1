"""Blocks that move between DRAM and SSD: what leaves where, what is written, loaded, restored."""

import pytest

from kvpool.events import Tier
from kvpool.policy import LoadOutcome, SsdBlock
from kvpool.policy.eviction import EvictionPolicy
from kvpool.policy.index import BlockIndex
from tests.kvpool.two_tiers import NEW, NO_SPACE, NS, ROOT, SPEC, WIDE, Pool, keys


@pytest.fixture
def pool():
    pool = Pool(room=4, ssd_room=8)
    yield pool
    assert pool.core.validate() == []


def test_what_leaves_dram_and_is_on_ssd_is_told_as_there(pool: Pool) -> None:
    chain = keys(4)
    pool.put(chain)
    pool.write_back(everything=True)
    pool.put(keys(2, 1))
    assert pool.where(chain) == "bbss"
    assert [pool.told()[k] for k in chain] == [Tier.DRAM, Tier.DRAM, Tier.SSD, Tier.SSD]
    assert pool.use(chain) == 2
    totals = pool.core.totals()
    assert (totals["evicted_dram_room_blocks"], totals["lost_blocks"], totals["lookup_waiting_blocks"]) == (2, 0, 2)


def test_what_leaves_dram_unwritten_is_lost_and_counted(pool: Pool) -> None:
    pool.put(keys(4))
    pool.put(keys(1, 1))
    assert pool.where(keys(4)) == "ddd-"
    assert keys(4)[3] not in pool.told()
    assert pool.core.totals()["lost_unwritten_blocks"] == 1


def test_a_loaded_block_is_in_dram_again_and_its_use_a_hit_of_the_ssd(pool: Pool) -> None:
    chain = keys(3)
    pool.on_ssd_only(chain)
    loads = pool.core.load(pool.now, NS, chain)
    assert pool.core.num_loading(NS, chain) == 3
    assert pool.core.load(pool.now, NS, chain) == []
    assert pool.pin(chain) is None, "on its way is not there"
    for load in loads:
        pool.core.loaded(pool.now, load, LoadOutcome.OK)
    assert (pool.where(chain), set(pool.told().values())) == ("bbb", {Tier.DRAM})
    assert pool.pin(chain).num_from_ssd == 3
    assert pool.use(chain) == 3
    totals = pool.core.totals()
    assert (totals["hit_ssd_blocks"], totals["hit_dram_blocks"], totals["hit_ssd_tokens"]) == (3, 3, 6)
    assert totals["saved_ssd_compute_us"] == totals["saved_dram_compute_us"] == 3_000_000


def test_loads_evict_others_but_never_their_own_run(pool: Pool) -> None:
    chain = keys(4)
    pool.on_ssd_only(chain)
    pool.load(chain[:2])
    pool.put(keys(2, 1))
    assert pool.load(chain) == 2
    assert (pool.where(chain), pool.where(keys(2, 1))) == ("bbbb", "--")
    pool.core.flush(pool.now, NS, dram_only=True)
    assert pool.where(chain) == "ssss"
    long = [*chain, *keys(2, 2)]
    pool.put(keys(2, 2), parent=chain[-1])
    assert pool.where(long) == "ssssdd"
    assert pool.load(long) == 2
    assert pool.where(long) == "bbssdd", "the run's end was not taken for its middle"


def test_a_block_that_cannot_be_read_twice_is_dropped_and_a_corrupt_one_at_once(pool: Pool) -> None:
    pool.on_ssd_only(keys(1))
    pool.load(keys(1), LoadOutcome.IO_ERROR)
    assert pool.where(keys(1)) == "s"
    pool.load(keys(1), LoadOutcome.IO_ERROR)
    assert pool.where(keys(1)) == "-"
    pool.on_ssd_only(keys(1))
    pool.load(keys(1), LoadOutcome.CORRUPT)
    assert (pool.where(keys(1)), pool.told()) == ("-", {})
    assert len(pool.core.take_ssd_freed()) == 2


def test_one_read_error_is_forgotten_after_a_read_that_succeeds(pool: Pool) -> None:
    pool.on_ssd_only(keys(1))
    for outcome in (LoadOutcome.IO_ERROR, LoadOutcome.OK, LoadOutcome.IO_ERROR):
        pool.core.flush(pool.now, NS, dram_only=True)
        pool.load(keys(1), outcome)
    assert pool.where(keys(1)) == "s"


def test_writes_begin_when_dram_fills_with_what_leaves_next_and_after_its_parents() -> None:
    pool = Pool(room=8, ssd_room=8, write_above=0.5)
    pool.put(keys(3))
    assert pool.write_back() == []
    pool.put(keys(3, 1))
    written = pool.write_back(max_blocks=3)
    assert [b.chain_key for b in written] == keys(3), "of the chain used longest ago, from its beginning"
    assert pool.write_back() != []
    assert pool.write_back() == []


def test_what_was_used_again_is_written_without_need(pool: Pool) -> None:
    pool.put(keys(2))
    pool.put(keys(1, 1))
    pool.use(keys(2))
    assert [b.chain_key for b in pool.write_back()] == keys(2)


def test_what_a_batch_had_no_room_for_is_written_with_the_next() -> None:
    pool = Pool(8, ssd_room=8, write_above=1.0)
    chain = keys(3)
    pool.put(chain)
    pool.use(chain)
    for expected in ("bbd", "bbb"):
        for write in pool.core.writes(pool.now, 4096 * 5 // 2):
            pool.core.written(pool.now, write, True)
        assert pool.where(chain) == expected


def test_writing_everything_goes_through_the_blocks_once_and_looks_for_new_ones(monkeypatch) -> None:
    pool = Pool(24, ssd_room=24)
    for salt in range(20):
        pool.put(keys(1, salt))
    passes = []

    def counted(index: BlockIndex, each=BlockIndex.__iter__):
        passes.append(1)
        return each(index)

    monkeypatch.setattr(BlockIndex, "__iter__", counted)
    for salt in range(10):
        assert [block.chain_key for block in pool.write_back(1, everything=True)] == keys(1, salt)
    pool.put(keys(1, 20))
    assert sum(len(pool.write_back(1, everything=True)) for _ in range(12)) == 11
    assert len(passes) <= 5


def test_a_full_ssd_gives_extents_only_after_they_were_told() -> None:
    pool = Pool(room=2, ssd_room=2, write_above=0.0)
    pool.on_ssd_only(keys(2))
    pool.put(keys(1, 1))
    assert pool.write_back() == []
    assert pool.where(keys(2)) == "s-"
    assert pool.write_back() == [], "not before the SSD store knows"
    assert pool.where(keys(2)) == "s-", "nor is more given up for it"
    (freed,) = pool.core.take_ssd_freed()
    assert [b.ssd_offset for b in pool.write_back()] == [freed]
    assert pool.core.take_ssd_freed() == []
    assert pool.core.validate() == []


def test_an_ssd_smaller_than_dram_comes_to_rest_with_what_leaves_next() -> None:
    pool = Pool(room=8, ssd_room=3, write_above=0.0)
    for salt in range(8):
        pool.put(keys(1, salt))
    for _ in range(10):
        pool.write_back()
        pool.core.take_ssd_freed()
    assert [pool.where(keys(1, salt)) for salt in range(8)] == ["b"] * 3 + ["d"] * 5
    for salt in range(3):
        pool.use(keys(1, salt))
    for _ in range(10):
        pool.write_back()
        pool.core.take_ssd_freed()
    assert [pool.where(keys(1, salt)) for salt in range(8)] == ["d"] * 3 + ["b"] * 3 + ["d"] * 2
    assert (pool.write_back(), pool.core.take_ssd_freed()) == ([], [])
    assert [pool.core.store.find(NS, keys(1, salt)[0]).dram.in_slower_tier for salt in (0, 3)] == [False, True]
    assert pool.core.validate() == []


def test_a_block_on_ssd_alone_stays_as_long_as_one_in_dram_follows_it() -> None:
    pool = Pool(room=3, ssd_room=1)
    chain = keys(2)
    pool.on_ssd_only(chain[:1])
    pool.put(chain[1:], parent=chain[0])
    pool.put(keys(1, 1))
    for _ in range(3):
        assert pool.write_back(everything=True) == pool.core.take_ssd_freed() == []
    assert pool.where(chain) == "sd"
    pool.core.evict(NS, chain[1:])
    pool.write_back(everything=True)
    assert pool.where(chain) == "--"
    assert pool.core.validate() == []


def test_a_failed_write_gives_its_extent_back_and_is_not_tried_for_ever(pool: Pool) -> None:
    pool.put(keys(1))
    for _ in range(2):
        (write,) = pool.core.writes(pool.now, 4096, everything=True)
        pool.core.written(pool.now, write, False)
        assert pool.core.take_ssd_freed() == [write.ssd_offset]
    assert pool.core.writes(pool.now, 4096, everything=True) == []
    assert pool.where(keys(1)) == "d"


def test_a_block_that_is_quarantined_while_it_is_written_leaves_nothing(pool: Pool) -> None:
    pool.put(keys(1))
    (write,) = pool.core.writes(pool.now, 4096, everything=True)
    pool.core.quarantine(NS, keys(1))
    assert pool.put(keys(4, 1))[-1] is NO_SPACE, "its slots are still read"
    pool.core.written(pool.now, write, True)
    assert pool.core.take_ssd_freed() == [write.ssd_offset]
    assert pool.put(keys(4, 2))[-1] is NEW


def test_restored_blocks_are_found_in_whatever_order_they_come() -> None:
    chain, digests = keys(3), (bytes(8), bytes(16))
    entries = [
        SsdBlock(4096 * i, NS, k, parent, SPEC, digests)
        for i, (k, parent) in enumerate(zip(chain, [ROOT, *chain[:-1]], strict=True))
    ]
    strange = SsdBlock(4096 * 7, NS, keys(1, 9)[0], ROOT, WIDE, (bytes(64),))
    beyond = SsdBlock(4096 * 8, NS, keys(1, 8)[0], ROOT, SPEC, digests)
    pool = Pool(room=4, ssd_room=8)
    assert pool.core.restore(1, [entries[2], entries[0], strange, entries[1], beyond]) == 3
    assert pool.core.take_ssd_freed() == [strange.offset, beyond.offset]
    assert pool.core.take_ssd_freed() == []
    assert set(pool.told().values()) == {Tier.SSD}
    assert pool.load(chain) == 3
    assert pool.use(chain) == 3
    assert [pool.core.store.find(NS, k).prefix_node.depth for k in chain] == [0, 1, 2]
    assert pool.core.validate() == []


@pytest.mark.parametrize(("ssd_room", "status"), [(0, NO_SPACE), (8, NEW)])
def test_what_memory_would_refuse_comes_through_it_where_there_is_an_ssd(monkeypatch, ssd_room, status):
    monkeypatch.setattr(EvictionPolicy, "admits", lambda *_: False)
    pool = Pool(2, ssd_room, policy="lru")
    assert pool.put(keys(2)) == [NEW, NEW]
    assert pool.put(keys(1, salt=1)) == [status]

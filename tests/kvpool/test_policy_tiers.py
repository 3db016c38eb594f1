"""The pool node's decisions on two tiers, tails, quotas and sizes, one behaviour each."""

import pytest

from kvpool import KvGroup, KvSpec
from kvpool.errors import AddressError, PoolConfigError, PoolRefused
from kvpool.policy import Block, LoadOutcome, PoolCore, PoolLimits, SlotStatus, SsdBlock
from kvpool.policy.eviction import EvictionPolicy
from kvpool.policy.histogram import Histogram
from kvpool.policy.index import BlockIndex
from kvpool.tiers import Tier

NEW, EXISTS, NO_SPACE = SlotStatus.NEW, SlotStatus.EXISTS, SlotStatus.NO_SPACE
SPEC = KvSpec((KvGroup("full", 0, (0,), 4, 32, "float32"), KvGroup("window", 4, (1, 2), 4, 32, "float16")), 2)
WIDE = KvSpec((KvGroup("full", 0, tuple(range(8)), 4, 32, "float32"),), 2)
NS, WIDE_NS = b"n" * 16, b"w" * 16
ROOT = bytes(16)
MS = 1_000_000


def keys(n: int, salt: int = 0) -> list[bytes]:
    return [bytes([salt]) + i.to_bytes(15, "big") for i in range(1, n + 1)]


class Pool:
    """A core with room for some blocks of 4096 bytes in each tier, and short hands for its calls."""

    def __init__(self, room: int, ssd_room: int = 0, *, write_above: float = 1.0, **limits: object) -> None:
        self.core = PoolCore(
            PoolLimits(
                room * 4096,
                2048,
                operation_ns=30 * MS,
                max_lease_ns=10**12,
                ssd_nbytes=ssd_room * 4096,
                ssd_slab_nbytes=4096,
                write_above=write_above,
                **limits,  # type: ignore[arg-type]
            ),
            incarnation=1,
        )
        self.now = 0

    def put(self, chain: list[bytes], parent: bytes = ROOT, ns: bytes = NS, *, tail: bool = False) -> list[SlotStatus]:
        """Store blocks; with `tail` the last one is partial."""
        self.now += MS
        spec = WIDE if ns == WIDE_NS else SPEC
        got = self.core.allocate(
            self.now,
            ns,
            spec,
            chain,
            [parent, *chain[:-1]],
            owner="w",
            owner_incarnation=1,
            ttl_ns=MS,
            num_tokens=[0] * (len(chain) - 1) + [1] if tail else [],
            compute_s=float(len(chain)),
        )
        if got.put_id:
            digests = tuple(bytes(8 * spec.num_layers(g)) for g in range(spec.num_groups))
            self.core.seal(self.now, got.put_id, [digests] * len(got.new_blocks))
            self.core.fence_revoked(got.put_id)
        return list(got.status)

    def pin(self, chain: list[bytes], ns: bytes = NS, *, tails: bool = False):
        self.now += MS
        return self.core.pin(self.now, ns, chain, owner="w", owner_incarnation=1, lease_ns=10 * MS, tails=tails)

    def use(self, chain: list[bytes], ns: bytes = NS) -> int:
        grant = self.pin(chain, ns)
        return len(grant.blocks) if grant and self.core.unpin(grant.lease_id) else 0

    def write_back(self, max_blocks: int = 100, *, everything: bool = False) -> list[Block]:
        writes = self.core.writes(self.now, max_blocks * 4096, everything=everything)
        for write in writes:
            self.core.written(self.now, write, True)
        return [write.block for write in writes]

    def load(self, chain: list[bytes], outcome: LoadOutcome = LoadOutcome.OK) -> int:
        loads = self.core.load(self.now, NS, chain)
        for load in loads:
            self.core.loaded(self.now, load, outcome)
        return len(loads)

    def where(self, chain: list[bytes], ns: bytes = NS) -> str:
        """Per block: d in DRAM, s on SSD, b both, - neither."""
        found = [self.core.store.find(ns, chain_key) for chain_key in chain]
        return "".join("-dsb"[bool(b and b.offsets) + 2 * (b is not None and b.ssd_offset is not None)] for b in found)

    def told(self) -> dict[bytes, Tier]:
        """What a reader of the events believes."""
        told: dict[bytes, Tier] = {}
        for message in self.core.log.after(1, 0) or []:
            for run in message.removed:
                for i in range(0, len(run.chain), 16):
                    told.pop(run.chain[i : i + 16])
            for run in message.stored:
                told |= {run.chain[i : i + 16]: run.tier for i in range(0, len(run.chain), 16)}
        return told

    def on_ssd_only(self, chain: list[bytes]) -> None:
        self.put(chain)
        self.write_back(everything=True)
        self.core.flush(self.now, NS, dram_only=True)
        assert self.where(chain) == "s" * len(chain)


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
    assert [pool.core.store.find(NS, keys(1, salt)[0]).dram.kept_below for salt in (0, 3)] == [False, True]
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
    assert [pool.core.store.find(NS, k).place.depth for k in chain] == [0, 1, 2]
    assert pool.core.validate() == []


def test_tails_are_leased_after_the_runs_last_block_and_told_to_nobody(pool: Pool) -> None:
    chain, tail = keys(2), keys(1, 7)
    pool.put([*chain, *tail], tail=True)
    assert pool.told().keys() == set(chain)
    assert [b.chain_key for b in pool.pin(chain, tails=True).tails] == tail
    assert pool.pin(chain).tails == ()
    assert pool.pin(chain[:1], tails=True).tails == ()
    assert [b.chain_key for b in pool.pin([*chain, *tail]).blocks] == chain, "a tail is in no run"
    pool.put(keys(1, 8), tail=True)
    grant = pool.pin(keys(1, 9), tails=True)
    assert (grant.blocks, [b.chain_key for b in grant.tails]) == ((), keys(1, 8))


def test_of_too_many_tails_the_oldest_that_nobody_holds_goes() -> None:
    pool = Pool(room=8, max_tails=2)
    pool.put(keys(1))
    parent = keys(1)[0]
    for salt in (1, 2):
        pool.put(keys(1, salt), parent, tail=True)
    pool.put(keys(1, 3), parent, tail=True)
    assert [pool.where(keys(1, salt)) for salt in (1, 2, 3)] == ["-", "d", "d"]
    pool.pin(keys(1), tails=True)
    assert pool.put(keys(1, 4), parent, tail=True) == [NO_SPACE]
    assert pool.core.totals()["evicted_dram_tail_blocks"] == 1


def test_impossible_numbers_of_tokens_are_refused(pool: Pool) -> None:
    args = {"owner": "w", "owner_incarnation": 1, "ttl_ns": MS}
    with pytest.raises(AddressError, match="numbers of tokens"):
        pool.core.allocate(0, NS, SPEC, keys(2), [ROOT, keys(1)[0]], num_tokens=[1], **args)
    with pytest.raises(AddressError, match="partial block of 2"):
        pool.core.allocate(0, NS, SPEC, keys(1), [ROOT], num_tokens=[2], **args)
    with pytest.raises(AddressError, match="replicas"):
        pool.core.hint(0, NS, keys(2), [1])


def test_a_block_that_would_follow_itself_is_not_taken_and_nothing_waits_for_its_beginning() -> None:
    pool = Pool(8, ssd_room=8, write_above=0.0)
    first, second, third = keys(3)
    assert pool.put([first], parent=first) == [NO_SPACE]
    assert pool.put([first], parent=second) == [NEW]
    assert pool.put([second], parent=third) == [NEW]
    assert pool.put([third], parent=first) == [NO_SPACE]
    assert len(pool.write_back(everything=True)) == 2


@pytest.mark.parametrize("compute_s", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_time_of_computing_that_cannot_be_is_refused(pool: Pool, compute_s: float) -> None:
    with pytest.raises(PoolRefused, match="compute_s"):
        pool.core.allocate(1, NS, SPEC, keys(1), [ROOT], owner="w", owner_incarnation=1, ttl_ns=MS, compute_s=compute_s)
    assert len(pool.core.store.index) == 0


@pytest.mark.parametrize("compute_s", [5e-324, 1e6])
def test_the_least_and_most_times_of_computing_leave_the_policy_with_numbers(compute_s: float) -> None:
    core = Pool(3, policy="moonpool").core
    digests = tuple(bytes(8 * SPEC.num_layers(g)) for g in range(SPEC.num_groups))
    for i, told_s in enumerate([1.0, compute_s, 1.0, compute_s, 1.0]):
        got = core.allocate(
            i * MS, NS, SPEC, keys(1, i), [ROOT], owner="w", owner_incarnation=1, ttl_ns=MS, compute_s=told_s
        )
        if got.put_id:
            core.seal(i * MS, got.put_id, [digests])
    assert len(core.store.index) == 3
    assert core.totals()["evicted_dram_room_blocks"] > 0


def test_a_namespace_over_its_quota_evicts_only_its_own() -> None:
    other = b"o" * 16
    pool = Pool(room=8, quotas={NS: 0.25})
    pool.put(keys(3), ns=other)
    for salt in range(1, 5):
        pool.put(keys(1, salt))
    assert [pool.where(keys(1, salt)) for salt in range(1, 5)] == ["-", "-", "d", "d"]
    assert pool.put(keys(3, 9))[-1] is NO_SPACE
    assert pool.where(keys(3), ns=other) == "ddd"
    assert pool.core.totals()["evicted_dram_quota_blocks"] == 4


def test_hints_reach_the_policy_and_stay_with_the_block(pool: Pool) -> None:
    pool.put(keys(1))
    pool.core.hint(0, NS, [*keys(1), *keys(1, 1)], [3, 1])
    assert pool.core.store.find(NS, keys(1)[0]).dram.replicas == 3
    pool.write_back(everything=True)
    assert pool.core.store.find(NS, keys(1)[0]).ssd.replicas == 3


def test_a_block_that_cannot_fit_evicts_nothing() -> None:
    pool = Pool(room=8)
    for salt in range(8):
        pool.put(keys(1, salt))
    held = [pool.pin(keys(1, salt)) for salt in range(0, 8, 2)]
    assert pool.put(keys(1, 99), ns=WIDE_NS) == [NO_SPACE], "its slot takes four blocks' units"
    assert [pool.where(keys(1, salt)) for salt in range(8)] == ["d"] * 8
    for grant in held:
        pool.core.unpin(grant.lease_id)
    assert pool.put(keys(1, 99), ns=WIDE_NS) == [NEW]
    assert sum(pool.where(keys(1, salt)) == "-" for salt in range(8)) == 4


def test_no_model_is_kept_out_by_blocks_of_another_that_are_used_all_the_time() -> None:
    pool = Pool(room=16)
    for salt in range(16):
        pool.put(keys(1, salt))
    for _ in range(5):
        for salt in range(0, 16, 2):  # some in every four adjoining
            pool.use(keys(1, salt))
        assert pool.put(keys(1, 99), ns=WIDE_NS)[0] in (NEW, EXISTS)
        assert pool.use(keys(1, 99), ns=WIDE_NS) == 1
    # Four blocks' room, which need not begin where a block does; and taken once.
    assert pool.core.totals()["evicted_dram_slab_blocks"] in (4, 5)
    assert pool.core.validate() == []


def test_the_slabs_used_longest_ago_are_cleared_for_another_size() -> None:
    pool = Pool(room=16)
    for salt in range(16):
        pool.put(keys(1, salt))
    for salt in (*range(8), *range(12, 16)):
        pool.use(keys(1, salt))
    pool.put(keys(1, 99), ns=WIDE_NS)
    assert [salt for salt in range(16) if pool.where(keys(1, salt)) == "-"] == [8, 9, 10, 11]


def test_emptying_dram_keeps_what_is_only_there_and_emptying_all_what_is_in_use(pool: Pool) -> None:
    pool.put(keys(2))
    assert pool.core.flush(pool.now, None, dram_only=True) == (0, 2)
    pool.write_back(everything=True)
    grant = pool.pin(keys(1))
    assert pool.core.flush(pool.now, None, dram_only=True) == (1, 1)
    assert pool.where(keys(2)) == "bs"
    assert pool.core.flush(pool.now, b"x" * 16, dram_only=False) == (0, 0)
    assert pool.core.flush(pool.now, NS, dram_only=False) == (1, 1)
    pool.core.unpin(grant.lease_id)
    assert pool.core.flush(pool.now, NS, dram_only=False) == (1, 0)


def test_changes_in_dram_are_told_from_the_first_question_on(pool: Pool) -> None:
    pool.put(keys(1))
    assert [(added, b.chain_key) for added, b in pool.core.take_dram_changes()] == [(True, keys(1)[0])]
    pool.put(keys(1, 1))
    pool.core.evict(NS, keys(1))
    told = [(added, b.chain_key) for added, b in pool.core.take_dram_changes()]
    assert told == [(True, keys(1, 1)[0]), (False, keys(1)[0])]


def test_reading_without_a_lease_is_a_use() -> None:
    pool = Pool(room=2)
    pool.put(keys(1))
    pool.put(keys(1, 1))
    pool.core.use(pool.now, NS, keys(1))
    pool.put(keys(1, 2))
    assert (pool.where(keys(1)), pool.where(keys(1, 1))) == ("d", "-")
    assert pool.core.totals()["hit_dram_blocks"] == 1


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(PoolConfigError, match="expected one of"):
        Pool(room=4, policy="random")
    with pytest.raises(PoolConfigError, match="quota"):
        Pool(room=4, quotas={NS: 1.5})
    with pytest.raises(PoolConfigError, match="write_above"):
        Pool(room=4, write_above=2.0)


def test_histograms_are_cumulative() -> None:
    histogram = Histogram()
    for seconds in (0.005, 0.5, 0.5, 7200, 10**6):
        histogram.add(int(seconds * 1e9))
    counted = histogram.counters("age")
    assert [counted[f"age_le_{name}"] for name in ("10ms", "100ms", "1s", "1h", "6h", "1d")] == [1, 1, 3, 3, 4, 4]
    assert (counted["age_count"], counted["age_sum_ms"]) == (5, 1_007_201_005)


def test_times_of_evictions_and_uses_are_counted() -> None:
    pool = Pool(room=1)
    pool.put(keys(1))
    pool.now += 2000 * MS
    pool.use(keys(1))
    pool.now += 20 * MS
    pool.put(keys(1, 1))
    totals = pool.core.totals()
    assert (totals["reuse_gap_le_1s"], totals["reuse_gap_le_10s"]) == (0, 1)
    assert (totals["evicted_dram_age_le_1s"], totals["evicted_dram_age_le_10s"]) == (0, 1)
    assert (totals["evicted_dram_idle_le_10ms"], totals["evicted_dram_idle_le_100ms"]) == (0, 1)


@pytest.mark.parametrize(("ssd_room", "status"), [(0, NO_SPACE), (8, NEW)])
def test_what_memory_would_refuse_comes_through_it_where_there_is_an_ssd(monkeypatch, ssd_room, status):
    monkeypatch.setattr(EvictionPolicy, "admits", lambda *_: False)
    pool = Pool(2, ssd_room, policy="lru")
    assert pool.put(keys(2)) == [NEW, NEW]
    assert pool.put(keys(1, salt=1)) == [status]

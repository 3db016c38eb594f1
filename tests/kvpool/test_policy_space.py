"""Allocation of the pool's space: tails, quotas, hints, sizes, emptying, and counters."""

import pytest

from kvpool.errors import AddressError, PoolConfigError, PoolRefused
from kvpool.policy import PutRequest
from kvpool.policy.counters import Histogram
from tests.kvpool.two_tiers import EXISTS, MS, NEW, NO_SPACE, NS, ROOT, SPEC, WIDE_NS, Pool, keys


@pytest.fixture
def pool():
    pool = Pool(room=4, ssd_room=8)
    yield pool
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
        pool.core.allocate(0, PutRequest(NS, SPEC, keys(2), [ROOT, keys(1)[0]], num_tokens=[1]), **args)
    with pytest.raises(AddressError, match="partial block of 2"):
        pool.core.allocate(0, PutRequest(NS, SPEC, keys(1), [ROOT], num_tokens=[2]), **args)
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
    request = PutRequest(NS, SPEC, keys(1), [ROOT], compute_s=compute_s)
    with pytest.raises(PoolRefused, match="compute_s"):
        pool.core.allocate(1, request, owner="w", owner_incarnation=1, ttl_ns=MS)
    assert len(pool.core.store.index) == 0


@pytest.mark.parametrize("compute_s", [5e-324, 1e6])
def test_the_least_and_most_times_of_computing_leave_the_policy_with_numbers(compute_s: float) -> None:
    core = Pool(3, policy="moonpool").core
    digests = tuple(bytes(8 * SPEC.num_layers(g)) for g in range(SPEC.num_groups))
    for i, told_s in enumerate([1.0, compute_s, 1.0, compute_s, 1.0]):
        request = PutRequest(NS, SPEC, keys(1, i), [ROOT], compute_s=told_s)
        got = core.allocate(i * MS, request, owner="w", owner_incarnation=1, ttl_ns=MS)
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

"""Size of an elastic arena by readings of memory: bounds, steps, hysteresis; and which blocks a shrunk arena keeps."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.policy.elastic import ElasticSizing, MemoryScope, PressureLevel
from tests.kvpool.two_tiers import MS, Pool, keys

MIB, GIB = 1 << 20, 1 << 30
LEAST, MOST = 256 * MIB, 2 * GIB
QUARTER_S = 250 * MS

shares = st.floats(0, 1)
stalls = st.integers(0, 250_000)


def scope(available: float, some_us: int = 0, full_us: int = 0, name: str = "host") -> MemoryScope:
    return MemoryScope(name, 16 * GIB, int(available * 16 * GIB), some_us, full_us)


@given(st.lists(st.tuples(shares, stalls, stalls, shares), max_size=80), st.integers(1, 64))
def test_the_size_stays_within_its_bounds_and_changes_in_bounded_steps(readings, step_mib) -> None:
    sizing = ElasticSizing(LEAST, MOST, step_mib * MIB)
    some = full = 0
    for i, (available, some_us, full_us, resident) in enumerate(readings):
        some, full = some + some_us, full + full_us
        before = sizing.target_nbytes
        decision = sizing.decide(i * QUARTER_S, [scope(available, some, full)], int(resident * before))
        assert LEAST <= sizing.least_nbytes <= decision.target_nbytes <= MOST
        elastic = MOST - sizing.least_nbytes
        assert decision.target_nbytes - before <= max(elastic / 8, step_mib * MIB)
        if decision.target_nbytes < before:
            assert decision.pressure is not PressureLevel.NONE
        if decision.pressure is PressureLevel.CRITICAL:
            assert decision.target_nbytes == sizing.least_nbytes
        if decision.pressure is PressureLevel.HIGH and before > sizing.least_nbytes:
            assert decision.target_nbytes < before


@given(shares, shares, st.integers(0, 2 * MOST))
def test_constant_readings_cause_no_oscillation(available, resident, start_ns) -> None:
    sizing = ElasticSizing(LEAST, MOST, 2 * MIB)
    sizes = [
        sizing.decide(start_ns + i * QUARTER_S, [scope(available)], int(resident * MOST)).target_nbytes
        for i in range(200)
    ]
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(5, 400), st.floats(0, 1.2)), min_size=1, max_size=6))
def test_a_full_pool_settles_beside_any_use_of_the_rest(phases) -> None:
    """The pool fills what it has; the others use a share of the machine, constant for a while."""
    sizing = ElasticSizing(LEAST, MOST, 2 * MIB)
    total, i = 4 * GIB, 0
    for num_readings, others in phases:
        sizes = []
        for _ in range(num_readings):
            i += 1
            resident = sizing.target_nbytes
            available = max(0, total - int(others * total) - resident)
            sizes.append(sizing.decide(i * QUARTER_S, [MemoryScope("host", total, available)], resident).target_nbytes)
        directions = {b > a for a, b in itertools.pairwise(sizes) if a != b}
        assert len(directions) <= 1, "it shrank and grew beside a constant load"
        if num_readings > 12 and sizes[-1] > LEAST:
            assert total - int(others * total) - sizes[-1] >= total / 16, "it does not yield within 3 s"


def test_it_grows_to_its_bound_while_memory_is_idle() -> None:
    sizing = ElasticSizing(LEAST, MOST, 2 * MIB)
    sizes = [sizing.decide(i * QUARTER_S, [scope(0.5)], LEAST).target_nbytes for i in range(60)]
    assert sizes[0] == LEAST
    assert sizes[-1] == MOST
    assert sizes[4] == LEAST + (MOST - LEAST) // 8


def test_the_tightest_scope_decides() -> None:
    sizing = ElasticSizing(LEAST, MOST, 2 * MIB)
    for i in range(60):
        sizing.decide(i * QUARTER_S, [scope(0.5)], MOST)
    group = MemoryScope("control group /pod", 4 * GIB, 200 * MIB)
    decision = sizing.decide(60 * QUARTER_S, [scope(0.5), group], MOST)
    assert decision.pressure is PressureLevel.HIGH
    assert decision.target_nbytes == MOST - (4 * GIB // 8 - 200 * MIB)
    assert "control group /pod: 200 of 4096 MiB" in decision.reason


def test_stalls_shrink_it_to_the_minimum_within_two_seconds_and_it_waits_before_it_grows_again() -> None:
    sizing = ElasticSizing(LEAST, MOST, 2 * MIB)
    for i in range(60):
        sizing.decide(i * QUARTER_S, [scope(0.5)], sizing.target_nbytes)
    assert sizing.target_nbytes == MOST
    for i in range(60, 69):  # every second stalled for a fifth
        sizing.decide(i * QUARTER_S, [scope(0.5, some_us=(i - 59) * 50_000)], sizing.target_nbytes)
    assert sizing.target_nbytes == LEAST
    sizes = [
        sizing.decide(i * QUARTER_S, [scope(0.5, some_us=450_000)], sizing.target_nbytes).target_nbytes
        for i in range(69, 109)
    ]
    assert sizes[-1] == LEAST, "it grows at once"
    later = [sizing.decide(i * QUARTER_S, [scope(0.5, some_us=450_000)], LEAST).target_nbytes for i in range(109, 140)]
    assert later[-1] > LEAST


def shrink(pool: Pool, room: int, *, may_lose: bool) -> None:
    """Shrink the arena to a number of blocks and vacate it as far as possible."""
    resizing = pool.core.resizing
    resizing.resize(room * 4096)
    while True:
        step = resizing.vacate(pool.now, 1 << 20, may_lose=may_lose)
        resizing.moved(step.moves)
        assert pool.core.validate() == []
        if not step.is_progress:
            return


def test_the_least_valuable_blocks_leave_wherever_they_lie() -> None:
    pool = Pool(16, policy="lru")
    old, new = keys(8, 1), keys(8, 2)
    pool.put(old)
    pool.put(new)
    shrink(pool, 8, may_lose=True)
    assert (pool.where(old), pool.where(new)) == ("--------", "dddddddd")
    assert not pool.core.resizing.has_high_slots
    assert pool.core.totals()["evicted_dram_shrunk_blocks"] == 8
    assert sum(map(len, pool.core.resizing.take_vacated())) == 8 * 4096
    assert pool.core.resizing.take_vacated() == []


def test_leased_blocks_keep_their_slots_until_the_lease_ends() -> None:
    pool = Pool(16, policy="lru")
    first, second = keys(8, 1), keys(8, 2)
    pool.put(first)
    pool.put(second)
    grant = pool.pin(second)
    slots = [block.offsets for block in grant.blocks]
    shrink(pool, 8, may_lose=True)
    assert [block.offsets for block in grant.blocks] == slots
    assert pool.core.resizing.has_high_slots
    pool.core.unpin(grant.lease_id)
    shrink(pool, 8, may_lose=True)
    assert not pool.core.resizing.has_high_slots
    assert pool.where(second) == "dddddddd"


def test_a_block_that_the_ssd_could_keep_is_not_evicted_before_it_is_written() -> None:
    pool = Pool(16, 64, policy="lru", least_nbytes=4 * 4096)
    chain = keys(16)
    pool.put(chain)
    shrink(pool, 4, may_lose=False)
    assert pool.where(chain) == "d" * 16
    while pool.write_back(4):
        shrink(pool, 4, may_lose=False)
    assert pool.where(chain).count("s") == 12
    assert "-" not in pool.where(chain)
    assert not pool.core.resizing.has_high_slots
    assert pool.core.totals()["lost_blocks"] == 0


def test_blocks_are_written_ahead_while_more_than_half_of_the_minimum_is_not_on_ssd() -> None:
    fixed, elastic = Pool(64, 64, write_above=0.5), Pool(64, 64, write_above=0.5, least_nbytes=8 * 4096)
    for pool in (fixed, elastic):
        pool.put(keys(16))
        while pool.write_back(4):
            pass
    assert fixed.where(keys(16)) == "d" * 16
    assert elastic.where(keys(16)) == "b" * 12 + "d" * 4


def test_new_blocks_stay_within_the_shrunk_part_and_use_all_after_growth() -> None:
    pool = Pool(16, policy="lru")
    shrink(pool, 4, may_lose=True)
    assert [status.name for status in pool.put(keys(6))] == ["NEW"] * 4 + ["NO_SPACE"] * 2
    pool.core.resizing.resize(16 * 4096)
    assert pool.core.resizing.take_vacated() == []
    assert [status.name for status in pool.put(keys(12))] == ["EXISTS"] * 4 + ["NEW"] * 8

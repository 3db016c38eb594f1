"""Retained prefixes: kept in preference over others until a lifetime ends, whole or not at all, within shares."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import PoolRefused
from kvpool.policy.core import LOAD_AHEAD_NS
from kvpool.policy.eviction import POLICIES, RetainRequest, Retention, Use, make_policy
from simulator.pool import SimulatedPool
from tests.kvpool.two_tiers import MS, NS, Pool, keys

S = 10**9
CAPACITY = 20


def pool_of(policy: str = "lru", share: float = 0.75, tenant_share: float = 0.5, *, leaf_first: bool = True):
    retention = Retention(CAPACITY, share, tenant_share)
    return SimulatedPool(make_policy(policy, CAPACITY), CAPACITY, leaf_first=leaf_first, retention=retention)


def chain(name: str, blocks: int) -> list[str]:
    return [f"{name}{depth}" for depth in range(blocks)]


def store(pool: SimulatedPool, now_ns: int, blocks: Sequence[str]) -> int:
    """Use a prompt: return the blocks that were found, and store the rest."""
    use = Use(now_ns, len(blocks))
    found = pool.look_up(blocks, use)
    pool.store(blocks, found, use)
    return found


def held(pool: SimulatedPool, blocks: Sequence[str]) -> int:
    return sum(block in pool.present for block in blocks)


def announced(tenant: str = "t", lifetime_s: float = 100.0, pause_s: float = 10.0, priority: int = 0) -> RetainRequest:
    return RetainRequest(tenant, round(lifetime_s * S), round(pause_s * S), priority)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_every_policy_a_prefix_outlasts_other_traffic_until_its_lifetime_ends(policy: str) -> None:
    pool, kept = pool_of(policy), chain("kept", 8)
    assert pool.retain(kept, 0, announced())
    store(pool, 0, kept)
    for second in range(1, 90):
        store(pool, second * S, chain(f"other{second}-", 6))
    assert held(pool, kept) == 8
    assert len(pool.present) == CAPACITY
    for second in range(101, 300):
        store(pool, second * S, chain(f"other{second}-", 6))
        store(pool, second * S, chain(f"other{second}-", 6))
    assert held(pool, kept) < 8, "evicted as any other afterwards"


@pytest.mark.parametrize("policy", POLICIES)
def test_if_everything_is_retained_a_prefix_is_given_up_and_the_pool_goes_on(policy: str) -> None:
    pool = pool_of(policy, share=1.0, tenant_share=1.0)
    soon, late = chain("soon", 10), chain("late", 10)
    for blocks, pause_s in ((soon, 5), (late, 50)):
        assert pool.retain(blocks, 0, announced(pause_s=pause_s))
        store(pool, 0, blocks)
    pool.retain(chain("new", 4), S, announced("other"))
    store(pool, S, chain("new", 4))
    store(pool, S, chain("new", 4))
    assert held(pool, soon) == 10
    assert held(pool, late) + held(pool, chain("new", 4)) == 10


def test_prefixes_are_retained_whole_and_those_used_soonest_first() -> None:
    pool = pool_of()
    assert pool.retain(chain("a", 6), 0, announced(pause_s=30))
    assert not pool.retain(chain("b", 6), 0, announced(pause_s=40)), "10 blocks are the tenant's limit"
    assert pool.retain(chain("c", 4), 0, announced(pause_s=50))
    assert pool.retain(chain("d", 10), 0, announced(pause_s=20)), "both others are used later"
    assert not pool.retain(chain("e", 11), 0, announced(pause_s=1)), "no room even without the others"
    retention = pool._retaining.retention
    assert (retention.nbytes_of("t"), len(retention)) == (10, 1)
    assert (retention.num_preempted, retention.num_refused) == (2, 2)


def test_a_lower_priority_precedes_a_shorter_pause() -> None:
    pool = pool_of()
    assert pool.retain(chain("a", 6), 0, announced(pause_s=30, priority=1))
    assert not pool.retain(chain("b", 6), 0, announced(pause_s=1, priority=2))
    assert pool.retain(chain("c", 6), 0, announced(pause_s=90, priority=0))


def test_shared_blocks_of_a_tenants_prefixes_count_once() -> None:
    pool = pool_of()
    turns = [chain("a", blocks) for blocks in (6, 8, 10)]
    assert all(pool.retain(turn, 0, announced()) for turn in turns)
    assert pool._retaining.retention.nbytes_of("t") == 10


def test_an_overdue_prefix_yields_unless_its_request_waits() -> None:
    pool = pool_of()
    for name in "ab":
        pool.retain(chain(name, 5), 0, announced(pause_s=2))
    pool.await_use([*chain("a", 5), "next"], 3 * S)
    assert pool.retain(chain("new", 5), 40 * S, announced(pause_s=20)), "b has been overdue for longer"
    assert not pool.retain(chain("newer", 5), 41 * S, announced(pause_s=30)), "a's request waits"
    assert [pool._retaining.retention.holds(f"{name}0") for name in ("a", "b", "new")] == [True, False, True]


def test_one_tenants_prefixes_never_displace_anothers() -> None:
    pool = pool_of(share=0.75, tenant_share=0.5)
    assert pool.retain(chain("a", 9), 0, announced("a", pause_s=90))
    assert pool.retain(chain("b", 6), 0, announced("b", pause_s=90))
    assert not pool.retain(chain("c", 7), 0, announced("b", pause_s=1)), "its own 6 blocks would not be enough"
    assert pool._retaining.retention.nbytes == 15


def test_a_used_prefix_is_kept_for_as_long_as_its_pause_and_no_longer() -> None:
    pool, blocks = pool_of(), chain("a", 5)
    pool.retain(blocks, 0, announced(pause_s=10, lifetime_s=100))
    store(pool, 0, blocks)
    assert store(pool, 12 * S, blocks) == 5
    retention = pool._retaining.retention
    retention.expire(21 * S)
    assert len(retention) == 1
    retention.expire(22 * S)
    assert len(retention) == 0


def test_a_used_prefix_is_replaced_by_the_longer_one_that_continues_it() -> None:
    pool = pool_of()
    for blocks in (4, 6, 8):
        store(pool, 0, chain("a", blocks))
        pool.retain(chain("a", blocks), 0, announced())
    retention = pool._retaining.retention
    assert len(retention) == 1, "the turns before were used"
    assert (retention.nbytes, retention.holds("a0"), retention.holds("a7")) == (8, True, True)


def test_prefixes_that_share_blocks_take_bounded_memory() -> None:
    pool = pool_of()
    retained = sum(pool.retain([*chain("a", 5), f"own{n}"], n, announced(lifetime_s=86_400)) for n in range(1000))
    assert retained == 5, "10 blocks are the limit, 5 of them shared"
    for n in range(1000):
        pool.retain(chain("b", 3), n, announced("b", pause_s=1 + n % 7))
        pool.await_use(chain("b", 3), n)
    retention = pool._retaining.retention
    assert len(retention._ends) <= 2 * len(retention) + 65
    assert retention._num_keys == sum(len(each.keys) for _, found in _tenants(retention) for each in found.prefixes)


REQUESTS = st.lists(
    st.tuples(
        st.booleans(),  # of the tenant with hints
        st.integers(0, 5),  # which of its prompts
        st.integers(1, 7),  # blocks
        st.integers(1, 60),  # announced pause, true or not
        st.integers(-2, 2),  # announced priority
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS)
def test_false_hints_cost_others_no_more_hits_than_the_tenants_share(
    requests: list[tuple[bool, int, int, int, int]],
) -> None:
    """The other tenant finds at least what it finds, without hints, in a pool that is smaller by the share."""
    share = 0.4
    hinted = pool_of(share=0.75, tenant_share=share, leaf_first=False)
    room = CAPACITY - int(CAPACITY * share)
    smaller = SimulatedPool(make_policy("lru", room), room, leaf_first=False)
    for second, (lies, which, blocks, pause_s, priority) in enumerate(requests):
        prompt = chain(f"{'liar' if lies else 'other'}{which}-", blocks)
        if lies:
            hinted.retain(prompt, second * S, announced("liar", 10_000, pause_s, priority))
        found, least = (store(pool, second * S, prompt) for pool in (hinted, smaller))
        if not lies:
            assert found >= least


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS, policy=st.sampled_from(sorted(POLICIES)))
def test_counts_are_those_of_the_retained_prefixes(
    requests: list[tuple[bool, int, int, int, int]], policy: str
) -> None:
    pool = pool_of(policy)
    retention = pool._retaining.retention
    for second, (lies, which, blocks, pause_s, priority) in enumerate(requests):
        tenant = "a" if lies else "b"
        prompt = chain(f"{which}-", blocks)
        pool.retain(prompt, second * S, announced(tenant, 3 * pause_s, pause_s, priority))
        store(pool, second * S, prompt)
        retained = {name: {key for each in found.prefixes for key in each.keys} for name, found in _tenants(retention)}
        assert {name: len(found) for name, found in retained.items()} == {
            name: retention.nbytes_of(name) for name in retained
        }
        assert all(len(found) <= CAPACITY // 2 for found in retained.values())
        assert retention.nbytes == sum(map(len, retained.values())) <= 0.75 * CAPACITY
        assert len(pool.present) <= CAPACITY
    retention.expire(10**6 * S)
    assert (len(retention), retention.nbytes, retention.parked, retention._counts) == (0, 0, {}, {})


def _tenants(retention: Retention):
    return list(retention._tenants.items())


def test_a_pool_node_keeps_a_retained_prefix_and_counts_refusals() -> None:
    pool = Pool(room=8)
    kept = keys(4)
    pool.put(kept)
    assert pool.core.retain(pool.now, NS, kept, announced())
    assert not pool.core.retain(pool.now, NS, keys(5, 9), announced(pause_s=50))
    for salt in range(1, 6):
        pool.put(keys(3, salt))
    assert pool.use(kept) == 4
    assert pool.core.totals()["retained_refused"] == 1
    assert pool.core.validate() == []


def test_a_pool_node_retains_nothing_of_an_unknown_namespace_and_rejects_endless_lifetimes() -> None:
    pool = Pool(room=8)
    assert not pool.core.retain(0, NS, keys(4), announced())
    with pytest.raises(PoolRefused, match="lifetime_s"):
        pool.core.retain(0, NS, keys(4), announced(lifetime_s=1e6))


def test_what_is_on_ssd_only_is_due_for_loading_shortly_before_its_use() -> None:
    pool, blocks = Pool(room=4, ssd_room=8), keys(3)
    pool.on_ssd_only(blocks)
    now = pool.now
    pool.core.retain(now, NS, blocks, announced(pause_s=30))
    before = now + 30 * S - LOAD_AHEAD_NS
    assert pool.core.due_loads(before - MS) == []
    assert pool.core.due_loads(before) == [(NS, tuple(blocks))]
    assert pool.core.due_loads(before + MS) == [], "once only"
    assert pool.load(blocks) == 3
    assert pool.where(blocks) == "bbb"


def test_what_each_tenant_retains_is_counted_until_its_lifetime_ends() -> None:
    pool = pool_of()
    assert pool.retain(chain("a", 4), 0, announced("t", lifetime_s=10))
    assert pool.retain(chain("b", 3), 0, announced("t"))
    assert pool.retain(chain("c", 2), 0, announced("u"))
    retention = pool._retaining.retention
    assert list(retention.by_tenant()) == [("t", 2, 7), ("u", 1, 2)]
    retention.expire(11 * S)
    assert list(retention.by_tenant()) == [("t", 1, 3), ("u", 1, 2)]

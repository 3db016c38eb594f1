"""One pool over a trace: the measured table, what counts as a hit, the two rules of leaving, the limit."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.policy.eviction import POLICIES, make_policy
from simulator.cache import BELADY, ChainedTrace, request, simulate_cache
from simulator.errors import BadSetting
from simulator.pool import SimulatedPool

SmallTrace = Callable[[Sequence[Sequence[int]]], ChainedTrace]
# Prompts of a few families, so that beginnings are shared and pools overflow.
PROMPTS = st.lists(
    st.builds(
        lambda family, length: [1000 * family + depth for depth in range(length)], st.integers(0, 4), st.integers(1, 6)
    ),
    min_size=1,
    max_size=40,
)


# Measured by another simulator on the same trace, to four digits.
@pytest.mark.parametrize(
    ("policy", "capacity", "hit_rate"),
    [
        ("lru", 10_000, 0.2112),
        ("lru", 1_000, 0.0445),
        ("lfu", 1_000, 0.0481),
        ("length-aware", 1_000, 0.0504),
        ("arc", 1_000, 0.0529),
        (BELADY, 10_000, 0.3664),
        (BELADY, 1_000, 0.1907),
    ],
)
def test_the_conversation_trace_has_the_measured_hit_rates(
    conversation: ChainedTrace, policy: str, capacity: int, hit_rate: float
) -> None:
    assert simulate_cache(conversation, policy, capacity).hit_rate == pytest.approx(hit_rate, abs=0.0005)


def test_the_halves_of_a_run_make_up_the_whole(conversation: ChainedTrace) -> None:
    run = simulate_cache(conversation, BELADY, 1_000)
    half = len(conversation.chains) // 2
    first = sum(len(chain.blocks) for chain in conversation.chains[:half])
    hits = run.hit_rate_first_half * first + run.hit_rate_second_half * (run.references - first)
    assert hits == pytest.approx(run.hits)
    assert run.references == 288_500
    assert run.requests == 12_031


def test_only_a_leading_run_hits(small_trace: SmallTrace) -> None:
    # Without the tree, LRU gives up 1 for 4: then 2 and 3 are there, and nothing can be done with them.
    trace = small_trace([[1, 2, 3], [4], [1, 2, 3]])
    assert simulate_cache(trace, "lru", 3).hits == 0
    assert simulate_cache(trace, "lru", 3, leaf_first=True).hits == 2


def test_an_id_after_another_beginning_is_another_block(small_trace: SmallTrace) -> None:
    assert simulate_cache(small_trace([[1, 2], [3, 2], [1, 2]]), "lru", 9).hits == 2


def test_a_prompt_longer_than_the_pool_is_stored_as_far_as_it_goes(small_trace: SmallTrace) -> None:
    run = simulate_cache(small_trace([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]), "lru", 3, leaf_first=True)
    assert (run.hits, run.evictions, run.not_stored) == (3, 0, 4)


@pytest.mark.parametrize("leaf_first", [False, True])
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 8))
def test_a_pool_keeps_its_capacity_and_its_prefixes(
    small_trace: SmallTrace, name: str, leaf_first: bool, prompts: list[list[int]], capacity: int
) -> None:
    trace = small_trace(prompts)
    pool = SimulatedPool(make_policy(name, capacity), capacity, leaf_first=leaf_first)
    for chain in trace.chains:
        assert request(pool, chain) <= len(chain.blocks)
        assert len(pool.present) <= capacity
        if leaf_first:
            assert all(one.parent is None or one.parent in pool.present for one in pool.present.values())


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(prompts=PROMPTS, capacity=st.integers(1, 8), leaf_first=st.booleans())
def test_nothing_finds_more_than_the_limit(
    small_trace: SmallTrace, name: str, prompts: list[list[int]], capacity: int, leaf_first: bool
) -> None:
    trace = small_trace(prompts)
    limit = simulate_cache(trace, BELADY, capacity).hits
    assert simulate_cache(trace, name, capacity, leaf_first=leaf_first).hits <= limit
    assert simulate_cache(trace, name, trace.num_blocks).hits == simulate_cache(trace, BELADY, trace.num_blocks).hits


def test_a_pool_of_nothing_is_refused(small_trace: SmallTrace) -> None:
    with pytest.raises(BadSetting, match="capacity must be at least 1 block, got 0"):
        simulate_cache(small_trace([[1]]), "lru", 0)


def test_progress_ends_with_the_last_request(conversation: ChainedTrace) -> None:
    told: list[int] = []
    simulate_cache(conversation, "lru", 100, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == len(conversation.chains)
    assert len(told) > 10

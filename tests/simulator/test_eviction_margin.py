"""Moonpool's policy is not below the better of LRU and ARC, also where its model alone would be."""

import pytest

from benchmarks.evicting.drawing import build
from benchmarks.evicting.tuning import TUNING
from kvpool.policy.eviction.moonpool import Moonpool
from simulator.cache import ChainedTrace, request, simulate_cache
from simulator.pool import SimulatedPool

# Short runs at a capacity at which the model's policy alone loses more than the margin, or gains much.
CASES = [("phases", 1633), ("documents", 1623), ("agents", 386), ("loop_and_chats", 1119), ("everything", 621)]
MARGIN = 0.005


def beginning(name: str, num_references: int = 25_000) -> ChainedTrace:
    """Return the first requests of a workload."""
    trace = build(name, TUNING[name], seed=3)
    taken = references = 0
    while references < num_references:
        references += len(trace.chains[taken].blocks)
        taken += 1
    chains = trace.chains[:taken]
    return ChainedTrace(name, chains, len({block for chain in chains for block in chain.blocks}))


def classic(trace: ChainedTrace, capacity: int) -> float:
    return max(simulate_cache(trace, policy, capacity, leaf_first=True).hit_rate for policy in ("lru", "arc"))


@pytest.mark.parametrize(("name", "capacity"), CASES)
def test_it_is_not_below_the_better_of_lru_and_arc(name: str, capacity: int) -> None:
    trace = beginning(name)
    assert simulate_cache(trace, "moonpool", capacity).hit_rate >= classic(trace, capacity) - MARGIN


def test_the_margin_needs_the_choice_between_experts() -> None:
    trace, capacity = beginning("phases"), 1633
    policy = Moonpool(capacity)
    policy._shadows.choose = lambda: False  # type: ignore[method-assign]
    pool = SimulatedPool(policy, capacity, leaf_first=True)
    alone = sum(request(pool, chain) for chain in trace.chains) / trace.num_references
    assert alone < classic(trace, capacity) - MARGIN


@pytest.mark.parametrize(("name", "capacity", "gain"), [("loop_and_chats", 1119, 0.03), ("everything", 621, 0.008)])
def test_it_is_above_both_where_reuse_can_be_predicted(name: str, capacity: int, gain: float) -> None:
    trace = beginning(name)
    assert simulate_cache(trace, "moonpool", capacity).hit_rate > classic(trace, capacity) + gain

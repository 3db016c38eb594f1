"""Moonpool's own policy over whole traces: what it reaches, and that it loses nowhere what LRU has."""

import random
from collections.abc import Callable, Sequence

import pytest

from simulator.cache import ChainedTrace, simulate_cache

SmallTrace = Callable[[Sequence[Sequence[int]]], ChainedTrace]


@pytest.mark.nightly
def test_the_conversation_trace_has_its_hit_rate(conversation: ChainedTrace) -> None:
    assert simulate_cache(conversation, "moonpool", 5_859).hit_rate == pytest.approx(0.1891, abs=0.0015)


def _recent(rng: random.Random) -> list[list[int]]:
    """Prompts that come back soon or never."""
    prompts: list[list[int]] = []
    for number in range(1500):
        if prompts and rng.random() < 0.7:
            prompts.append(prompts[-1 - min(int(rng.expovariate(1 / 15)), len(prompts) - 1)])
        else:
            prompts.append([100 * number + block for block in range(rng.randint(2, 12))])
    return prompts


def _scans(rng: random.Random) -> list[list[int]]:
    """A few prompts that come back, among many that do not."""
    prompts = []
    for number in range(1200):
        comes_back = number % 3 == 0
        first = 10**6 + 100 * rng.randrange(10) if comes_back else 100 * number
        prompts.append(list(range(first, first + (8 if comes_back else 20))))
    return prompts


@pytest.mark.parametrize(("prompts", "capacity"), [(_recent, 120), (_scans, 250)])
def test_once_it_has_learnt_it_is_not_below_lru_where_lru_is_at_home_or_scans_pass(
    small_trace: SmallTrace, prompts: Callable[[random.Random], list[list[int]]], capacity: int
) -> None:
    trace = small_trace(prompts(random.Random(1)))
    lru = simulate_cache(trace, "lru", capacity, leaf_first=True).hit_rate_second_half
    assert simulate_cache(trace, "moonpool", capacity).hit_rate_second_half >= lru - 0.005


def test_scans_do_not_drive_out_what_comes_back(small_trace: SmallTrace) -> None:
    trace = small_trace(_scans(random.Random(2)))
    lru = simulate_cache(trace, "lru", 250, leaf_first=True).hit_rate
    assert simulate_cache(trace, "moonpool", 250).hit_rate > lru + 0.05


def test_two_runs_agree(small_trace: SmallTrace) -> None:
    trace = small_trace(_recent(random.Random(3)))
    first, second = (simulate_cache(trace, "moonpool", 120) for _ in range(2))
    assert (first.hits, first.evictions, first.not_stored) == (second.hits, second.evictions, second.not_stored)

"""One pool for a whole trace: which blocks would be found, under which policy. Drives the live pool's own policies.

A prompt is looked up first: its leading run of present blocks is what hits. Then the run's blocks are used in order,
and what is missing is stored in order, each block taking the place of one that the policy gives up.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.policy.eviction import Use, make_policy
from simulator.belady import run_belady
from simulator.chains import Chain, ChainedTrace
from simulator.errors import BadSetting
from simulator.pool import SimulatedPool

__all__ = ["BELADY", "CacheRun", "request", "simulate_cache"]

BELADY = "belady"
_LEAF_FIRST = frozenset({"moonpool"})
_PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class CacheRun:
    """What a pool of `capacity` blocks found of a trace. The halves are of the requests, in one run."""

    policy: str
    capacity: int
    leaf_first: bool
    requests: int
    references: int
    hits: int
    hit_rate: float
    hit_rate_first_half: float
    hit_rate_second_half: float
    evictions: int
    not_stored: int
    seconds: float


def request(pool: SimulatedPool, chain: Chain) -> int:
    """Look the prompt up, then store what is missing of it. How many leading blocks were found."""
    use = Use(chain.now_ns, len(chain.blocks))
    hits = pool.look_up(chain.blocks, use)
    if hits < len(chain.blocks):
        pool.store(chain.blocks, hits, use, chain.last_tokens)
    return hits


def simulate_cache(
    trace: ChainedTrace,
    policy: str,
    capacity: int,
    *,
    leaf_first: bool | None = None,
    progress: Callable[[int], None] = lambda requests: None,
) -> CacheRun:
    """Run the whole trace through a new pool of `capacity` blocks.

    `leaf_first` None: the policy's own way, which is leaf first for Moonpool's and free for the literature's; Belady
    keeps prefixes whole by itself. `progress` is told how many requests are done. Raises BadSetting, PoolConfigError.
    """
    if capacity < 1:
        raise BadSetting(f"a capacity of {capacity} blocks holds nothing; give at least 1")
    began = time.perf_counter()
    if policy == BELADY:
        leaf_first = True
        oracle = run_belady(trace, capacity)
        hits, evictions, not_stored = oracle.hits, oracle.evictions, oracle.not_stored
    else:
        leaf_first = policy in _LEAF_FIRST if leaf_first is None else leaf_first
        pool = SimulatedPool(make_policy(policy, capacity), capacity, leaf_first=leaf_first)
        hits = []
        for done, chain in enumerate(trace.chains, 1):
            hits.append(request(pool, chain))
            if not done % _PROGRESS_EVERY:
                progress(done)
        evictions, not_stored = pool.evictions, pool.not_stored
    progress(len(trace.chains))
    seconds = time.perf_counter() - began
    half = len(trace.chains) // 2
    return CacheRun(
        policy=policy,
        capacity=capacity,
        leaf_first=leaf_first,
        requests=len(trace.chains),
        references=trace.num_references,
        hits=sum(hits),
        hit_rate=_rate(trace.chains, hits),
        hit_rate_first_half=_rate(trace.chains[:half], hits[:half]),
        hit_rate_second_half=_rate(trace.chains[half:], hits[half:]),
        evictions=evictions,
        not_stored=not_stored,
        seconds=seconds,
    )


def _rate(chains: tuple[Chain, ...], hits: list[int]) -> float:
    references = sum(len(chain.blocks) for chain in chains)
    return sum(hits) / references if references else 0.0

"""Cache simulation: hit rates of one block pool over a whole trace, under the live pool's policies and Belady's limit.

A prompt is looked up first; its leading present blocks are the hits. They are marked as used in order, and the missing
blocks are stored in order, each replacing a block that the policy evicts.

The limit is Belady's algorithm ("A study of replacement algorithms for a virtual-storage computer", 1966) with bypass:
a block is stored only if it is used again before at least one of the blocks that it could replace.
"""

import heapq
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from kvpool.policy.eviction import Use, make_policy
from simulator.errors import BadSetting
from simulator.pool import SimulatedPool
from traces import Trace

_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks of one prompt. `blocks`: equal numbers mean equal prefixes; `last_tokens`: tokens of a partial last block,
    0 if it is full."""

    now_ns: int
    blocks: tuple[int, ...]
    last_tokens: int


@dataclass(frozen=True)
class ChainedTrace:
    """Prompts in order of arrival. `num_blocks`: distinct blocks, which an infinite cache holds at the end."""

    source: str
    chains: tuple[Chain, ...]
    num_blocks: int

    @cached_property
    def num_references(self) -> int:
        """Total number of blocks of all prompts."""
        return sum(len(chain.blocks) for chain in self.chains)


def chained(trace: Trace) -> ChainedTrace:
    """Number the blocks of `trace` by their whole prefix: the same id after a different predecessor is a new block."""
    numbers: dict[tuple[int, int], int] = {}
    chains = []
    for row in trace:
        blocks = []
        parent = -1
        for block_id in row.hash_ids:
            parent = numbers.setdefault((parent, block_id), len(numbers))
            blocks.append(parent)
        last_tokens = row.input_length % trace.block_tokens
        chains.append(Chain(row.timestamp_ms * _MS, tuple(blocks), last_tokens))
    return ChainedTrace(trace.source, tuple(chains), len(numbers))


@dataclass(frozen=True, slots=True)
class BeladyRun:
    """Result of Belady's algorithm. `hits`: leading blocks found, per request."""

    hits: list[int]
    evictions: int
    not_stored: int


def run_belady(trace: ChainedTrace, capacity: int) -> BeladyRun:
    """Run the whole trace through a pool of `capacity` blocks.

    Evicts the block with the furthest next use, and the deepest of one prompt's blocks. A block's next use is never
    later than that of its successors, so successors are evicted first.
    """
    next_requests = _next_requests(trace)
    never = len(trace.chains)
    next_use: dict[int, int] = {}  # of the blocks present
    furthest: list[tuple[int, int, int]] = []  # heap of (-next use, -depth, block); entries go stale and are skipped
    hits: list[int] = []
    evictions = not_stored = 0
    for number, chain in enumerate(trace.chains):
        found = 0
        while found < len(chain.blocks) and chain.blocks[found] in next_use:
            found += 1
        hits.append(found)
        for depth, (block, upcoming) in enumerate(zip(chain.blocks, next_requests[number], strict=True)):
            is_new = block not in next_use
            if is_new and upcoming == never:
                not_stored += len(chain.blocks) - depth
                break
            if is_new and len(next_use) >= capacity:
                while furthest and next_use.get(furthest[0][2]) != -furthest[0][0]:
                    heapq.heappop(furthest)
                if not furthest or (-upcoming, -depth) <= furthest[0][:2]:
                    not_stored += len(chain.blocks) - depth
                    break
                del next_use[heapq.heappop(furthest)[2]]
                evictions += 1
            next_use[block] = upcoming
            heapq.heappush(furthest, (-upcoming, -depth, block))
    return BeladyRun(hits, evictions, not_stored)


def _next_requests(trace: ChainedTrace) -> list[list[int]]:
    """Return per request and block the number of the next request with that block; the number of requests if none."""
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for number, chain in enumerate(trace.chains):
        for block in chain.blocks:
            uses[block].append(number)
    never = len(trace.chains)
    upcoming = []
    for number, chain in enumerate(trace.chains):
        row = []
        for block in chain.blocks:
            place = bisect_right(uses[block], number)
            row.append(uses[block][place] if place < len(uses[block]) else never)
        upcoming.append(row)
    return upcoming


BELADY = "belady"
_LEAF_FIRST = frozenset({"moonpool"})
_PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class CacheRun:
    """Hits of a pool of `capacity` blocks on a trace. The halves split the requests of the same run."""

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
    """Look the prompt up and store its missing blocks. Return the number of leading blocks found."""
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

    `leaf_first` None: the policy's default, which is True for Moonpool's policy and False for those of the literature.
    Belady's algorithm evicts successors first in any case. `progress(num_done)` is called periodically with the number
    of requests. Raises BadSetting, PoolConfigError.
    """
    if capacity < 1:
        raise BadSetting(f"the capacity must be at least 1 block, got {capacity}")
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

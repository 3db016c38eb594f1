"""One pool for a whole trace: which blocks would be found, under which policy. Drives the live pool's own policies.

A prompt is looked up first: its leading run of present blocks is what hits. Then the run's blocks are used in order,
and what is missing is stored in order, each block taking the place of one that the policy gives up.

With `leaf_first` the pool keeps the live pool's rule: no block leaves before those that follow it, and a block that
finds no place leaves those after it without one. Without, any block may leave, as the literature's policies assume.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.policy.eviction import EvictionPolicy, Resident, Use, make_policy
from simulator.belady import run_belady
from simulator.chains import Chain, ChainedTrace
from simulator.errors import BadSetting

__all__ = ["BELADY", "CachePool", "CacheRun", "simulate_cache"]

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


class CachePool:
    """Blocks of one size under an eviction policy. Blocks are numbered as in `trace`."""

    def __init__(self, trace: ChainedTrace, policy: EvictionPolicy, capacity: int, *, leaf_first: bool) -> None:
        self.present: dict[int, Resident] = {}
        self.evictions = 0
        self.not_stored = 0
        self._policy = policy
        self._capacity = capacity
        self._leaf_first = leaf_first
        self._parents = trace.parents
        self._num_children = [0] * trace.num_blocks
        self._may_take: Callable[[Resident], bool] = self._is_leaf if leaf_first else _always

    def request(self, chain: Chain) -> int:
        """Look the prompt up, then store what is missing of it. How many leading blocks were found."""
        use = Use(chain.now_ns, len(chain.blocks))
        present = self.present
        hits = 0
        for block in chain.blocks:
            resident = present.get(block)
            if resident is None:
                break
            self._use(resident, use)
            hits += 1
        if hits < len(chain.blocks):
            self._store(chain, hits, use)
        return hits

    def _store(self, chain: Chain, start: int, use: Use) -> None:
        stored: Resident | None = None
        for depth in range(start, len(chain.blocks)):
            block = chain.blocks[depth]
            resident = self.present.get(block)
            if resident is not None:
                self._use(resident, use)
                continue
            if self._leaf_first and depth and chain.blocks[depth - 1] not in self.present:
                self.not_stored += len(chain.blocks) - depth
                break
            partial = chain.last_tokens if depth == len(chain.blocks) - 1 else 0
            resident = self._try_add(block, depth, partial, use)
            if resident is None:
                self.not_stored += 1
            elif self._leaf_first:
                stored = resident
            else:
                self._policy.offer(resident)
        if stored is not None:
            self._policy.offer(stored)

    def _use(self, resident: Resident, use: Use) -> None:
        self._policy.hit(resident, use)
        resident.used_ns = use.now_ns

    def _try_add(self, block: int, depth: int, partial: int, use: Use) -> Resident | None:
        parent = self._parents[block]
        resident = Resident(
            block, parent if depth else None, 1, depth=depth, num_tokens=partial, born_ns=use.now_ns, used_ns=use.now_ns
        )
        # Before anything is evicted for it: the victim must not be the parent.
        if depth:
            self._num_children[parent] += 1
        if len(self.present) >= self._capacity and not self._make_room(resident, use):
            self._drop_child(parent)
            return None
        self.present[block] = resident
        self._policy.insert(resident, use)
        return resident

    def _make_room(self, resident: Resident, use: Use) -> bool:
        if not self._policy.admits(resident, use):
            return False
        victim = self._policy.pop(use.now_ns, self._may_take)
        if victim is None:
            return False
        key = victim.key
        assert isinstance(key, int)
        del self.present[key]
        self.evictions += 1
        self._drop_child(self._parents[key])
        return True

    def _drop_child(self, parent: int) -> None:
        """One child of `parent` (-1: of none) less; the last one makes a leaf of it."""
        if parent < 0:
            return
        self._num_children[parent] -= 1
        if self._leaf_first and not self._num_children[parent] and parent in self.present:
            self._policy.offer(self.present[parent])

    def _is_leaf(self, resident: Resident) -> bool:
        return not self._num_children[resident.key]  # type: ignore[call-overload]


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
        pool = CachePool(trace, make_policy(policy, capacity), capacity, leaf_first=leaf_first)
        hits = []
        for done, chain in enumerate(trace.chains, 1):
            hits.append(pool.request(chain))
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


def _always(resident: Resident) -> bool:
    return True


def _rate(chains: tuple[Chain, ...], hits: list[int]) -> float:
    references = sum(len(chain.blocks) for chain in chains)
    return sum(hits) / references if references else 0.0

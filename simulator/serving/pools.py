"""Simulated pool nodes: blocks in memory and on SSD, under the live pool's own eviction policies.

As in the live pool, a tier evicts a block only after its successors. Blocks evicted from memory stay on SSD, like with
the live node's write-behind, and are promoted again when used.

Of layers with windows, blocks of their own are stored before the ends of prompts and where prompts part, and a prefix
ends where these are there (docs/small-kv.md). Such pools evict by recency.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Self

import numpy as np

from conductor.policy.events import PoolMatches
from kvpool.policy.eviction import RetainRequest, Retention, Use, make_policy
from simulator.pool import SimulatedPool
from simulator.serving.settings import ServingSettings
from worker.policy.cost_profile import CostProfile


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Relative sizes of a block in layers without (`lasting`) and with windows, and the blocks that a window sees.

    `lasting` is 0 if all layers have windows: then blocks take room only where a window is stored.
    """

    lasting: int = 1
    windowed: int = 0
    window_blocks: int = 0  # 0: no layer has a window

    @classmethod
    def of(cls, profile: CostProfile, block_tokens: int) -> Self:
        """Return the sizes for the profile's model."""
        if not profile.window_bytes_per_token:
            return cls()
        common = gcd(profile.kv_bytes_per_token, profile.window_bytes_per_token)
        sizes = (profile.kv_bytes_per_token // common, profile.window_bytes_per_token // common)
        return cls(*sizes, -(-profile.window_tokens // block_tokens))

    @property
    def unit(self) -> int:
        """Size of the blocks in which capacities are given."""
        return self.lasting or self.windowed


_EQUAL = BlockSizes()


class SimulatedPools:
    """All pool nodes, one per prefill node. Capacities are in blocks of layers without windows, if there are any."""

    def __init__(self, settings: ServingSettings, names: Sequence[str], sizes: BlockSizes = _EQUAL) -> None:
        self.roster = tuple(sorted(names))
        self._sizes = sizes
        self._memory = {name: _tier(settings, settings.pool_blocks, sizes) for name in names}
        self._ssd = {name: _tier(settings, settings.ssd_blocks, sizes) for name in names if settings.ssd_blocks}
        self._copied: dict[int, dict[str, int]] = {}  # match_key by target, by the last block of a copied prefix

    def match(self, blocks: Sequence[int]) -> PoolMatches:
        """Return the number of leading blocks of a prompt that each pool node holds."""
        held = [self.held(name, blocks) for name in self.roster]
        counts, on_ssd = np.array(held, np.int64).reshape(-1, 2).T
        replicas: dict[str, int] = {}
        if self._copied:
            for block in blocks:
                replicas.update(self._copied.get(block, {}))
        return PoolMatches(self.roster, np.ascontiguousarray(counts), np.ascontiguousarray(on_ssd), replicas)

    def held(self, name: str, blocks: Sequence[int]) -> tuple[int, int]:
        """Return (number of leading blocks that can be reused from the pool node, number of these on SSD only)."""
        count, on_ssd = self._leading(name, blocks)
        if self._sizes.window_blocks and count:
            end = self._usable(name, blocks[:count])
            return self._leading(name, blocks[:end]) if end < count else (count, on_ssd)
        return count, on_ssd

    def _leading(self, name: str, blocks: Sequence[int]) -> tuple[int, int]:
        """Return (number of leading blocks that the pool node holds, number of these on SSD only)."""
        memory = self._memory[name].present
        if name not in self._ssd:
            count = 0
            for block in blocks:
                if block not in memory:
                    break
                count += 1
            return count, 0
        ssd = self._ssd[name].present
        count = on_ssd = 0
        for block in blocks:
            if block not in memory:
                if block not in ssd:
                    break
                on_ssd += 1
            count += 1
        return count, on_ssd

    def _usable(self, name: str, blocks: Sequence[int]) -> int:
        """Return how many leading ones of these blocks are followed by a window that the pool node holds."""
        tiers = [tier.present for tier in self._tiers(name)]
        end = run = 0
        for count, block in enumerate(blocks, 1):
            run = run + 1 if any(_windowed(block) in present for present in tiers) else 0
            if run >= min(self._sizes.window_blocks, count):
                end = count
        return end

    def _window(self, blocks: Sequence[int]) -> list[int]:
        """Return the keys of the windowed blocks before the end of these blocks."""
        return [_windowed(block) for block in blocks[max(0, len(blocks) - self._sizes.window_blocks) :]]

    def use(self, name: str, now_ns: int, blocks: Sequence[int]) -> None:
        """Mark the leading blocks that the pool node holds as used: they are read."""
        use = Use(now_ns, len(blocks))
        for tier in self._tiers(name):
            tier.look_up(blocks, use)
            for key in self._window(blocks):
                tier.look_up((key,), use)

    def store(self, name: str, now_ns: int, blocks: Sequence[int], first: int = 0) -> None:
        """Store the prompt's blocks from index `first` on; leading ones that are present are marked as used.

        As on a live node, blocks before `first` were read from a pool node and are not stored again, so that what
        follows them is kept only if this pool node holds them.
        """
        use, sizes = Use(now_ns, len(blocks)), self._sizes
        ends = {len(blocks)}
        if sizes.window_blocks:
            have, _ = self._leading(name, blocks)
            if self._usable(name, blocks[:have]) < have:
                ends.add(have)  # here another prompt parts from this one
        for tier in self._tiers(name):
            tier.store(blocks, max(first, tier.look_up(blocks, use)), use, block_size=sizes.lasting)
            for key in (key for end in sorted(ends) for key in self._window(blocks[:end])):
                tier.store((key,), 0, use, block_size=sizes.windowed)

    def retain(self, name: str, now_ns: int, blocks: Sequence[int], request: RetainRequest) -> bool:
        """Retain a prefix in all tiers of the pool node. Returns True if its memory retains it."""
        window, sizes = self._window(blocks), self._sizes

        def retained_by(tier: SimulatedPool) -> bool:
            is_kept = tier.retain(blocks, now_ns, request, block_size=sizes.lasting)
            return is_kept and (not window or tier.retain(window, now_ns, request, block_size=sizes.windowed))

        in_memory, *_ = [retained_by(tier) for tier in self._tiers(name)]
        return in_memory

    def await_use(self, name: str, now_ns: int, blocks: Sequence[int]) -> None:
        """Record that a request which will read these blocks from the pool node is waiting."""
        for tier in self._tiers(name):
            tier.await_use(blocks, now_ns)
            if self._sizes.window_blocks:
                tier.await_use([_windowed(block) for block in blocks], now_ns)

    def copied(self, target: str, blocks: Sequence[int], match_key: int) -> None:
        """Record a prefix copied to `target` by a Copy decision."""
        self._copied.setdefault(blocks[-1], {})[target] = match_key

    def drop_copy(self, target: str, match_key: int, keep_blocks: int, blocks: Sequence[int]) -> None:
        """Drop a copied prefix except its first `keep_blocks` blocks; blocks with successors stay."""
        self._copied.get(blocks[-1], {}).pop(target, None)
        for block in reversed(blocks[keep_blocks:]):
            self._memory[target].remove(block)

    def _tiers(self, name: str) -> list[SimulatedPool]:
        """Return the tiers of a pool node, its memory first."""
        return [self._memory[name], *([self._ssd[name]] if name in self._ssd else [])]

    def validate(self, settings: ServingSettings) -> list[str]:
        """Describe the pool nodes that hold more than their capacity."""
        tiers = [(self._memory, settings.pool_blocks), (self._ssd, settings.ssd_blocks)]
        return [
            f"{name} holds {len(tier.present)} blocks, in the room of {tier.used / self._sizes.unit:g} of {most}"
            for named, most in tiers
            for name, tier in named.items()
            if tier.used > most * self._sizes.unit
        ]


def _tier(settings: ServingSettings, blocks: int, sizes: BlockSizes) -> SimulatedPool:
    capacity = blocks * sizes.unit
    policy = make_policy(settings.eviction, capacity)
    if sizes.window_blocks:
        policy.keep_to_recency()
    retention = Retention(capacity, settings.retained_share, settings.retained_tenant_share)
    return SimulatedPool(policy, capacity, leaf_first=True, retention=retention)


def _windowed(block: int) -> int:
    """Return the key of the same block in layers with windows."""
    return ~block

"""Simulated pool nodes: blocks in memory and on SSD, under the live pool's own eviction policies.

As in the live pool, a tier evicts a block only after its successors. Blocks evicted from memory stay on SSD, like with
the live node's write-behind, and are promoted again when used.
"""

from collections.abc import Sequence

import numpy as np

from conductor.policy.events import PoolMatches
from kvpool.policy.eviction import RetainRequest, Retention, Use, make_policy
from simulator.pool import SimulatedPool
from simulator.serving.settings import ServingSettings


class SimulatedPools:
    """All pool nodes, one per prefill node."""

    def __init__(self, settings: ServingSettings, names: Sequence[str]) -> None:
        self.roster = tuple(sorted(names))
        self._memory = {name: _tier(settings, settings.pool_blocks) for name in names}
        self._ssd = {name: _tier(settings, settings.ssd_blocks) for name in names if settings.ssd_blocks}
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

    def use(self, name: str, now_ns: int, blocks: Sequence[int]) -> None:
        """Mark the leading blocks that the pool node holds as used: they are read."""
        use = Use(now_ns, len(blocks))
        for tier in self._tiers(name):
            tier.look_up(blocks, use)

    def store(self, name: str, now_ns: int, blocks: Sequence[int], first: int = 0) -> None:
        """Store the prompt's blocks from index `first` on; leading ones that are present are marked as used.

        As on a live node, blocks before `first` were read from a pool node and are not stored again, so that what
        follows them is kept only if this pool node holds them.
        """
        use = Use(now_ns, len(blocks))
        for tier in self._tiers(name):
            tier.store(blocks, max(first, tier.look_up(blocks, use)), use)

    def retain(self, name: str, now_ns: int, blocks: Sequence[int], request: RetainRequest) -> bool:
        """Retain a prefix in all tiers of the pool node. Returns True if its memory retains it."""
        for tier in self._tiers(name)[1:]:
            tier.retain(blocks, now_ns, request)
        return self._memory[name].retain(blocks, now_ns, request)

    def await_use(self, name: str, now_ns: int, blocks: Sequence[int]) -> None:
        """Record that a request which will read these blocks from the pool node is waiting."""
        for tier in self._tiers(name):
            tier.await_use(blocks, now_ns)

    def copied(self, target: str, blocks: Sequence[int], match_key: int) -> None:
        """Record a prefix copied to `target` by a Copy decision."""
        self._copied.setdefault(blocks[-1], {})[target] = match_key

    def drop_copy(self, target: str, match_key: int, keep_blocks: int, blocks: Sequence[int]) -> None:
        """Drop a copied prefix except its first `keep_blocks` blocks; blocks with successors stay."""
        self._copied.get(blocks[-1], {}).pop(target, None)
        for block in reversed(blocks[keep_blocks:]):
            self._memory[target].remove(block)

    def _tiers(self, name: str) -> list[SimulatedPool]:
        return [self._memory[name], *([self._ssd[name]] if name in self._ssd else [])]

    def validate(self, settings: ServingSettings) -> list[str]:
        """Describe the pool nodes that hold more blocks than their capacity."""
        tiers = [(self._memory, settings.pool_blocks), (self._ssd, settings.ssd_blocks)]
        return [
            f"{name} holds {len(tier.present)} blocks of at most {most}"
            for named, most in tiers
            for name, tier in named.items()
            if len(tier.present) > most
        ]


def _tier(settings: ServingSettings, blocks: int) -> SimulatedPool:
    retention = Retention(blocks, settings.retained_share, settings.retained_tenant_share)
    return SimulatedPool(make_policy(settings.eviction, blocks), blocks, leaf_first=True, retention=retention)

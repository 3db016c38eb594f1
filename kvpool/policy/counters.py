"""Counters of the policy core, as shown to operators. Values only increase."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from kvpool.policy.records import DRAM, BlockCopy

_MS = 1_000_000
_BOUNDS_NS = {
    "10ms": 10 * _MS,
    "100ms": 100 * _MS,
    "1s": 1000 * _MS,
    "10s": 10_000 * _MS,
    "1m": 60_000 * _MS,
    "5m": 300_000 * _MS,
    "15m": 900_000 * _MS,
    "1h": 3_600_000 * _MS,
    "6h": 21_600_000 * _MS,
    "1d": 86_400_000 * _MS,
}


class Histogram:
    """Cumulative histogram of durations in fixed buckets; no count ever decreases."""

    _NAMES = tuple(_BOUNDS_NS)
    _BOUNDS = tuple(_BOUNDS_NS.values())

    def __init__(self) -> None:
        self._counts = [0] * (len(self._BOUNDS) + 1)
        self._total_ns = 0

    def add(self, duration_ns: int, count: int = 1) -> None:
        """Count a duration `count` times."""
        self._counts[bisect_left(self._BOUNDS, duration_ns)] += count
        self._total_ns += max(0, duration_ns) * count

    def counters(self, prefix: str) -> dict[str, int]:
        """Return the histogram as counters.

        `{prefix}_le_1s` and so on: the number of durations up to that bound; `{prefix}_count`: the number of all;
        `{prefix}_sum_ms`: their sum.
        """
        found: dict[str, int] = {}
        total = 0
        for name, count in zip(self._NAMES, self._counts, strict=False):
            total += count
            found[f"{prefix}_le_{name}"] = total
        return found | {f"{prefix}_count": total + self._counts[-1], f"{prefix}_sum_ms": self._total_ns // _MS}


EVICTIONS = {
    "room": "a put or a write needed its slots",
    "promotion": "a block loaded from SSD needed its slots",
    "quota": "its namespace reached its quota",
    "slab": "blocks of another size needed its slab",
    "shrunk": "the pool yielded memory",
    "tail": "too many partial blocks followed the same block",
    "asked": "its eviction was requested",
    "flushed": "the pool was flushed",
}
"""Reasons for which a copy leaves a tier, other than corruption."""

LOSSES = {
    "no_ssd": "evicted from DRAM, and there is no SSD tier",
    "unwritten": "evicted from DRAM before it was written to SSD",
    "partial": "a partial block",
    "ssd": "evicted from SSD, and not in DRAM",
}
"""Reasons for which an eviction removed a block from this node."""

_TIERS = ("dram", "ssd")
_NAMES = (
    *("stored_blocks", "no_space_blocks", "aborted_puts", "expired_puts", "expired_leases", "quarantined_blocks"),
    *("evicted_blocks", *(f"evicted_{tier}_{reason}_blocks" for tier in _TIERS for reason in EVICTIONS)),
    *(f"lost_{reason}_blocks" for reason in LOSSES),
    *("lookups", "lookup_blocks", "lookup_waiting_blocks", "lookup_missed_blocks", "lookup_tails"),
    *(f"hit_{tier}_{unit}" for tier in _TIERS for unit in ("blocks", "tokens")),
    *("promoted_blocks", "promoted_unused_blocks", "load_failed_blocks", "ssd_stored_blocks", "ssd_failed_blocks"),
    *("restored_blocks", "ssd_refused_blocks", "ssd_dropped_blocks"),
)


_EVICTED = {
    (tier, reason): f"evicted_{name}_{reason}_blocks" for tier, name in enumerate(_TIERS) for reason in EVICTIONS
}
_LOST = {reason: f"lost_{reason}_blocks" for reason in LOSSES}


class PolicyMetrics:
    """Counters, all present from the start, and histograms."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter(dict.fromkeys(_NAMES, 0))
        self._saved_s = [0.0, 0.0]
        self._evicted_nbytes = [0, 0]
        self._ages = Histogram(), Histogram()
        self._idle = Histogram(), Histogram()
        self._gaps = Histogram()

    def record_eviction(self, copy: BlockCopy, reason: str, now_ns: int | None, loss: str | None) -> None:
        """Count a copy that left its tier for a `reason` of EVICTIONS.

        `loss` is the key of LOSSES if it was the block's last copy. If `now_ns` is given, age and idle time are
        recorded; it is given for evictions that make room.
        """
        counters, tier = self.counters, copy.tier
        counters["evicted_blocks"] += 1
        counters[_EVICTED[tier, reason]] += 1
        self._evicted_nbytes[tier] += copy.nbytes
        if copy.promoted:
            counters["promoted_unused_blocks"] += 1
        if loss is not None:
            counters[_LOST[loss]] += 1
        if now_ns is not None:
            self._ages[tier].add(now_ns - copy.born_ns)
            self._idle[tier].add(now_ns - copy.used_ns)

    def record_lookup(self, num_asked: int, num_waiting: int, hits: Iterable[BlockCopy], now_ns: int) -> None:
        """Count a look-up of `num_asked` blocks, of which `hits` were in DRAM and `num_waiting` on SSD only.

        A copy that was loaded from SSD and not used since is a hit of the SSD tier. Must be called before the hits are
        marked as used.
        """
        found, tokens, saved = [0, 0], [0, 0], self._saved_s
        gap, count = 0, 0
        for copy in hits:
            tier = int(copy.promoted)
            found[tier] += 1
            tokens[tier] += copy.num_tokens or copy.block.namespace.spec.block_tokens
            saved[tier] += copy.cost_s
            if now_ns - copy.used_ns != gap:
                self._gaps.add(gap, count)
                gap, count = now_ns - copy.used_ns, 0
            count += 1
        self._gaps.add(gap, count)
        counters = self.counters
        counters["lookups"] += 1
        counters["lookup_blocks"] += num_asked
        counters["lookup_waiting_blocks"] += num_waiting
        counters["lookup_missed_blocks"] += num_asked - num_waiting - sum(found)
        for tier, name in enumerate(_TIERS):
            counters[f"hit_{name}_blocks"] += found[tier]
            counters[f"hit_{name}_tokens"] += tokens[tier]

    def totals(self) -> dict[str, int]:
        """Return all counters, histograms as cumulative buckets."""
        totals = dict(self.counters)
        totals["lost_blocks"] = sum(totals[name] for name in _LOST.values())
        for tier, name in enumerate(_TIERS):
            totals[f"evicted_{name}_bytes"] = self._evicted_nbytes[tier]
            totals[f"saved_{name}_compute_us"] = int(self._saved_s[tier] * 1e6)
            totals |= self._ages[tier].counters(f"evicted_{name}_age")
            totals |= self._idle[tier].counters(f"evicted_{name}_idle")
        return totals | self._gaps.counters("reuse_gap")


def loss_reason(copy: BlockCopy, has_ssd: bool) -> str:
    """Return the key of LOSSES for a copy that was its block's last one."""
    if copy.tier != DRAM:
        return "ssd"
    if copy.num_tokens:
        return "partial"
    return "unwritten" if has_ssd else "no_ssd"

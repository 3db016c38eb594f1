"""Bookkeeping of copies of hot prefixes: copies in flight, hit counts, and the costs and savings of replicas.

`placement.copying` decides which prefixes are copied.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from math import exp

from conductor.policy.decisions import Copy
from conductor.policy.events import NS, CopyFinished

__all__ = [
    "CopiesInFlight",
    "HitCounts",
    "PrefixExtent",
    "Replica",
    "Replication",
    "SeenShare",
]


@dataclass(frozen=True, slots=True)
class PrefixExtent:
    """A copied prefix in blocks."""

    num_blocks: int
    had_blocks: int  # of these, blocks that the target had before


class CopiesInFlight:
    """Copies in flight, identified by target pool node and key of the prefix's last block; their number is bounded."""

    def __init__(self, max_copies: int, max_per_pool: int) -> None:
        self._max_copies = max_copies
        self._max_per_pool = max_per_pool
        self._under_way: dict[tuple[str, int], tuple[str, PrefixExtent]] = {}  # by (target, match_key), with the source

    def __len__(self) -> int:
        return len(self._under_way)

    def try_begin(self, source: str, target: str, match_key: int, extent: PrefixExtent) -> bool:
        """Record a copy as begun; return False if it is in flight already or would exceed a limit."""
        into_target = sum(pool == target for pool, _ in self._under_way)
        if (
            source == target
            or (target, match_key) in self._under_way
            or len(self._under_way) >= self._max_copies
            or into_target >= self._max_per_pool
        ):
            return False
        self._under_way[target, match_key] = source, extent
        return True

    def end(self, target: str, match_key: int) -> PrefixExtent | None:
        """Record the end of a copy and return its extent; None if it is not in flight."""
        _, extent = self._under_way.pop((target, match_key), ("", None))
        return extent

    def drop_pool(self, pool: str) -> None:
        """Remove the copies from and to a lost pool node."""
        kept = {key: value for key, value in self._under_way.items() if pool not in (value[0], key[0])}
        self._under_way = kept

    def num_sends(self) -> Counter[str]:
        """Return the number of copies that each pool node is sending."""
        return Counter(source for source, _ in self._under_way.values())


_MAX_PREFIXES = 16384


class HitCounts:
    """Exponentially decaying hit counts of a bounded number of prefixes, with time constant `horizon_s`."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_ns = horizon_s * NS
        self._counts: OrderedDict[int, tuple[float, int]] = OrderedDict()  # (count, when), least recently used first

    def use(self, now_ns: int, key: int, weight: float = 1.0) -> float:
        """Count one use, which stands for `weight` uses; return the decayed count, these included."""
        count = self.of(now_ns, key) + weight
        self._counts[key] = count, now_ns
        self._counts.move_to_end(key)
        if len(self._counts) > _MAX_PREFIXES:
            self._counts.popitem(last=False)
        return count

    def of(self, now_ns: int, key: int) -> float:
        """Return the decayed count as of `now_ns`."""
        count, at_ns = self._counts.get(key, (0.0, now_ns))
        return count * exp((at_ns - now_ns) / self._horizon_ns)


class SeenShare:
    """Share of the cluster's requests that this conductor places; others place the rest, whose prefixes it never sees.

    Exponentially decaying counts with time constant `horizon_s`.
    """

    def __init__(self, horizon_s: float) -> None:
        self._horizon_ns = horizon_s * NS
        self._own = self._others = 0.0
        self._at_ns = 0

    def placed_here(self, now_ns: int) -> None:
        """Count a request that this conductor placed."""
        self._decay(now_ns)
        self._own += 1.0

    def placed_elsewhere(self, now_ns: int) -> None:
        """Count a request that a node reports and another conductor placed."""
        self._decay(now_ns)
        self._others += 1.0

    def has_others(self, now_ns: int) -> bool:
        """Return True if another conductor has placed requests lately."""
        self._decay(now_ns)
        return self._others > _FEW_REQUESTS

    @property
    def requests_per_own(self) -> float:
        """Requests of the cluster for each request of this conductor; 1 without another conductor."""
        return 1.0 + min(self._others / max(self._own, 1.0), _MOST_CONDUCTORS)

    def _decay(self, now_ns: int) -> None:
        factor = exp((self._at_ns - now_ns) / self._horizon_ns)
        self._own, self._others, self._at_ns = self._own * factor, self._others * factor, now_ns


_MOST_CONDUCTORS = 16.0
_FEW_REQUESTS = 1.0
_MEMORY = 0.95
_AT_FIRST = 0.5  # assumed probability that a replica is used, before any was observed
_AT_LEAST = 0.02  # lower bound of the estimate; at 0 no copy would be made that could raise it again


@dataclass(slots=True)
class Replica:
    """Prefix that a Copy brought to a pool node."""

    source: str
    target: str
    match_key: int
    extent: PrefixExtent
    used_ns: int  # time of its last use, or of the copy
    num_uses: int = 0


class Replication:
    """Current replicas, and the costs and savings of all replicas so far."""

    def __init__(self, idle_s: float) -> None:
        self.saved_s = 0.0  # predicted TTFT without replicas minus predicted TTFT with them, over all placed requests
        self.spent_s = 0.0  # measured seconds of copying
        self.used_again = _AT_FIRST  # running share of replicas that were used at all
        self._idle_ns = round(idle_s * NS)
        self._replicas: dict[tuple[str, int], Replica] = {}  # by (target, match_key)

    def __len__(self) -> int:
        return len(self._replicas)

    def of(self, pool: str, match_key: int) -> Replica | None:
        """Return the replica at `pool`, or None."""
        return self._replicas.get((pool, match_key))

    def made(self, now_ns: int, copy: Copy | CopyFinished, extent: PrefixExtent) -> None:
        """Record a finished copy, or a fetched prefix that is being kept, as a replica."""
        if isinstance(copy, CopyFinished):
            self.spent_s += copy.seconds
        replica = Replica(copy.source, copy.target, copy.match_key, extent, now_ns)
        self._replicas.setdefault((copy.target, copy.match_key), replica)

    def failed(self, event: CopyFinished) -> None:
        """Record the cost of a copy that failed."""
        self.spent_s += event.seconds

    def use(self, now_ns: int, replica: Replica, saved_s: float) -> None:
        """Record that a placed request uses the replica, which reduces its predicted TTFT by `saved_s`."""
        replica.used_ns = now_ns
        replica.num_uses += 1
        self.saved_s += saved_s

    def take_cold(self, now_ns: int) -> list[Replica]:
        """Remove and return the replicas that were not used for `idle_s`, in the order of their creation."""
        cold = [replica for replica in self._replicas.values() if replica.used_ns + self._idle_ns <= now_ns]
        for replica in cold:
            self._end(replica)
        return cold

    def drop_pool(self, pool: str) -> None:
        """Remove the replicas on a lost pool node, and those copied from it, which are no longer second copies."""
        for replica in [r for r in self._replicas.values() if pool in (r.source, r.target)]:
            self._end(replica)

    def _end(self, replica: Replica) -> None:
        del self._replicas[replica.target, replica.match_key]
        used = 1.0 if replica.num_uses else 0.0
        self.used_again = max(_AT_LEAST, _MEMORY * self.used_again + (1 - _MEMORY) * used)

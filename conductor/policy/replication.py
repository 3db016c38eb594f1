"""Hot-spot copies under way: bounded, never the same one twice. Who is worth copying is Algorithm 1's word.

How often prefixes are used: counts that fade, of a bounded number of prefixes.

Copies of hot prefixes as an investment: what they cost, what they saved, which have gone cold. No placement here.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from math import exp

from conductor.policy.config import NS
from conductor.policy.events import CopyFinished

__all__ = [
    "CopiesInFlight",
    "HitCounts",
    "PrefixExtent",
    "Replica",
    "Replication",
]


@dataclass(frozen=True, slots=True)
class PrefixExtent:
    """A copied prefix in blocks."""

    num_blocks: int
    had_blocks: int  # of these, what the target had before


class CopiesInFlight:
    """In-flight copies, known by (target pool, key of the prefix's last block)."""

    def __init__(self, max_copies: int, max_per_pool: int) -> None:
        self._max_copies = max_copies
        self._max_per_pool = max_per_pool
        self._under_way: dict[tuple[str, int], tuple[str, PrefixExtent]] = {}  # with the source

    def __len__(self) -> int:
        return len(self._under_way)

    def try_begin(self, source: str, target: str, match_key: int, extent: PrefixExtent) -> bool:
        """Note a copy as begun; False when it runs already or would be one too many."""
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
        """Note its end. None when it is not known (any more)."""
        _, extent = self._under_way.pop((target, match_key), ("", None))
        return extent

    def drop_pool(self, pool: str) -> None:
        """A pool node is lost, and with it the copies from and to it."""
        kept = {key: value for key, value in self._under_way.items() if pool not in (value[0], key[0])}
        self._under_way = kept

    def num_sends(self) -> Counter[str]:
        """Copies that each pool node sends."""
        return Counter(source for source, _ in self._under_way.values())


_MAX_PREFIXES = 16384


class HitCounts:
    """Uses per prefix within about `horizon_s`: each counts 1 when it happens and fades by e every horizon."""

    def __init__(self, horizon_s: float) -> None:
        self._horizon_ns = horizon_s * NS
        self._counts: OrderedDict[int, tuple[float, int]] = OrderedDict()  # (count, when), least recently used first

    def use(self, now_ns: int, key: int) -> float:
        """Count one use; returns the uses within the horizon, this one included."""
        count = self.of(now_ns, key) + 1.0
        self._counts[key] = count, now_ns
        self._counts.move_to_end(key)
        if len(self._counts) > _MAX_PREFIXES:
            self._counts.popitem(last=False)
        return count

    def of(self, now_ns: int, key: int) -> float:
        """Uses within the horizon, as of now."""
        count, at_ns = self._counts.get(key, (0.0, now_ns))
        return count * exp((at_ns - now_ns) / self._horizon_ns)


_MEMORY = 0.95
_AT_FIRST = 0.5  # how likely a copied prefix is taken to be used again, before anything was seen
_AT_LEAST = 0.02  # never 0: then no copy would ever be made that could show the contrary


@dataclass(slots=True)
class Replica:
    """A prefix that a Copy brought to a pool node."""

    source: str
    target: str
    match_key: int
    extent: PrefixExtent
    used_ns: int  # last, or when it came
    num_uses: int = 0


class Replication:
    """Every replica that is still counted as one, and the account of all."""

    def __init__(self, idle_s: float) -> None:
        self.saved_s = 0.0  # predicted TTFT without replicas less predicted TTFT with them, over all placed requests
        self.spent_s = 0.0  # measured seconds of copying
        self.used_again = _AT_FIRST  # share of replicas that were used at all, as lately seen
        self._idle_ns = round(idle_s * NS)
        self._replicas: dict[tuple[str, int], Replica] = {}  # by (target, match_key)

    def __len__(self) -> int:
        return len(self._replicas)

    def of(self, pool: str, match_key: int) -> Replica | None:
        """The replica at `pool`, if it is one."""
        return self._replicas.get((pool, match_key))

    def made(self, now_ns: int, event: CopyFinished, extent: PrefixExtent) -> None:
        """A copy is done and has brought something."""
        self.spent_s += event.seconds
        replica = Replica(event.source, event.target, event.match_key, extent, now_ns)
        self._replicas.setdefault((event.target, event.match_key), replica)

    def failed(self, event: CopyFinished) -> None:
        """A copy brought nothing, and took its time."""
        self.spent_s += event.seconds

    def use(self, now_ns: int, replica: Replica, saved_s: float) -> None:
        """A request was placed where the replica is, and is predicted to be so much sooner for it."""
        replica.used_ns = now_ns
        replica.num_uses += 1
        self.saved_s += saved_s

    def take_cold(self, now_ns: int) -> list[Replica]:
        """Those that have not been used for long are no replicas any more; the oldest first."""
        cold = [replica for replica in self._replicas.values() if replica.used_ns + self._idle_ns <= now_ns]
        for replica in cold:
            self._end(replica)
        return cold

    def drop_pool(self, pool: str) -> None:
        """A pool node is lost, and with it the replicas there. What came from it is no second copy any more."""
        for replica in [r for r in self._replicas.values() if pool in (r.source, r.target)]:
            self._end(replica)

    def _end(self, replica: Replica) -> None:
        del self._replicas[replica.target, replica.match_key]
        used = 1.0 if replica.num_uses else 0.0
        self.used_again = max(_AT_LEAST, _MEMORY * self.used_again + (1 - _MEMORY) * used)

"""Activity of a cluster over the last minute, computed from samples of the conductor's replies. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from moonpool.cluster_view.reply import directory_state, is_pool, samples
from moonpool.cluster_view.status import ClusterStatus, cluster_status
from moonpool.supervision.ready_file import ReadyFile
from moonpool_proto.v1 import conductor_pb2

WINDOW_S: Final = 60.0
_COUNTED: Final = ("prompt_tokens", "cached_tokens", "generation_tokens")
_COUNTED_OF_POOLS: Final = ("pool_lookup_blocks", "pool_hit_dram_blocks", "pool_hit_ssd_blocks", "pool_evicted_blocks")
_TIERS: Final = {
    "DRAM": ("pool_used_bytes", "pool_capacity_bytes"),
    "SSD": ("pool_ssd_used_bytes", "pool_ssd_capacity_bytes"),
}

Labels = tuple[tuple[str, str], ...]
CounterKey = tuple[str, Labels]
K = TypeVar("K")


@dataclass(frozen=True)
class ClusterSample:
    """A conductor's reply, and its time by a monotonic clock in seconds."""

    at_s: float
    reply: conductor_pb2.ClusterReply


@dataclass(frozen=True)
class WindowAttainment:
    """Requests in the window that had an objective."""

    model: str
    slo_class: str
    objective: str  # "ttft", "tbt" or "all": both at once
    met: int
    judged: int


@dataclass(frozen=True)
class TierUsage:
    """Used and total bytes of one tier of a pool node."""

    used: int
    capacity: int


@dataclass(frozen=True)
class PoolUsage:
    """One pool node; `found_share` is the hit rate of the blocks requested in the window, None without requests."""

    node: str
    tiers: Mapping[str, TierUsage]  # "DRAM", "SSD"; only those that exist
    found_share: float | None
    evicted_blocks: int  # in the window
    directory: str  # "EXACT", "DEGRADED", or "" if the conductor does not follow it


@dataclass(frozen=True)
class ClusterActivity:
    """Activity of the cluster over the last `window_s` seconds; rates are per second."""

    status: ClusterStatus
    window_s: float
    running: int
    waiting: int
    prompt_rate: float
    generated_rate: float
    reused_share: float | None  # of the prompt tokens in the window
    loads: Mapping[tuple[str, str], float]  # by model and phase; above 1 is overload
    attained: tuple[WindowAttainment, ...]
    rejected: Mapping[str, int]  # in the window, by reason, of all models
    pools: tuple[PoolUsage, ...]
    prompt_rates: tuple[float, ...]  # one for each interval, oldest first
    generated_rates: tuple[float, ...]


@dataclass(frozen=True)
class SampleInterval:
    """Counter increments between two samples."""

    seconds: float
    counted: Counter[str]  # of all nodes
    of_nodes: Mapping[str, Counter[str]]  # of each pool node
    conductor: Counter[CounterKey]  # the conductor's own counters

    def rate(self, name: str) -> float:
        """Return the increments of a counter per second."""
        return self.counted[name] / self.seconds if self.seconds > 0 else 0.0


class ActivityHistory:
    """The intervals between the samples of the last `window_s` seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._last: ClusterSample | None = None
        self._intervals: deque[SampleInterval] = deque()

    def add(self, look: ClusterSample, ready: ReadyFile | None) -> ClusterActivity:
        """Add a sample, in order of time, and return the activity; after the first one, all rates are 0."""
        if self._last is not None:
            self._intervals.append(interval_between(self._last, look))
        self._last = look
        while len(self._intervals) > 1 and sum(interval.seconds for interval in self._intervals) > self._window_s:
            self._intervals.popleft()
        return _figures(look.reply, tuple(self._intervals), cluster_status(look.reply, ready))


def interval_between(before: ClusterSample, after: ClusterSample) -> SampleInterval:
    """Return the increments; counters of a node or conductor that restarted in between start from 0."""
    old = {item.node.node_id: item for item in before.reply.nodes}
    counted: Counter[str] = Counter()
    of_nodes: dict[str, Counter[str]] = {}
    for item in after.reply.nodes:
        was = old.get(item.node.node_id)
        if was is None:  # its counters before it was first seen do not belong here
            continue
        if is_pool(item):
            of_nodes[item.node.node_id] = _increments(was, item, _COUNTED_OF_POOLS)
        else:
            counted.update(_increments(was, item, _COUNTED))
    return SampleInterval(after.at_s - before.at_s, counted, of_nodes, _conductor_increments(before.reply, after.reply))


def _figures(
    reply: conductor_pb2.ClusterReply, intervals: tuple[SampleInterval, ...], status: ClusterStatus
) -> ClusterActivity:
    window_s = sum(interval.seconds for interval in intervals)
    counted = _sum(interval.counted for interval in intervals)
    counts = _sum(interval.conductor for interval in intervals)
    prompt = counted["prompt_tokens"]
    return ClusterActivity(
        status=status,
        window_s=window_s,
        running=sum(row.running or 0 for row in status.nodes),
        waiting=sum(row.waiting or 0 for row in status.nodes),
        prompt_rate=prompt / window_s if window_s else 0.0,
        generated_rate=counted["generation_tokens"] / window_s if window_s else 0.0,
        reused_share=counted["cached_tokens"] / prompt if prompt else None,
        loads={(each.labels["model_name"], each.labels["phase"]): each.value for each in samples(reply, "load")},
        attained=_attained(counts),
        rejected=_rejected(counts),
        pools=_pools(reply, intervals),
        prompt_rates=tuple(interval.rate("prompt_tokens") for interval in intervals),
        generated_rates=tuple(interval.rate("generation_tokens") for interval in intervals),
    )


def _attained(counts: Mapping[CounterKey, int]) -> tuple[WindowAttainment, ...]:
    met: Counter[tuple[str, str, str]] = Counter()
    judged: Counter[tuple[str, str, str]] = Counter()
    for (name, labels), count in counts.items():
        if name == "slo_requests_total":
            of = dict(labels)
            key = (of["model_name"], of["slo_class"], of["objective"])
            judged[key] += count
            met[key] += count if of["result"] == "met" else 0
    return tuple(WindowAttainment(*key, met[key], judged[key]) for key in sorted(judged))


def _rejected(counts: Mapping[CounterKey, int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (name, labels), count in counts.items():
        if name == "admission_rejected_total":
            found[dict(labels)["reason"]] += count
    return dict(sorted(found.items()))


def _pools(reply: conductor_pb2.ClusterReply, intervals: tuple[SampleInterval, ...]) -> tuple[PoolUsage, ...]:
    rows = []
    for item in reply.nodes:
        if not is_pool(item):
            continue
        node, now = item.node.node_id, item.report.counters
        grown = _sum(interval.of_nodes[node] for interval in intervals if node in interval.of_nodes)
        asked, found = grown["pool_lookup_blocks"], grown["pool_hit_dram_blocks"] + grown["pool_hit_ssd_blocks"]
        tiers = {
            name: TierUsage(int(now[used]), int(now[size])) for name, (used, size) in _TIERS.items() if now.get(size)
        }
        share = found / asked if asked else None
        rows.append(PoolUsage(node, tiers, share, grown["pool_evicted_blocks"], directory_state(reply, node)))
    return tuple(rows)


def _increments(
    before: conductor_pb2.NodeStatus, after: conductor_pb2.NodeStatus, names: Iterable[str]
) -> Counter[str]:
    is_same = before.node.incarnation == after.node.incarnation
    was: Mapping[str, float] = before.report.counters if is_same else {}
    now = after.report.counters
    return Counter({name: max(0, round(now.get(name, 0.0) - was.get(name, 0.0))) for name in names})


def _conductor_increments(before: conductor_pb2.ClusterReply, after: conductor_pb2.ClusterReply) -> Counter[CounterKey]:
    is_same = before.conductor_incarnation == after.conductor_incarnation
    was = _counters(before) if is_same else {}
    return Counter({key: max(0, round(value - was.get(key, 0.0))) for key, value in _counters(after).items()})


def _counters(reply: conductor_pb2.ClusterReply) -> dict[CounterKey, float]:
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value
        for each in samples(reply, "slo_requests_total", "admission_rejected_total")
    }


def _sum(counters: Iterable[Counter[K]]) -> Counter[K]:
    total: Counter[K] = Counter()
    for each in counters:
        total.update(each)
    return total

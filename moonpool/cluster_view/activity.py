"""What `moonpool top` shows, from several looks at a cluster: what is there now, and what happened in between. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from moonpool.cluster_view.status import ClusterStatus, cluster_status
from moonpool.supervision.ready_file import ReadyFile
from moonpool_proto.v1 import common_pb2, conductor_pb2

WINDOW_S: Final = 60.0
_DIRECTORY: Final = {1.0: "EXACT", 0.0: "DEGRADED"}
_COUNTED: Final = ("prompt_tokens", "cached_tokens", "generation_tokens")
_COUNTED_OF_POOLS: Final = ("pool_lookup_blocks", "pool_hit_dram_blocks", "pool_hit_ssd_blocks", "pool_evicted_blocks")
_TIERS: Final = {
    "DRAM": ("pool_used_bytes", "pool_capacity_bytes"),
    "SSD": ("pool_ssd_used_bytes", "pool_ssd_capacity_bytes"),
}

Labels = tuple[tuple[str, str], ...]
Told = tuple[str, Labels]
K = TypeVar("K")


@dataclass(frozen=True)
class Look:
    """What the conductor told, and when, in seconds of a clock that never goes back."""

    at_s: float
    reply: conductor_pb2.ClusterReply


@dataclass(frozen=True)
class Attained:
    """Requests that had an objective, in the window."""

    model: str
    slo_class: str
    objective: str  # "ttft", "tbt" or "all": both at once
    met: int
    judged: int


@dataclass(frozen=True)
class Tier:
    """One tier of a pool node's. Bytes."""

    used: int
    capacity: int


@dataclass(frozen=True)
class PoolRow:
    """One pool node; `found_share`: of the blocks asked for in the window, None where nobody asked."""

    node: str
    tiers: Mapping[str, Tier]  # "DRAM", "SSD"; those that it has
    found_share: float | None
    evicted_blocks: int  # in the window
    directory: str  # "EXACT", "DEGRADED", or "" where the conductor does not follow it


@dataclass(frozen=True)
class TopFigures:
    """The cluster over the last `window_s` seconds; rates are per second."""

    status: ClusterStatus
    window_s: float
    running: int
    waiting: int
    prompt_rate: float
    generated_rate: float
    reused_share: float | None  # of the prompt tokens in the window
    loads: Mapping[tuple[str, str], float]  # by model and phase; above 1 is too much
    attained: tuple[Attained, ...]
    rejected: Mapping[str, int]  # in the window, by reason, of all models
    pools: tuple[PoolRow, ...]
    prompt_rates: tuple[float, ...]  # between each two looks, oldest first
    generated_rates: tuple[float, ...]


@dataclass(frozen=True)
class Step:
    """What happened between two looks."""

    seconds: float
    counted: Counter[str]  # of all nodes
    of_nodes: Mapping[str, Counter[str]]  # of each pool node
    told: Counter[Told]  # the conductor's own counters

    def rate(self, name: str) -> float:
        """Per second."""
        return self.counted[name] / self.seconds if self.seconds > 0 else 0.0


class History:
    """The looks of the last `window_s` seconds, as what happened between them."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._last: Look | None = None
        self._steps: deque[Step] = deque()

    def add(self, look: Look, ready: ReadyFile | None) -> TopFigures:
        """What is to be shown now. Looks come in their order; with the first alone nothing has happened yet."""
        if self._last is not None:
            self._steps.append(step_between(self._last, look))
        self._last = look
        while len(self._steps) > 1 and sum(step.seconds for step in self._steps) > self._window_s:
            self._steps.popleft()
        return _figures(look.reply, tuple(self._steps), cluster_status(look.reply, ready))


def step_between(before: Look, after: Look) -> Step:
    """Counters of a node, or a conductor, that began anew in between count from nothing."""
    old = {item.node.node_id: item for item in before.reply.nodes}
    counted: Counter[str] = Counter()
    of_nodes: dict[str, Counter[str]] = {}
    for item in after.reply.nodes:
        was = old.get(item.node.node_id)
        if was is None:  # what it did before it was first seen did not happen now
            continue
        if item.node.role == common_pb2.ROLE_POOL:
            of_nodes[item.node.node_id] = _grown(was, item, _COUNTED_OF_POOLS)
        else:
            counted.update(_grown(was, item, _COUNTED))
    return Step(after.at_s - before.at_s, counted, of_nodes, _newly_told(before.reply, after.reply))


def _figures(reply: conductor_pb2.ClusterReply, steps: tuple[Step, ...], status: ClusterStatus) -> TopFigures:
    window_s = sum(step.seconds for step in steps)
    counted = _sum(step.counted for step in steps)
    told = _sum(step.told for step in steps)
    prompt = counted["prompt_tokens"]
    loads = [each for each in reply.samples if each.name == "load"]
    return TopFigures(
        status=status,
        window_s=window_s,
        running=sum(row.running or 0 for row in status.nodes),
        waiting=sum(row.waiting or 0 for row in status.nodes),
        prompt_rate=prompt / window_s if window_s else 0.0,
        generated_rate=counted["generation_tokens"] / window_s if window_s else 0.0,
        reused_share=counted["cached_tokens"] / prompt if prompt else None,
        loads={(each.labels["model_name"], each.labels["phase"]): each.value for each in loads},
        attained=_attained(told),
        rejected=_rejected(told),
        pools=_pools(reply, steps),
        prompt_rates=tuple(step.rate("prompt_tokens") for step in steps),
        generated_rates=tuple(step.rate("generation_tokens") for step in steps),
    )


def _attained(told: Mapping[Told, int]) -> tuple[Attained, ...]:
    met: Counter[tuple[str, str, str]] = Counter()
    judged: Counter[tuple[str, str, str]] = Counter()
    for (name, labels), count in told.items():
        if name == "slo_requests_total":
            of = dict(labels)
            key = (of["model_name"], of["slo_class"], of["objective"])
            judged[key] += count
            met[key] += count if of["result"] == "met" else 0
    return tuple(Attained(*key, met[key], judged[key]) for key in sorted(judged))


def _rejected(told: Mapping[Told, int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (name, labels), count in told.items():
        if name == "admission_rejected_total":
            found[dict(labels)["reason"]] += count
    return dict(sorted(found.items()))


def _pools(reply: conductor_pb2.ClusterReply, steps: tuple[Step, ...]) -> tuple[PoolRow, ...]:
    exact = {each.labels["node"]: each.value for each in reply.samples if each.name == "directory_exact"}
    rows = []
    for item in reply.nodes:
        if item.node.role != common_pb2.ROLE_POOL:
            continue
        node, now = item.node.node_id, item.report.counters
        grown = _sum(step.of_nodes[node] for step in steps if node in step.of_nodes)
        asked, found = grown["pool_lookup_blocks"], grown["pool_hit_dram_blocks"] + grown["pool_hit_ssd_blocks"]
        tiers = {name: Tier(int(now[used]), int(now[size])) for name, (used, size) in _TIERS.items() if now.get(size)}
        share = found / asked if asked else None
        directory = _DIRECTORY.get(exact.get(node, -1.0), "")
        rows.append(PoolRow(node, tiers, share, grown["pool_evicted_blocks"], directory))
    return tuple(rows)


def _grown(before: conductor_pb2.NodeStatus, after: conductor_pb2.NodeStatus, names: Iterable[str]) -> Counter[str]:
    is_same = before.node.incarnation == after.node.incarnation
    was: Mapping[str, float] = before.report.counters if is_same else {}
    now = after.report.counters
    return Counter({name: max(0, round(now.get(name, 0.0) - was.get(name, 0.0))) for name in names})


def _newly_told(before: conductor_pb2.ClusterReply, after: conductor_pb2.ClusterReply) -> Counter[Told]:
    is_same = before.conductor_incarnation == after.conductor_incarnation
    was = _counters(before) if is_same else {}
    return Counter({key: max(0, round(value - was.get(key, 0.0))) for key, value in _counters(after).items()})


def _counters(reply: conductor_pb2.ClusterReply) -> dict[Told, float]:
    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value
        for each in reply.samples
        if each.name in ("slo_requests_total", "admission_rejected_total")
    }


def _sum(counters: Iterable[Counter[K]]) -> Counter[K]:
    total: Counter[K] = Counter()
    for each in counters:
        total.update(each)
    return total

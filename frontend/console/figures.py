"""The console's figures, computed from the cluster's state and the conductors' overviews. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

from moonpool_proto.v1 import common_pb2, conductor_pb2
from rpc.metric_samples import role_name

Json = Mapping[str, Any]
ALL = ""  # key of all models together


@dataclass(slots=True)
class ConsoleCounts:
    """Counts of requests of one model, or of all. Durations are counted by bucket value, in seconds."""

    arrived: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    ttft: Counter[float] = field(default_factory=Counter)
    tbt: Counter[float] = field(default_factory=Counter)
    attained: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (class, objective, result)

    def add(self, flow: Json) -> None:
        """Add one conductor's counts."""
        self.arrived += flow["arrived"]
        self.prompt_tokens += flow["prompt_tokens"]
        self.cached_tokens += flow["cached_tokens"]
        self.generated += flow["generated"]
        self.rejected.update(flow["rejected"])
        self.ended.update(flow["ended"])
        self.ttft.update(dict(flow["ttft"]))
        self.tbt.update(dict(flow["tbt"]))
        self.attained.update({(a, b, c): count for a, b, c, count in flow["attained"]})

    def include(self, other: "ConsoleCounts") -> None:
        """Add another object's counts."""
        self.arrived += other.arrived
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.generated += other.generated
        for name in ("rejected", "ended", "ttft", "tbt", "attained"):
            getattr(self, name).update(getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        """Return JSON data with quantiles instead of counted durations; None without measurements."""
        return {
            "arrived": self.arrived,
            "rejected": sum(self.rejected.values()),
            "finished": self.ended["finished"],
            "generated": self.generated,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft": [quantile_s(self.ttft, share) for share in (0.5, 0.95)],
            "tbt": [quantile_s(self.tbt, share) for share in (0.5, 0.95)],
        }


@dataclass(slots=True)
class ConsoleSlice:
    """Counts of a slice of time by model; `ALL` has all models together."""

    number: int  # index of the slice since 1970
    flows: dict[str, ConsoleCounts] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for the page."""
        return {"number": self.number, "models": {model: flow.to_json() for model, flow in self.flows.items()}}


def merged_slices(overviews: Sequence[Json]) -> list[ConsoleSlice]:
    """Merge the conductors' slices, oldest first. They begin at different times and are aligned by their start."""
    found: dict[int, ConsoleSlice] = {}
    for overview in overviews:
        for each in overview["slices"]:
            number = int(each["at_s"] // overview["slice_s"])
            merged = found.setdefault(number, ConsoleSlice(number))
            for model, flow in each["flows"].items():
                merged.flows.setdefault(ALL, ConsoleCounts()).add(flow)
                if model != ALL:  # requests for models that are not served have this key
                    merged.flows.setdefault(model, ConsoleCounts()).add(flow)
    return [found[number] for number in sorted(found)]


def window(slices: Iterable[ConsoleSlice]) -> dict[str, Any]:
    """Return the sum of all slices by model: quantiles, rejections by reason, attainment of objectives."""
    flows: dict[str, ConsoleCounts] = {}
    for each in slices:
        for model, flow in each.flows.items():
            flows.setdefault(model, ConsoleCounts()).include(flow)
    return {
        model: {
            **flow.to_json(),
            "ended": dict(flow.ended),
            "reasons": dict(flow.rejected.most_common()),
            "attained": [[*key, count] for key, count in sorted(flow.attained.items())],
        }
        for model, flow in sorted(flows.items())
    }


def quantile_s(counted: Mapping[float, int], share: float) -> float | None:
    """Return the `share` quantile of counted durations in seconds; None if there are none."""
    left = share * sum(counted.values())
    for seconds, count in sorted(counted.items()):
        left -= count
        if left <= 0:
            return seconds
    return None


_NEWEST: Final = 100  # number of recent requests, over all conductors
_SESSIONS: Final = 40  # over all conductors
_TURNS: Final = 12  # of a session


def cluster_figures(reply: conductor_pb2.ClusterReply, overviews: Sequence[Json]) -> dict[str, Any]:
    """Return the current state: nodes, pool and directory."""
    loads = {node_id: load for overview in overviews for node_id, load in overview["workers"].items()}
    return {
        "nodes": [_node(status, loads.get(status.node.node_id, {})) for status in reply.nodes],
        "pool": _pool(reply),
        "ready_models": sorted(reply.ready_models),
    }


def past_figures(overviews: Sequence[Json], now_s: float) -> dict[str, Any]:
    """Return the figures of the last minutes over all conductors; the objectives are the first conductor's."""
    slices = merged_slices(overviews)
    first: Json = overviews[0] if overviews else {}
    requests = [one for overview in overviews for one in (*overview["requests"], *overview.get("refused", ()))]
    hot: Counter[tuple[str, int]] = Counter()
    for overview in overviews:
        hot.update({(each["key"], each["blocks"]): each["uses"] for each in overview["hottest"]})
    return {
        "slice_s": first.get("slice_s", 10.0),
        "slices": [each.to_json() for each in slices],
        "window": window(slices),
        "objectives": first.get("objectives", []),
        "slo": first.get("slo"),
        "requests": sorted(requests, key=lambda one: -_at_s(one))[:_NEWEST],
        "sessions": merged_sessions(overviews),
        "tenants": tenant_usage(overviews),
        "hottest": [{"key": key, "blocks": blocks, "uses": uses} for (key, blocks), uses in hot.most_common(10)],
        "now_s": now_s,
    }


def merged_sessions(overviews: Sequence[Json]) -> list[dict[str, Any]]:
    """Return the sessions with the latest requests over all conductors, any of which may have placed their turns."""
    found: dict[str, dict[str, Any]] = {}
    for each in (session for overview in overviews for session in overview.get("sessions", ())):
        known = found.get(each["session"])
        if known is None:
            found[each["session"]] = dict(each)
            continue
        known["parent"] = known["parent"] or each["parent"]
        known["first_at_s"] = min(known["first_at_s"], each["first_at_s"])
        known["num_turns"] += each["num_turns"]
        known["turns"] = sorted([*known["turns"], *each["turns"]], key=_at_s)[-_TURNS:]
    return sorted(found.values(), key=lambda session: -_at_s(session["turns"][-1]))[:_SESSIONS]


def tenant_usage(overviews: Sequence[Json]) -> list[dict[str, Any]]:
    """Return the usage of each tenant of each model, summed over all conductors."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for each in (usage for overview in overviews for usage in overview.get("tenants", ())):
        known = found.get((each["model"], each["tenant"]))
        if known is None:
            found[each["model"], each["tenant"]] = dict(each)
            continue
        for name in ("requests", "computed_tokens", "reused_tokens", "generated_tokens", "kv_block_s"):
            known[name] += each[name]
    return [found[key] for key in sorted(found)]


def _at_s(one: Json) -> float:
    return float(one["at_s"])


def _node(status: conductor_pb2.NodeStatus, load: Json) -> dict[str, Any]:
    node, report = status.node, status.report
    return {
        "id": node.node_id,
        "role": role_name(node.role),
        "model": node.model,
        "host": node.host_id,
        "target": node.target,
        "engine": node.engine,
        "state": _state(status, load),
        "running": report.num_running,
        "waiting": report.num_waiting,
        "queue_s": load.get("queue_s"),
        "capacity_tokens": node.capacity_tokens,
        "free_tokens": report.free_tokens,
        "committed_tokens": load.get("committed_tokens"),
        "max_batch": node.max_batch,
        "pool_node": node.pool_node_id,
    }


def _state(status: conductor_pb2.NodeStatus, load: Json) -> str:
    """Return the node's most important state."""
    if status.suspect:
        return "suspect"
    if status.report.draining or load.get("is_leaving"):
        return "draining"
    return "switching" if load.get("is_to_switch") else "ready"


_PROMPTS: Final = ("prompt_tokens", "cached_tokens", "cached_dram_tokens", "cached_ssd_tokens", "cached_remote_tokens")


def _pool(reply: conductor_pb2.ClusterReply) -> dict[str, Any]:
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for status in reply.nodes:
        if status.node.role != common_pb2.ROLE_POOL:
            for name in _PROMPTS:
                totals[status.node.model][name] += _count(status.report.counters, name)
    exact = _directory(reply.samples)
    nodes = [_pool_node(status, exact) for status in reply.nodes if status.node.role == common_pb2.ROLE_POOL]
    known = [node["directory"] for node in nodes if node["directory"]]
    return {
        "nodes": nodes,
        "directory": "" if not known else "DEGRADED" if "DEGRADED" in known else "EXACT",
        **_prompts(sum(totals.values(), Counter())),
        "models": {model: _prompts(counts) for model, counts in sorted(totals.items())},
    }


def _prompts(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return prompt tokens and the sources of those that were reused, as the workers count them."""
    tiers = {tier: counts[f"cached_{tier}_tokens"] for tier in ("dram", "ssd", "remote")}
    pages = max(0, counts["cached_tokens"] - sum(tiers.values()))
    return {"prompt_tokens": counts["prompt_tokens"], "reused_tokens": {"pages": pages, **tiers}}


def _directory(samples: Iterable[conductor_pb2.Sample]) -> dict[str, str]:
    return {
        sample.labels["node"]: "EXACT" if sample.value else "DEGRADED"
        for sample in samples
        if sample.name == "directory_exact" and "node" in sample.labels
    }


def _pool_node(status: conductor_pb2.NodeStatus, directory: Mapping[str, str]) -> dict[str, Any]:
    """Return one pool node's report since its start."""
    counters, node_id = status.report.counters, status.node.node_id
    tiers = {
        "memory": _tier(counters, "dram", "pool_used_bytes", "pool_capacity_bytes", "pool_held_blocks"),
        "ssd": _tier(counters, "ssd", "pool_ssd_used_bytes", "pool_ssd_capacity_bytes", "pool_ssd_held_blocks"),
    }
    return {
        "id": node_id,
        "state": _state(status, {}),
        "directory": directory.get(node_id, ""),
        "tiers": {name: tier for name, tier in tiers.items() if tier["capacity_bytes"]},
        "asked_blocks": _count(counters, "pool_lookup_blocks"),
        "leases": _count(counters, "pool_leases_open"),
    }


def _tier(counters: Mapping[str, float], tier: str, used: str, capacity: str, blocks: str) -> dict[str, Any]:
    return {
        "used_bytes": _count(counters, used),
        "capacity_bytes": _count(counters, capacity),
        "blocks": _count(counters, blocks),
        "hit_blocks": _count(counters, f"pool_hit_{tier}_blocks"),
        "evicted_blocks": dict(_evicted(counters, f"pool_evicted_{tier}_")),
    }


def _evicted(counters: Mapping[str, float], start: str) -> Iterator[tuple[str, int]]:
    """Yield evicted blocks by reason."""
    for name, value in sorted(counters.items()):
        if name.startswith(start) and name.endswith("_blocks") and value:
            yield name.removeprefix(start).removesuffix("_blocks"), int(_finite(value))


def _count(counters: Mapping[str, float], name: str) -> int:
    # Indexing a protobuf map would create missing entries
    return int(_finite(counters[name])) if name in counters else 0


def _finite(value: float) -> float:
    # A node may report any float; JSON has no infinity or NaN.
    return value if isfinite(value) else 0.0

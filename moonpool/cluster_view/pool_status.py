"""What `moonpool pool status` tells: figures of each pool node and of all, from what nodes and conductor say. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from moonpool_proto.v1 import common_pb2, conductor_pb2
from telemetry.histograms import histogram_of

__all__ = ["PoolNodeFigures", "PoolStatus", "TierFigures", "is_pool", "node_figures", "pool_status", "silent_node"]

TIERS: Final = ("dram", "ssd")
_SSD_ERRORS: Final = ("ssd_read_errors", "ssd_write_errors", "ssd_full_errors", "ssd_corrupt_blocks")


@dataclass(frozen=True)
class TierFigures:
    """One tier of one node. Ages and seconds saved are None where nothing was evicted, or there is no such tier."""

    capacity_bytes: int
    used_bytes: int
    blocks: int
    hit_blocks: int
    hit_tokens: int
    saved_s: float  # what computing the blocks found had taken
    evicted_blocks: dict[str, int]  # by reason; those that are 0 are left out
    evicted_age_p50_s: float | None  # since it was stored, when evicted for room


@dataclass(frozen=True)
class PoolNodeFigures:
    """One pool node since its start. `problem`: why it could not be asked; what only it can tell is not known then."""

    node_id: str
    address: str
    state: str  # "ready", "draining" or "silent", as the conductor sees it
    directory: str  # "EXACT", "DEGRADED" or "" where the conductor does not follow it
    directory_blocks: int | None
    problem: str = ""
    tiers: dict[str, TierFigures] = field(default_factory=dict)
    asked_blocks: int = 0  # the denominator: = hits of both tiers + waiting + missed
    waiting_blocks: int = 0  # on SSD, and not in memory in time
    missed_blocks: int = 0
    hit_rate: float | None = None  # of the blocks asked for, those that were found in memory in time
    reuse_gap_p50_s: float | None = None
    lost_blocks: dict[str, int] = field(default_factory=dict)  # by reason
    loaded_blocks: int = 0
    load_timeouts: int = 0
    loading_blocks: int = 0
    written_blocks: int = 0
    unwritten_blocks: int | None = None  # in memory and not on SSD: the backlog; None without an SSD
    ssd_state: str = ""  # "ok", "read_only", "failed"; "" without one
    ssd_folder: str = ""
    ssd_errors: dict[str, int] = field(default_factory=dict)
    corrupt_blocks: int = 0  # in memory, on SSD, or in a copy from another node
    leases: int = 0
    puts: int = 0
    namespaces: dict[str, int] = field(default_factory=dict)  # blocks by KV namespace: one per model and storage
    memory_pages: str = ""  # what kind of pages the memory is made of
    door: str = ""  # the socket for processes of its host; "": none


@dataclass(frozen=True)
class PoolStatus:
    """All pool nodes; tokens of prompts by where their KV came from, as the workers count them; copies of prefixes."""

    nodes: tuple[PoolNodeFigures, ...]
    prompt_tokens: int
    reused_tokens: dict[str, int]  # "pages" (the worker's own), "dram", "ssd", "remote"
    replicas: int
    replication_saved_s: float
    replication_spent_s: float

    def to_json(self) -> dict[str, Any]:
        """As `pool status --json` prints it."""
        return asdict(self)

    def troubles(self) -> list[str]:
        """What needs a look."""
        found = []
        for node in self.nodes:
            if node.problem:
                found.append(f"{node.node_id} does not answer: {node.problem}")
                continue
            if node.ssd_state not in ("", "ok"):
                found.append(f"{node.node_id}: the SSD in {node.ssd_folder} is {node.ssd_state}")
            if node.directory == "DEGRADED":
                found.append(f"{node.node_id}: the conductor does not know all that it holds")
            if node.corrupt_blocks:
                found.append(f"{node.node_id}: {node.corrupt_blocks} damaged blocks were taken out")
        return found


def pool_status(reply: conductor_pb2.ClusterReply, nodes: Sequence[PoolNodeFigures]) -> PoolStatus:
    """Of the cluster as the conductor tells it and of its nodes."""
    totals: dict[str, float] = {}
    for item in reply.nodes:
        for name, value in item.report.counters.items():
            totals[name] = totals.get(name, 0.0) + value
    tiers = {tier: int(totals.get(f"cached_{tier}_tokens", 0)) for tier in ("dram", "ssd", "remote")}
    pages = int(totals.get("cached_tokens", 0)) - sum(tiers.values())
    told = {sample.name: sample.value for sample in reply.samples if not sample.labels}
    return PoolStatus(
        nodes=tuple(nodes),
        prompt_tokens=int(totals.get("prompt_tokens", 0)),
        reused_tokens={"pages": pages, **tiers},
        replicas=int(told.get("replicas", 0)),
        replication_saved_s=told.get("replication_saved_seconds_total", 0.0),
        replication_spent_s=told.get("replication_spent_seconds_total", 0.0),
    )


def node_figures(
    item: conductor_pb2.NodeStatus, reply: conductor_pb2.ClusterReply, state: Mapping[str, Any]
) -> PoolNodeFigures:
    """Of one node, from the conductor's word on it and its own `state`."""
    counters = state["counters"]

    def count(name: str) -> int:
        return int(counters.get(f"pool_{name}", 0))

    tiers = {tier: _tier(tier, state) for tier in TIERS if state["tiers"][tier]["capacity_bytes"]}
    asked = count("lookup_blocks")
    hits = sum(count(f"hit_{tier}_blocks") for tier in TIERS)
    ssd = state["ssd"]
    on_ssd = state["tiers"]["ssd"]["blocks"]
    return PoolNodeFigures(
        **_known(item, reply),
        tiers=tiers,
        asked_blocks=asked,
        waiting_blocks=count("lookup_waiting_blocks"),
        missed_blocks=count("lookup_missed_blocks"),
        hit_rate=hits / asked if asked else None,
        reuse_gap_p50_s=histogram_of(counters, "pool_reuse_gap").quantile_s(0.5),
        lost_blocks=_by_reason(counters, "pool_lost_"),
        loaded_blocks=count("loaded_blocks"),
        load_timeouts=count("load_timeouts"),
        loading_blocks=state["counts"]["loads"],
        written_blocks=count("written_blocks"),
        unwritten_blocks=None if ssd is None else state["counts"]["blocks"] - on_ssd,
        ssd_state="" if ssd is None else ssd["state"],
        ssd_folder="" if ssd is None else ssd["folder"],
        ssd_errors={name: count(name) for name in _SSD_ERRORS if count(name)},
        corrupt_blocks=count("dram_corrupt_blocks") + count("ssd_corrupt_blocks") + count("digest_mismatches"),
        leases=state["counts"]["leases"],
        puts=state["counts"]["puts"],
        namespaces={name: held["blocks"] for name, held in sorted(state["namespaces"].items())},
        memory_pages=state["arena_pages"],
        door=state["door"],
    )


def silent_node(item: conductor_pb2.NodeStatus, reply: conductor_pb2.ClusterReply, problem: str) -> PoolNodeFigures:
    """Of a node that could not be asked."""
    return PoolNodeFigures(**_known(item, reply), problem=problem)


def is_pool(item: conductor_pb2.NodeStatus) -> bool:
    """Whether the node is a pool node."""
    return item.node.role == common_pb2.ROLE_POOL


def _known(item: conductor_pb2.NodeStatus, reply: conductor_pb2.ClusterReply) -> dict[str, Any]:
    node_id = item.node.node_id
    mine = [sample for sample in reply.samples if sample.labels.get("node") == node_id]
    exact = next((sample.value for sample in mine if sample.name == "directory_exact"), None)
    return {
        "node_id": node_id,
        "address": item.node.target,
        "state": "silent" if item.suspect else "draining" if item.report.draining else "ready",
        "directory": "" if exact is None else "EXACT" if exact else "DEGRADED",
        "directory_blocks": None
        if exact is None
        else int(sum(sample.value for sample in mine if sample.name == "directory_blocks")),
    }


def _tier(tier: str, state: Mapping[str, Any]) -> TierFigures:
    counters, here = state["counters"], state["tiers"][tier]
    return TierFigures(
        capacity_bytes=here["capacity_bytes"],
        used_bytes=here["used_bytes"],
        blocks=here["blocks"],
        hit_blocks=int(counters[f"pool_hit_{tier}_blocks"]),
        hit_tokens=int(counters[f"pool_hit_{tier}_tokens"]),
        saved_s=counters[f"pool_saved_{tier}_compute_us"] / 1e6,
        evicted_blocks=_by_reason(counters, f"pool_evicted_{tier}_"),
        evicted_age_p50_s=histogram_of(counters, f"pool_evicted_{tier}_age").quantile_s(0.5),
    )


def _by_reason(counters: Mapping[str, float], start: str) -> dict[str, int]:
    return {
        name.removeprefix(start).removesuffix("_blocks"): int(value)
        for name, value in sorted(counters.items())
        if name.startswith(start) and name.endswith("_blocks") and value
    }

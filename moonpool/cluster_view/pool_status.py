"""Status of the KV pool: figures of each pool node and of all, from the nodes' and the conductor's answers. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from moonpool.cluster_view.reply import directory_state, node_state, samples
from moonpool_proto.v1 import conductor_pb2
from rpc.kv_namespaces import namespace_users
from telemetry.histograms import histogram_of

TIERS: Final = ("dram", "ssd")
_SSD_ERRORS: Final = ("ssd_read_errors", "ssd_write_errors", "ssd_full_errors", "ssd_corrupt_blocks")


@dataclass(frozen=True)
class TierStatus:
    """One tier of one node. The eviction age is None if nothing was evicted."""

    capacity_bytes: int
    used_bytes: int
    blocks: int
    hit_blocks: int
    hit_tokens: int
    saved_s: float  # seconds that computing the found blocks took before
    evicted_blocks: dict[str, int]  # by reason, without zeros
    evicted_age_p50_s: float | None  # median age at eviction for room


@dataclass(frozen=True)
class PoolNodeStatus:
    """One pool node since its start. If it did not answer, `problem` is the error, and its own figures are missing."""

    node_id: str
    address: str
    state: str  # "ready", "draining" or "silent", as the conductor sees it
    directory: str  # "EXACT", "DEGRADED", or "" if the conductor does not follow it
    directory_blocks: int | None
    problem: str = ""
    tiers: dict[str, TierStatus] = field(default_factory=dict)
    asked_blocks: int = 0  # the denominator: hits of both tiers + waiting + missed
    waiting_blocks: int = 0  # on SSD, but not loaded in time
    missed_blocks: int = 0
    hit_rate: float | None = None  # share of the requested blocks that were in memory in time
    reuse_gap_p50_s: float | None = None
    lost_blocks: dict[str, int] = field(default_factory=dict)  # by reason
    loaded_blocks: int = 0
    load_timeouts: int = 0
    loading_blocks: int = 0
    written_blocks: int = 0
    coded_blocks: int = 0  # of them, those written compressed
    coded_ratio: float | None = None  # bytes written of these blocks / their bytes
    unwritten_blocks: int | None = None  # backlog of blocks in memory that are not on SSD; None without an SSD
    ssd_state: str = ""  # "ok", "read_only", "failed"; "" without one
    ssd_folder: str = ""
    ssd_errors: dict[str, int] = field(default_factory=dict)
    corrupt_blocks: int = 0  # in memory, on SSD, or in a copy from another node
    leases: int = 0
    puts: int = 0
    namespaces: dict[str, int] = field(default_factory=dict)  # blocks by KV namespace
    namespace_users: dict[str, str] = field(default_factory=dict)  # the model whose workers use it; "": none has joined
    memory_pages: str = ""  # kind of memory pages of the arena
    door: str = ""  # socket for processes of the host; "" if there is none


@dataclass(frozen=True)
class PoolStatus:
    """All pool nodes; prompt tokens by source of their KV, as the workers count them; replicas of prefixes."""

    nodes: tuple[PoolNodeStatus, ...]
    prompt_tokens: int
    reused_tokens: dict[str, int]  # "pages" (the worker's own), "dram", "ssd", "remote"
    replicas: int
    replication_saved_s: float
    replication_spent_s: float

    def to_json(self) -> dict[str, Any]:
        """Return what `pool status --json` prints."""
        return asdict(self)

    def troubles(self) -> list[str]:
        """Return one sentence for each thing that needs attention."""
        found = []
        for node in self.nodes:
            if node.problem:
                found.append(f"{node.node_id} does not answer: {node.problem}")
                continue
            if node.ssd_state not in ("", "ok"):
                found.append(f"{node.node_id}: the SSD in {node.ssd_folder} is {node.ssd_state}")
            if node.directory == "DEGRADED":
                found.append(f"{node.node_id}: the conductor's directory of it is incomplete")
            if node.corrupt_blocks:
                found.append(f"{node.node_id}: {node.corrupt_blocks} damaged blocks were removed")
        return found


def pool_status(reply: conductor_pb2.ClusterReply, nodes: Sequence[PoolNodeStatus]) -> PoolStatus:
    """Combine the conductor's reply with the nodes' status."""
    totals: dict[str, float] = {}
    for item in reply.nodes:
        for name, value in item.report.counters.items():
            totals[name] = totals.get(name, 0.0) + value
    tiers = {tier: int(totals.get(f"cached_{tier}_tokens", 0)) for tier in ("dram", "ssd", "remote")}
    pages = int(totals.get("cached_tokens", 0)) - sum(tiers.values())
    unlabelled = {sample.name: sample.value for sample in reply.samples if not sample.labels}
    return PoolStatus(
        nodes=tuple(nodes),
        prompt_tokens=int(totals.get("prompt_tokens", 0)),
        reused_tokens={"pages": pages, **tiers},
        replicas=int(unlabelled.get("replicas", 0)),
        replication_saved_s=unlabelled.get("replication_saved_seconds_total", 0.0),
        replication_spent_s=unlabelled.get("replication_spent_seconds_total", 0.0),
    )


def node_status(
    item: conductor_pb2.NodeStatus, reply: conductor_pb2.ClusterReply, state: Mapping[str, Any]
) -> PoolNodeStatus:
    """Return a node's status from the conductor's reply and the node's own `state`."""
    counters = state["counters"]

    def count(name: str) -> int:
        return int(counters.get(f"pool_{name}", 0))

    tiers = {tier: _tier(tier, state) for tier in TIERS if state["tiers"][tier]["capacity_bytes"]}
    asked = count("lookup_blocks")
    hits = sum(count(f"hit_{tier}_blocks") for tier in TIERS)
    ssd = state["ssd"]
    on_ssd = state["tiers"]["ssd"]["blocks"]
    users = namespace_users(reply.nodes)
    return PoolNodeStatus(
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
        coded_blocks=count("ssd_coded_blocks"),
        coded_ratio=count("ssd_coded_bytes") / count("ssd_coded_plain_bytes") if count("ssd_coded_blocks") else None,
        unwritten_blocks=None if ssd is None else state["counts"]["blocks"] - on_ssd,
        ssd_state="" if ssd is None else ssd["state"],
        ssd_folder="" if ssd is None else ssd["folder"],
        ssd_errors={name: count(name) for name in _SSD_ERRORS if count(name)},
        corrupt_blocks=count("dram_corrupt_blocks") + count("ssd_corrupt_blocks") + count("digest_mismatches"),
        leases=state["counts"]["leases"],
        puts=state["counts"]["puts"],
        namespaces={name: held["blocks"] for name, held in sorted(state["namespaces"].items())},
        namespace_users={name: users.get(name, "") for name in sorted(state["namespaces"])},
        memory_pages=state["arena_pages"],
        door=state["door"],
    )


def unreachable_node(item: conductor_pb2.NodeStatus, reply: conductor_pb2.ClusterReply, problem: str) -> PoolNodeStatus:
    """Return the status of a node that did not answer."""
    return PoolNodeStatus(**_known(item, reply), problem=problem)


def _known(item: conductor_pb2.NodeStatus, reply: conductor_pb2.ClusterReply) -> dict[str, Any]:
    node_id = item.node.node_id
    directory = directory_state(reply, node_id)
    blocks = int(sum(sample.value for sample in samples(reply, "directory_blocks", node=node_id)))
    return {
        "node_id": node_id,
        "address": item.node.target,
        "state": node_state(item),
        "directory": directory,
        "directory_blocks": blocks if directory else None,
    }


def _tier(tier: str, state: Mapping[str, Any]) -> TierStatus:
    counters, here = state["counters"], state["tiers"][tier]
    return TierStatus(
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

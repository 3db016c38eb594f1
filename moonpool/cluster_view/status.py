"""What `moonpool status` tells: the conductor's view of the nodes and `serve`'s of their processes, as one. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moonpool.supervision.ready_file import ReadyFile, ReadyNode
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.common_pb2 import Software


@dataclass(frozen=True)
class NodeRow:
    """One node; None where it is not known, or does not apply to its role."""

    node: str
    role: str
    model: str
    state: str  # "ready", "draining", "silent", "starting" or "restarting"
    pid: int | None
    restarts: int | None
    waiting: int | None
    running: int | None
    free_tokens: int | None
    capacity_tokens: int | None
    cached_share: float | None  # of the prompt tokens it was given, those whose KV it did not compute
    address: str
    stand_in: str = ""  # what it has in place of an engine that computes
    version: str = ""  # of Moonpool; "" where it is not told


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster at one moment. `models`: whether a request of each can be placed."""

    ready: bool
    models: dict[str, bool]
    cached_share: float | None
    nodes: tuple[NodeRow, ...]
    undivided: dict[str, int] = field(default_factory=dict)  # requests by what came of weighing it
    role_switches: dict[str, dict[str, int]] = field(default_factory=dict)  # by roles, by what came of it
    desired_nodes: dict[str, dict[str, int]] = field(default_factory=dict)  # by model and role: what its demand needs

    def to_json(self) -> dict[str, Any]:
        """As `status --json` prints it."""
        return asdict(self)

    def verdict(self) -> str:
        """One sentence: does it serve, how well does the cache do, and who needs a look."""
        missing = [model for model, is_ready in self.models.items() if not is_ready]
        of_these = f" of {' or '.join(missing)}" if missing else ""
        parts = ["ready" if self.ready else f"not ready: no place can serve a request{of_these}"]
        if self.cached_share is not None:
            parts.append(f"{self.cached_share:.0%} of prompt tokens from the cache")
        if done := self.undivided.get("done"):
            parts.append(f"{_requests(done)} prefilled where they decode")
        if advised := self.undivided.get("advised"):
            parts.append(f"{_requests(advised)} better prefilled where they decode")
        for roles, counts in self.role_switches.items():
            told = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items())
            parts.append(f"role switches {roles}: {told}")
        versions = sorted({row.version for row in self.nodes if row.version})
        parts += [f"versions {' and '.join(versions)} together"] if len(versions) > 1 else []
        for model, desired in self.desired_nodes.items():
            if differing := self._differing(model, desired):
                parts.append(f"demand of {model}: {differing}")
        stand_ins = sorted({row.stand_in for row in self.nodes if row.stand_in})
        parts += [f"nothing is computed ({', '.join(stand_ins)})"] if stand_ins else []
        troubled = [f"{row.node} {row.state}" for row in self.nodes if row.state != "ready"]
        return "; ".join([*parts, *troubled])

    def _differing(self, model: str, roles: Mapping[str, int]) -> str:
        """Of the roles whose demand needs another number of nodes than there are, both numbers."""
        present = Counter(row.role for row in self.nodes if row.model == model and row.state == "ready")
        return ", ".join(
            f"{role} {wanted} (has {present[role]})" for role, wanted in roles.items() if wanted != present[role]
        )


def cluster_status(reply: conductor_pb2.ClusterReply, ready: ReadyFile | None) -> ClusterStatus:
    """`ready` None: a cluster that `serve` of this machine did not start, whose processes are not known."""
    joined = {item.node.node_id: item for item in reply.nodes}
    started = ready.nodes if ready is not None else {}
    names = [*started, *(name for name in joined if name not in started)]
    asked = next((name for name, process in started.items() if ready and process.target == ready.conductor), None)
    rows = tuple(
        _row(name, joined.get(name), started.get(name), reply.software if name == asked else None) for name in names
    )
    models = {row.model: row.model in reply.ready_models for row in rows if row.model}
    share = _share(*map(sum, zip(*(_prompt_tokens(item.report.counters) for item in reply.nodes), strict=True)))
    is_ready = bool(models) and all(models.values())
    return ClusterStatus(is_ready, models, share, rows, _undivided(reply), _role_switches(reply), desired_nodes(reply))


def role_name(role: common_pb2.Role.ValueType) -> str:
    """ "prefill" for ROLE_PREFILL."""
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def _undivided(reply: conductor_pb2.ClusterReply) -> dict[str, int]:
    """Of all models together."""
    counts: Counter[str] = Counter()
    for told in reply.samples:
        if told.name == "undivided_total":
            counts[told.labels.get("outcome", "")] += int(told.value)
    return dict(counts)


def _role_switches(reply: conductor_pb2.ClusterReply) -> dict[str, dict[str, int]]:
    """Of all models together, "prefill to decode" and back."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for told in reply.samples:
        if told.name in ("role_switches_total", "role_switches_refused_total"):
            outcome = told.labels.get("outcome") or f"refused ({told.labels.get('reason')})"
            found[f"{told.labels.get('from_role')} to {told.labels.get('to_role')}"][outcome] += int(told.value)
    return {roles: dict(counts) for roles, counts in found.items()}


def desired_nodes(reply: conductor_pb2.ClusterReply) -> dict[str, dict[str, int]]:
    """By model, and role: nodes that the demand needs."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for told in reply.samples:
        if told.name == "desired_nodes":
            found[told.labels.get("model_name", "")][told.labels.get("role", "")] = int(told.value)
    return dict(found)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _row(
    name: str,
    item: conductor_pb2.NodeStatus | None,
    process: ReadyNode | None,
    software: Software | None,
) -> NodeRow:
    """`software`: of a process that does not join."""
    node = item.node if item is not None else conductor_pb2.Node()
    report = item.report if item is not None and node.capacity_tokens else None
    return NodeRow(
        node=name,
        role=role_name(node.role) if item is not None else process.role.removesuffix("-node") if process else "",
        model=node.model if item is not None else process.model if process else "",
        state=_state(item, process),
        pid=process.pid if process else None,
        restarts=process.restarts if process else None,
        waiting=report.num_waiting if report else None,
        running=report.num_running if report else None,
        free_tokens=report.free_tokens if report else None,
        capacity_tokens=node.capacity_tokens if report else None,
        cached_share=_share(*_prompt_tokens(report.counters)) if report else None,
        address=node.target if item is not None else process.target if process else "",
        stand_in=node.engine,
        version=software.version if software is not None else node.software.version,
    )


def _state(item: conductor_pb2.NodeStatus | None, process: ReadyNode | None) -> str:
    if process is not None and process.pid is None:
        return "restarting"
    if item is not None:
        return "silent" if item.suspect else "draining" if item.report.draining else "ready"
    joins = process is not None and process.role not in ("conductor", "frontend")
    return "starting" if joins or process is None or not process.ready else "ready"


def _prompt_tokens(counters: Mapping[str, float]) -> tuple[float, float]:
    """(cached, all) prompt tokens of a node."""
    return counters.get("cached_tokens", 0.0), counters.get("prompt_tokens", 0.0)


def _share(cached: float = 0.0, total: float = 0.0) -> float | None:
    return cached / total if total else None

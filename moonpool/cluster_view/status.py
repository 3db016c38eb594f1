"""State of a cluster's nodes: the conductor's view of them joined with `serve`'s view of their processes. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moonpool.cluster_view.reply import colocated_prefills, desired_nodes, node_state, role_name, role_switches
from moonpool.supervision.ready_file import ReadyFile, ReadyNode
from moonpool_proto.v1 import conductor_pb2
from moonpool_proto.v1.common_pb2 import Software


@dataclass(frozen=True)
class NodeRow:
    """One node; None where a figure is not known or does not apply to its role."""

    node: str
    role: str
    model: str
    state: str  # "ready", "standby", "draining", "silent", "starting" or "restarting"
    pid: int | None
    restarts: int | None
    waiting: int | None
    running: int | None
    free_tokens: int | None
    capacity_tokens: int | None
    cached_share: float | None  # share of its prompt tokens whose KV was reused
    address: str
    stand_in: str = ""  # name of its paced engine, if it has one
    version: str = ""  # of Moonpool; "" if unknown

    @property
    def free_share(self) -> float | None:
        """Free share of its KV capacity, 0 to 1."""
        known = self.free_tokens is not None and self.capacity_tokens
        return self.free_tokens / self.capacity_tokens if known else None  # type: ignore[operator]

    @property
    def model_text(self) -> str:
        """The model, with the name of a paced engine."""
        return f"{self.model} ({self.stand_in})" if self.stand_in else self.model


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster at one moment. `models`: True for each model whose requests can be placed."""

    ready: bool
    models: dict[str, bool]
    cached_share: float | None
    nodes: tuple[NodeRow, ...]
    colocated_prefills: dict[str, int] = field(
        default_factory=dict
    )  # requests by outcome of weighing colocated prefill
    role_switches: dict[str, dict[str, int]] = field(default_factory=dict)  # by roles and outcome
    desired_nodes: dict[str, dict[str, int]] = field(default_factory=dict)  # by model and role

    def to_json(self) -> dict[str, Any]:
        """Return what `status --json` prints."""
        values = asdict(self)
        values["undivided"] = values.pop("colocated_prefills")  # the key that scripts read
        return values

    def verdict(self) -> str:
        """Return one sentence on readiness, cache hits, and nodes that need attention."""
        missing = [model for model, is_ready in self.models.items() if not is_ready]
        of_models = f" of {' or '.join(missing)}" if missing else ""
        parts = ["ready" if self.ready else f"not ready: no node can serve a request{of_models}"]
        if self.cached_share is not None:
            parts.append(f"{self.cached_share:.0%} of prompt tokens from the cache")
        if done := self.colocated_prefills.get("done"):
            parts.append(f"{_requests(done)} prefilled where they decode")
        if advised := self.colocated_prefills.get("advised"):
            parts.append(f"{_requests(advised)} better prefilled where they decode")
        for roles, counts in self.role_switches.items():
            outcomes = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items())
            parts.append(f"role switches {roles}: {outcomes}")
        versions = sorted({row.version for row in self.nodes if row.version})
        parts += [f"versions {' and '.join(versions)} together"] if len(versions) > 1 else []
        for model, desired in self.desired_nodes.items():
            if differing := self._differing(model, desired):
                parts.append(f"demand of {model}: {differing}")
        stand_ins = sorted({row.stand_in for row in self.nodes if row.stand_in})
        parts += [f"nothing is computed ({', '.join(stand_ins)})"] if stand_ins else []
        troubled = [f"{row.node} {row.state}" for row in self.nodes if row.state not in ("ready", "standby")]
        return "; ".join([*parts, *troubled])

    def _differing(self, model: str, roles: Mapping[str, int]) -> str:
        """Return desired and present numbers of nodes for the roles in which they differ."""
        present = Counter(row.role for row in self.nodes if row.model == model and row.state == "ready")
        return ", ".join(
            f"{role} {desired} (has {present[role]})" for role, desired in roles.items() if desired != present[role]
        )


def cluster_status(reply: conductor_pb2.ClusterReply, ready: ReadyFile | None) -> ClusterStatus:
    """Join the two views; `ready` is None for a cluster whose processes `serve` on this machine did not start."""
    joined = {item.node.node_id: item for item in reply.nodes}
    started = ready.nodes if ready is not None else {}
    names = [*started, *(name for name in joined if name not in started)]
    conductor = next((name for name, process in started.items() if ready and process.target == ready.conductor), None)
    rows = tuple(
        _row(name, joined.get(name), started.get(name), reply.software if name == conductor else None) for name in names
    )
    models = {row.model: row.model in reply.ready_models for row in rows if row.model}
    share = _share(*map(sum, zip(*(_prompt_tokens(item.report.counters) for item in reply.nodes), strict=True)))
    return ClusterStatus(
        ready=bool(models) and all(models.values()),
        models=models,
        cached_share=share,
        nodes=rows,
        colocated_prefills=colocated_prefills(reply),
        role_switches=role_switches(reply),
        desired_nodes=desired_nodes(reply),
    )


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _row(
    name: str,
    item: conductor_pb2.NodeStatus | None,
    process: ReadyNode | None,
    software: Software | None,
) -> NodeRow:
    """Return a node's row; `software` is the version of a process that does not join the cluster."""
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
        return node_state(item)
    joins = process is not None and process.role not in ("conductor", "frontend")
    if joins or process is None or not process.ready:
        return "starting"
    return "standby" if process.role == "frontend" and not process.target else "ready"


def _prompt_tokens(counters: Mapping[str, float]) -> tuple[float, float]:
    """Return (cached, all) prompt tokens of a node."""
    return counters.get("cached_tokens", 0.0), counters.get("prompt_tokens", 0.0)


def _share(cached: float = 0.0, total: float = 0.0) -> float | None:
    return cached / total if total else None

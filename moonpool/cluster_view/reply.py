"""Readings of a conductor's ClusterReply that several views share. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from moonpool_proto.v1 import common_pb2, conductor_pb2


def role_name(role: common_pb2.Role.ValueType) -> str:
    """Return "prefill" for ROLE_PREFILL."""
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def is_pool(item: conductor_pb2.NodeStatus) -> bool:
    """Return True for a pool node."""
    return item.node.role == common_pb2.ROLE_POOL


def node_state(item: conductor_pb2.NodeStatus) -> str:
    """Return "silent", "draining" or "ready", as the conductor sees the node."""
    return "silent" if item.suspect else "draining" if item.report.draining else "ready"


def samples(reply: conductor_pb2.ClusterReply, *names: str, **labels: str) -> Iterator[conductor_pb2.Sample]:
    """Yield the conductor's metric samples of these names that carry these labels."""
    for sample in reply.samples:
        if sample.name in names and all(sample.labels.get(label) == value for label, value in labels.items()):
            yield sample


def directory_state(reply: conductor_pb2.ClusterReply, node_id: str) -> str:
    """Return "EXACT" or "DEGRADED" for a pool node that the conductor's directory follows, otherwise ""."""
    exact = next((sample.value for sample in samples(reply, "directory_exact", node=node_id)), None)
    return "" if exact is None else "EXACT" if exact else "DEGRADED"


def desired_nodes(reply: conductor_pb2.ClusterReply) -> dict[str, dict[str, int]]:
    """Return the number of nodes that the demand needs, by model and role."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for sample in samples(reply, "desired_nodes"):
        found[sample.labels.get("model_name", "")][sample.labels.get("role", "")] = int(sample.value)
    return dict(found)


def colocated_prefills(reply: conductor_pb2.ClusterReply) -> dict[str, int]:
    """Return the number of requests by outcome of weighing colocated prefill, over all models."""
    counts: Counter[str] = Counter()
    for sample in samples(reply, "undivided_total"):
        counts[sample.labels.get("outcome", "")] += int(sample.value)
    return dict(counts)


def role_switches(reply: conductor_pb2.ClusterReply) -> dict[str, dict[str, int]]:
    """Return counts by roles ("prefill to decode") and outcome, over all models."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for sample in samples(reply, "role_switches_total", "role_switches_refused_total"):
        outcome = sample.labels.get("outcome") or f"refused ({sample.labels.get('reason')})"
        found[f"{sample.labels.get('from_role')} to {sample.labels.get('to_role')}"][outcome] += int(sample.value)
    return {roles: dict(counts) for roles, counts in found.items()}

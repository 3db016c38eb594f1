"""Samples of metrics from wire messages."""

from collections.abc import Iterable

from moonpool_proto.v1 import common_pb2, conductor_pb2
from telemetry import ConductorSample, NodeSample


def role_name(role: common_pb2.Role.ValueType) -> str:
    """Return the role's name in metrics, such as "prefill"; "unknown" for a role of a later version."""
    if role == common_pb2.ROLE_UNSPECIFIED or role not in common_pb2.Role.values():
        return "unknown"
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def node_sample(node: conductor_pb2.Node, report: conductor_pb2.NodeReport, *, suspect: bool = False) -> NodeSample:
    """Return the node's sample from its description and its report."""
    return NodeSample(
        node_id=node.node_id,
        role=role_name(node.role),
        model=node.model,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        capacity_tokens=node.capacity_tokens,
        free_tokens=report.free_tokens,
        draining=report.draining,
        suspect=suspect,
        engine=node.engine,
        counters=dict(report.counters),
    )


def node_samples(nodes: Iterable[conductor_pb2.NodeStatus]) -> list[NodeSample]:
    """Return the samples of all nodes."""
    return [node_sample(status.node, status.report, suspect=status.suspect) for status in nodes]


def conductor_samples(samples: Iterable[conductor_pb2.Sample]) -> list[ConductorSample]:
    """Return the conductor's samples."""
    return [ConductorSample(each.name, each.value, dict(each.labels)) for each in samples]

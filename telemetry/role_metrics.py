"""Metrics that a role exports itself, at its health endpoint: its own, and on conductors those of the whole cluster.

Each number has one owner, so that a sum over all scraped processes counts it once. Conductors also offer the series of
all nodes at a path of its own, for clusters whose nodes cannot be scraped one by one.
"""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from telemetry.conductor import ConductorCollector, ConductorSample
from telemetry.frontend import new_registry
from telemetry.nodes import NodeSample, NodesCollector, NodesUpCollector

__all__ = ["RoleMetrics"]


class RoleMetrics:
    """Registries of one role by path; a role without a health endpoint has none.

    `names_tenants`: export series with the label tenant, too. The health endpoint requires no key.
    """

    def __init__(self, *, names_tenants: bool = False) -> None:
        self._names_tenants = names_tenants
        self.by_path: dict[str, CollectorRegistry] = {"/metrics": new_registry()}

    def export_node(self, sample: Callable[[], NodeSample]) -> None:
        """Export the node's own series."""
        self.by_path["/metrics"].register(NodesCollector(lambda: [sample()], own=True))

    def export_conductor(
        self, samples: Callable[[], Sequence[ConductorSample]], nodes: Callable[[], Sequence[NodeSample]]
    ) -> None:
        """Export the conductor's own series and which nodes report; at /metrics/cluster also the nodes' series."""

        def exported() -> list[ConductorSample]:
            return [sample for sample in samples() if self._names_tenants or "tenant" not in sample.labels]

        own, cluster = self.by_path["/metrics"], new_registry()
        own.register(ConductorCollector(exported))
        own.register(NodesUpCollector(nodes))
        cluster.register(ConductorCollector(exported))
        cluster.register(NodesCollector(nodes))
        self.by_path["/metrics/cluster"] = cluster

"""Metrics under vLLM's names and structured logs with request ids; knows no other package."""

from telemetry.errors import TelemetryError, UnknownLogLevel
from telemetry.metrics import RequestMetrics, exposition, new_registry
from telemetry.nodes import NodeSample, NodesCollector

__all__ = [
    "NodeSample",
    "NodesCollector",
    "RequestMetrics",
    "TelemetryError",
    "UnknownLogLevel",
    "exposition",
    "new_registry",
]

"""Metrics under vLLM's names, structured logs with request ids, and tracing. Imports no other package."""

from telemetry.conductor import CONDUCTOR_METRICS, ConductorCollector, ConductorSample
from telemetry.errors import BadTracing, TelemetryError, UnknownLogLevel
from telemetry.frontend import (
    FrontendMetrics,
    IncludedRegistry,
    RequestFamilies,
    RequestMetrics,
    exposition,
    new_registry,
)
from telemetry.loop_lag import LoopWatch
from telemetry.nodes import NodeSample, NodesCollector
from telemetry.role_metrics import RoleMetrics

__all__ = [
    "CONDUCTOR_METRICS",
    "BadTracing",
    "ConductorCollector",
    "ConductorSample",
    "FrontendMetrics",
    "IncludedRegistry",
    "LoopWatch",
    "NodeSample",
    "NodesCollector",
    "RequestFamilies",
    "RequestMetrics",
    "RoleMetrics",
    "TelemetryError",
    "UnknownLogLevel",
    "exposition",
    "new_registry",
]

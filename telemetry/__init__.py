"""Metrics under vLLM's names, structured logs with request ids, and tracing. Imports no other package."""

from telemetry.conductor import CONDUCTOR_METRICS, ConductorCollector, ConductorSample
from telemetry.errors import BadTracing, TelemetryError, UnknownLogLevel
from telemetry.frontend import FrontendMetrics, RequestFamilies, RequestMetrics, exposition, new_registry
from telemetry.loop_lag import LoopWatch
from telemetry.nodes import NodeSample, NodesCollector

__all__ = [
    "CONDUCTOR_METRICS",
    "BadTracing",
    "ConductorCollector",
    "ConductorSample",
    "FrontendMetrics",
    "LoopWatch",
    "NodeSample",
    "NodesCollector",
    "RequestFamilies",
    "RequestMetrics",
    "TelemetryError",
    "UnknownLogLevel",
    "exposition",
    "new_registry",
]

"""Configuration of the commands: one YAML file, MOONPOOL_* variables over it, flags over both, validated once.

The settings are declared in the package `settings`; those of `moonpool serve` alone, in `serve` and `models`.
"""

from moonpool.config.models import ModelEntry
from moonpool.config.roles import (
    COMPOSITES,
    ConductorRole,
    EndpointPickerRole,
    FrontendRole,
    KvAgentRole,
    PoolNodeRole,
    ServeConfig,
    WorkerRole,
    all_settings,
)
from moonpool.config.serve import TopologySettings
from moonpool.config.sources import load
from settings.keys import Setting, composite_settings, flatten

__all__ = [
    "COMPOSITES",
    "ConductorRole",
    "EndpointPickerRole",
    "FrontendRole",
    "KvAgentRole",
    "ModelEntry",
    "PoolNodeRole",
    "ServeConfig",
    "Setting",
    "TopologySettings",
    "WorkerRole",
    "all_settings",
    "composite_settings",
    "flatten",
    "load",
]

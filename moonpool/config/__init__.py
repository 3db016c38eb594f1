"""Configuration: one YAML file, MOONPOOL_* variables over it, flags over both; validated once into frozen slices."""

from moonpool.config.fields import Setting, composite_settings, flatten
from moonpool.config.models import ModelEntry
from moonpool.config.roles import (
    COMPOSITES,
    ConductorRole,
    FrontendRole,
    PoolNodeRole,
    ServeConfig,
    WorkerRole,
    all_settings,
)
from moonpool.config.slices import TopologySettings
from moonpool.config.sources import load

__all__ = [
    "COMPOSITES",
    "ConductorRole",
    "FrontendRole",
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

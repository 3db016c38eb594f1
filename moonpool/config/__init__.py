"""Configuration: one YAML file, MOONPOOL_* variables over it, flags over both; validated once into frozen slices."""

from moonpool.config.fields import Setting, composite_settings, flatten
from moonpool.config.roles import (
    COMPOSITES,
    ConductorRole,
    FrontendRole,
    PoolNodeRole,
    ServeConfig,
    WorkerRole,
    all_settings,
)
from moonpool.config.sources import load

__all__ = [
    "COMPOSITES",
    "ConductorRole",
    "FrontendRole",
    "PoolNodeRole",
    "ServeConfig",
    "Setting",
    "WorkerRole",
    "all_settings",
    "composite_settings",
    "flatten",
    "load",
]

"""Versions of the record of objectives: their stores, how conductors follow them, and how they are changed."""

from conductor.slo.change import ObjectivesChange, ObjectivesChangeResult
from conductor.slo.keeper import SloKeeper, SloKeeperSetup
from conductor.slo.stores import FileVersions, MemoryVersions, RedisVersions
from conductor.slo.versions import Acknowledgement, SloVersion, VersionStore

__all__ = [
    "Acknowledgement",
    "FileVersions",
    "MemoryVersions",
    "ObjectivesChange",
    "ObjectivesChangeResult",
    "RedisVersions",
    "SloKeeper",
    "SloKeeperSetup",
    "SloVersion",
    "VersionStore",
]

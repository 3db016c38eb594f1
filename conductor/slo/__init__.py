"""The record of objectives through time: its versions, where they are kept, who follows them, how one is changed."""

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

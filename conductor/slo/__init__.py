"""The record of objectives through time: its versions, where they are kept, who follows them, how one is changed."""

from conductor.slo.change import Change, Changed
from conductor.slo.keeper import SloKeeper, SloKeeperSetup
from conductor.slo.stores import FileVersions, MemoryVersions, RedisVersions
from conductor.slo.versions import Acknowledgement, SloVersion, VersionStore

__all__ = [
    "Acknowledgement",
    "Change",
    "Changed",
    "FileVersions",
    "MemoryVersions",
    "RedisVersions",
    "SloKeeper",
    "SloKeeperSetup",
    "SloVersion",
    "VersionStore",
]

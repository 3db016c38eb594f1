"""Decisions of a pool node, without clock or I/O: where blocks lie, who may read or write them, what is evicted."""

from kvpool.policy.core import PoolCore, PoolLimits
from kvpool.policy.records import (
    Block,
    LeaseGrant,
    LoadOutcome,
    PutAllocation,
    PutRequest,
    SlotStatus,
    SsdBlock,
    TierLoad,
    TierWrite,
)

__all__ = [
    "Block",
    "LeaseGrant",
    "LoadOutcome",
    "PoolCore",
    "PoolLimits",
    "PutAllocation",
    "PutRequest",
    "SlotStatus",
    "SsdBlock",
    "TierLoad",
    "TierWrite",
]

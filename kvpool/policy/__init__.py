"""Decisions of a pool node, without clock or I/O: allocation, puts, leases, eviction and moves between tiers."""

from kvpool.policy.core import PoolCore, PoolLimits
from kvpool.policy.records import (
    Block,
    LeaseGrant,
    LoadOutcome,
    NewBlocks,
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
    "NewBlocks",
    "PoolCore",
    "PoolLimits",
    "PutAllocation",
    "PutRequest",
    "SlotStatus",
    "SsdBlock",
    "TierLoad",
    "TierWrite",
]

"""What a pool node decides, without clock or I/O: where blocks lie, who may read or write them, what is evicted."""

from kvpool.policy.core import PoolCore, PoolLimits
from kvpool.policy.records import Allocation, Block, LeaseGrant, Load, LoadOutcome, SlotStatus, SsdBlock, Write

__all__ = [
    "Allocation",
    "Block",
    "LeaseGrant",
    "Load",
    "LoadOutcome",
    "PoolCore",
    "PoolLimits",
    "SlotStatus",
    "SsdBlock",
    "Write",
]

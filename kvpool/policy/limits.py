"""How large a pool node is, and by which rules it decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.errors import PoolConfigError
from kvpool.policy.eviction import POLICIES

__all__ = ["PoolLimits"]


@dataclass(frozen=True)
class PoolLimits:
    """Sizes in bytes, times in nanoseconds."""

    arena_nbytes: int
    slab_nbytes: int  # unit of the arena in which sizes of slots get their share
    operation_ns: int  # the longest deadline of a messenger operation
    max_lease_ns: int  # longer leases and puts are cut to this
    event_log_nbytes: int = 16 << 20  # memory for events kept for reconnecting directories
    policy: str = "lru"  # of eviction, by its name in `kvpool.policy.eviction`; each tier has its own instance
    ssd_nbytes: int = 0  # for extents; 0: no SSD tier
    ssd_slab_nbytes: int = 1 << 20  # as `slab_nbytes`; must stay the same as long as the SSD store's files are kept
    write_above: float = 0.5  # share of DRAM in use above which what would leave next is written to SSD ahead of need
    max_tails: int = 1024  # partial blocks kept after one block: as many dialogues may end after a prompt they share
    quotas: Mapping[bytes, float] = field(default_factory=dict)  # namespace -> largest share of DRAM it may take

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise PoolConfigError(f"eviction policy {self.policy!r}: expected one of {', '.join(sorted(POLICIES))}")
        if wrong := [share for share in self.quotas.values() if not 0 < share <= 1]:
            raise PoolConfigError(f"a namespace's quota is a share of DRAM above 0 and at most 1, not {wrong[0]!r}")
        if not 0 <= self.write_above <= 1 or self.max_tails < 0 or self.ssd_nbytes < 0 or self.ssd_slab_nbytes < 1:
            raise PoolConfigError("write_above is a share of 0..1; max_tails and sizes must not be negative")

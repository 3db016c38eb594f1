"""Eviction policies behind one interface. Pure: the live pool and the simulator use the same classes."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvpool.errors import PoolConfigError
from kvpool.policy.eviction.arc import Arc
from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use
from kvpool.policy.eviction.moonpool import Moonpool
from kvpool.policy.eviction.ranked import LengthAware, Lfu, Lru
from kvpool.policy.eviction.retention import RetainingPolicy, RetainRequest, Retention

__all__ = [
    "POLICIES",
    "EvictionPolicy",
    "Resident",
    "RetainRequest",
    "RetainingPolicy",
    "Retention",
    "Use",
    "make_policy",
]

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        "lru": lambda capacity_nbytes: Lru(),
        "lfu": lambda capacity_nbytes: Lfu(),
        "length-aware": lambda capacity_nbytes: LengthAware(),
        "arc": Arc,
        "moonpool": Moonpool,
    }
)
"""Constructors of policies by name; each takes the tier's capacity in bytes."""


def make_policy(name: str, capacity_nbytes: int) -> EvictionPolicy:
    """Return a new policy for a tier of `capacity_nbytes`. Raises PoolConfigError for an unknown name or capacity 0."""
    if name not in POLICIES:
        raise PoolConfigError(f"unknown eviction policy {name!r}: expected one of {', '.join(POLICIES)}")
    if capacity_nbytes < 1:
        raise PoolConfigError(f"capacity_nbytes must be positive, got {capacity_nbytes}")
    return POLICIES[name](capacity_nbytes)

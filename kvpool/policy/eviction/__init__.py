"""Who leaves a full tier: policies behind one interface. Pure; the live pool and the simulator drive the same ones."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvpool.errors import PoolConfigError
from kvpool.policy.eviction.arc import Arc
from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use
from kvpool.policy.eviction.moonpool import Moonpool
from kvpool.policy.eviction.ranked import LengthAware, Lfu, Lru

__all__ = ["POLICIES", "EvictionPolicy", "Resident", "Use", "make_policy"]

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        "lru": lambda capacity_nbytes: Lru(),
        "lfu": lambda capacity_nbytes: Lfu(),
        "length-aware": lambda capacity_nbytes: LengthAware(),
        "arc": Arc,
        "moonpool": Moonpool,
    }
)
"""What `make_policy` makes: from the tier's capacity in bytes, by name."""


def make_policy(name: str, capacity_nbytes: int) -> EvictionPolicy:
    """The policy `name` for one tier of `capacity_nbytes`. Raises PoolConfigError for a name that is not known."""
    if name not in POLICIES:
        raise PoolConfigError(f"there is no eviction policy {name!r}; choose one of {', '.join(POLICIES)}")
    if capacity_nbytes < 1:
        raise PoolConfigError(f"a tier has at least one byte, not {capacity_nbytes}")
    return POLICIES[name](capacity_nbytes)

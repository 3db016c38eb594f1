"""Who leaves a full tier: pluggable policies behind one interface. Pure; the live pool and the simulator drive the same."""

from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use

__all__ = ["EvictionPolicy", "Resident", "Use"]

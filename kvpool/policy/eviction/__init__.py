"""Who leaves a full tier: policies behind one interface. Pure; the live pool and the simulator drive the same ones."""

from kvpool.policy.eviction.base import EvictionPolicy, Resident, Use

__all__ = ["EvictionPolicy", "Resident", "Use"]

"""The conductor's pure core: events in, decisions out. No I/O, no clock, no randomness; time is integer nanoseconds."""

from conductor.policy.conductor import Conductor
from conductor.policy.config import Objectives, PolicyConfig

__all__ = ["Conductor", "Objectives", "PolicyConfig"]

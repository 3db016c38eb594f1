"""The conductor's decision logic: a state machine without I/O, clock or randomness. Times are integer nanoseconds."""

from conductor.policy.conductor import Conductor
from settings.conductor import Objectives, PolicyConfig

__all__ = ["Conductor", "Objectives", "PolicyConfig"]

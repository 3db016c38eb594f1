"""The conductor's decision logic: a state machine without I/O, clock or randomness. Times are integer nanoseconds."""

from conductor.policy.conductor import Conductor
from conductor.policy.config import Objectives, PolicyConfig

__all__ = ["Conductor", "Objectives", "PolicyConfig"]

"""The workers' pure decisions: which slots a request gets, what the next step computes. No I/O, no clock, no torch."""

from worker.policy.batch import BatchLimits, BatchPlan, PrefillChunk, plan_step
from worker.policy.slots import OutOfSlots, SlotPool

__all__ = ["BatchLimits", "BatchPlan", "OutOfSlots", "PrefillChunk", "SlotPool", "plan_step"]

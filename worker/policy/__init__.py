"""Pure decisions of workers: slots, steps, scheduling order, engine health. No I/O, clock or torch."""

from worker.policy.batch import BatchLimits, BatchPlan, PrefillChunk, plan_step
from worker.policy.health import MAX_FAILED_STEPS, CircuitBreaker, EngineHealth
from worker.policy.slots import OutOfSlots, SlotPool

__all__ = [
    "MAX_FAILED_STEPS",
    "BatchLimits",
    "BatchPlan",
    "CircuitBreaker",
    "EngineHealth",
    "OutOfSlots",
    "PrefillChunk",
    "SlotPool",
    "plan_step",
]

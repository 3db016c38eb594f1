"""Pure decisions of workers: slots, steps, scheduling order, engine health. No I/O, clock or torch."""

from worker.policy.batch import BatchLimits, BatchPlan, PlanStep, PrefillChunk, plan_step
from worker.policy.health import MAX_FAILED_STEPS, CircuitBreaker, EngineHealth, StepWatch
from worker.policy.preemption import RunningAnswer, answers_to_preempt
from worker.policy.slots import SlotPool, TakenSlots
from worker.policy.step_budget import StepBudget
from worker.policy.window_slots import (
    OutOfSlots,
    WindowHold,
    WindowSlots,
    num_window_slots,
    slots_of_answer,
    slots_of_prompt,
)

__all__ = [
    "MAX_FAILED_STEPS",
    "BatchLimits",
    "BatchPlan",
    "CircuitBreaker",
    "EngineHealth",
    "OutOfSlots",
    "PlanStep",
    "PrefillChunk",
    "RunningAnswer",
    "SlotPool",
    "StepBudget",
    "StepWatch",
    "TakenSlots",
    "WindowHold",
    "WindowSlots",
    "answers_to_preempt",
    "num_window_slots",
    "plan_step",
    "slots_of_answer",
    "slots_of_prompt",
]

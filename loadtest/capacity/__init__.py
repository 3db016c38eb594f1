"""Capacity search: the largest rate at which a server meets its objectives."""

from loadtest.capacity.search import (
    CapacityFinding,
    CapacityObjective,
    CapacitySearch,
    CapacityStep,
    StepVerdict,
    judge_step,
)

__all__ = ["CapacityFinding", "CapacityObjective", "CapacitySearch", "CapacityStep", "StepVerdict", "judge_step"]

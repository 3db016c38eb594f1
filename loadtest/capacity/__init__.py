"""The largest rate at which a server meets its objectives: the search, the judgement of a step, and the running."""

from loadtest.capacity.search import CapacityObjective, CapacitySearch, Finding, Step, Verdict, judge_step

__all__ = ["CapacityObjective", "CapacitySearch", "Finding", "Step", "Verdict", "judge_step"]

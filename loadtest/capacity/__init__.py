"""The largest rate at which a server meets its objectives: the search, the judgement of a step, and the running."""

from loadtest.capacity.objective import CapacityObjective, Step, judge_step
from loadtest.capacity.search import CapacitySearch, Finding, Verdict

__all__ = ["CapacityObjective", "CapacitySearch", "Finding", "Step", "Verdict", "judge_step"]

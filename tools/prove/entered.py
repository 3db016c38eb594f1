"""Counts how often a schedule enters paths of the roles' code that only some schedules can enter."""

from __future__ import annotations

from collections import Counter
from typing import Any

from conductor.scheduling import Scheduling
from tools.prove.hash_engine import HashSteps
from tools.prove.instances import running_process
from worker.counters import WorkerCounters
from worker.grammar_matching import GrammarMatcher
from worker.layer_gate import LayerGate
from worker.node import WorkerNode
from worker.policy.window_slots import WindowHold, WindowSlots

_WORKER_COUNTERS = {
    "preemptions": "preempted",
    "kv_growth_waits": "waits of growing answers",
    "grammar_processes_killed": "grammars lost",
}
_counts: Counter[str] = Counter()


def taken() -> dict[str, int]:
    """Return the counts since the last call."""
    counts = dict(sorted(_counts.items()))
    _counts.clear()
    return counts


def watch() -> None:
    """Wrap what is counted. Once per process."""
    add = WorkerCounters.add

    def counted_add(self: WorkerCounters, name: str, value: float) -> None:
        if name in _WORKER_COUNTERS:
            _counts[_WORKER_COUNTERS[name]] += int(value)
        add(self, name, value)

    WorkerCounters.add = counted_add  # type: ignore[method-assign]
    _count_calls(WorkerNode, "_extend", "grown")
    _count_calls(LayerGate, "mark", "layers loaded")
    _count_calls(GrammarMatcher, "take", "tokens of grammars")
    _count_calls(WindowSlots, "_take", "window slots taken")
    _count_calls(WindowHold, "leave", "window steps")
    _count_calls(HashSteps, "_slide", "rolling windows slid")
    _count_calls(WorkerNode, "end_early", "answers ended early")
    _count_placements()


def _count_calls(kind: type[Any], name: str, counted: str) -> None:
    call = getattr(kind, name)

    def counted_call(self: Any, *arguments: Any, **options: Any) -> Any:
        _counts[counted] += 1
        return call(self, *arguments, **options)

    setattr(kind, name, counted_call)


def _count_placements() -> None:
    schedule = Scheduling.schedule

    def counted_schedule(self: Scheduling, request: Any, reply: Any) -> None:
        if running_process().name != "conductor-0":
            _counts["placed by another conductor"] += 1
        schedule(self, request, reply)

    Scheduling.schedule = counted_schedule  # type: ignore[method-assign]

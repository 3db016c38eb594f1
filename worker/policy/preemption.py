"""Which running answers give up their pages to a more urgent request that waits for some.

Only the order of classes and age counts (`scheduling_order`): an answer yields to a request of a class with a lower
level, until it has aged. Within a class nobody yields, so that tenants' shares cannot make requests alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.policy.scheduling_order import QueueEntry


@dataclass(frozen=True, slots=True)
class RunningAnswer:
    """A running answer: its place in the scheduling order, and the pages that become free when it ends."""

    entry: QueueEntry
    pages: int


def answers_to_preempt(
    waiting: QueueEntry, missing_pages: int, running: Sequence[RunningAnswer], now_s: float
) -> list[int]:
    """Return the indices of the answers to preempt, so that a waiting request gets `missing_pages` more.

    The lowest class goes first, and in it the account that is furthest ahead of its share. Empty if all of them
    together hold too little: then none is preempted for nothing.
    """
    yielding = [
        i for i, one in enumerate(running) if one.pages and one.entry.level > waiting.level and now_s < one.entry.ages_s
    ]
    yielding.sort(key=lambda i: (running[i].entry.level, running[i].entry.start_ns), reverse=True)
    chosen: list[int] = []
    for i in yielding:
        if missing_pages <= 0:
            break
        chosen.append(i)
        missing_pages -= running[i].pages
    return chosen if missing_pages <= 0 else []

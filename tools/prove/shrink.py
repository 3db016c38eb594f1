"""Makes a failing schedule smaller: fewer faults and fewer requests, with a problem of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tools.prove.schedules import Job


def kind_of(problem: str) -> str:
    """Return the part of a problem that is the same in a smaller schedule."""
    return problem.partition(":")[0]


def shrink(
    job: Job, outcome: dict[str, Any], faults: int, requests: Sequence[str], run: Callable[[Job], dict[str, Any]]
) -> tuple[Job, dict[str, Any]]:
    """Leave out one fault or request after another, as long as the first problem stays; return the smallest."""
    wanted = kind_of(outcome["problems"][0])

    def fails(smaller: Job) -> dict[str, Any] | None:
        found = run(smaller)
        return found if any(kind_of(each) == wanted for each in found["problems"]) else None

    for index in range(faults):
        smaller = replace(job, without_faults=job.without_faults | {index})
        if (found := fails(smaller)) is not None:
            job, outcome = smaller, found
    for name in requests:
        smaller = replace(job, without_requests=job.without_requests | {name})
        if (found := fails(smaller)) is not None:
            job, outcome = smaller, found
    return job, outcome

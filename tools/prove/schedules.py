"""Runs schedules in child processes, each forked from one that has loaded everything: none sees another's remains."""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import select
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.prove import imports, roles

_MOST_S = 300.0  # of real time, for one schedule


@dataclass(frozen=True)
class Job:
    """A seed to run; `without` are the indices of faults and requests that are left out."""

    seed: int
    without_faults: frozenset[int] = frozenset()
    without_requests: frozenset[str] = frozenset()


def load(patch: str = "") -> None:
    """Load the roles, with a patch applied to their source if one is given. Once per process."""
    imports.patch(patch)
    roles.install()
    from tools.prove import simulate

    simulate.warm_up()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()


def run_one(job: Job) -> dict[str, Any]:
    """Run a schedule in this process, and return its outcome as plain data."""
    from tools.prove import simulate

    gc.disable()
    outcome: dict[str, Any] = json.loads(
        simulate.run_seed(job.seed, job.without_faults, job.without_requests).as_json()
    )
    return outcome


def run_all(
    jobs: Iterable[Job], processes: int, enough: Callable[[], bool] = lambda: False
) -> Iterator[dict[str, Any]]:
    """Yield the outcomes of all jobs as they end; begin no further one when `enough` returns True."""
    waiting, running = iter(jobs), dict[int, tuple[int, Job]]()
    is_over = False
    while True:
        while len(running) < processes and not is_over and not enough():
            job = next(waiting, None)
            if job is None:
                is_over = True
                break
            reader, pid = _fork(job)
            running[reader] = pid, job
        if not running:
            return
        for reader in select.select(list(running), [], [])[0]:
            yield _result(reader, *running.pop(reader))


def _fork(job: Job) -> tuple[int, int]:
    """Run a job in a child process; return the pipe to read its outcome from, and its pid."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return reader, pid
    os.close(reader)
    status = 1
    try:
        faulthandler.enable()
        signal.alarm(int(_MOST_S))
        with os.fdopen(writer, "wb") as pipe:
            text = json.dumps(run_one(job)).encode()
            pipe.write(text)
        status = 0
    finally:
        os._exit(status)


def _result(reader: int, pid: int, job: Job) -> dict[str, Any]:
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if text:
        outcome: dict[str, Any] = json.loads(text)
        return outcome
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
    problem = f"the process of the schedule ended with {how}"
    return {"seed": job.seed, "problems": [problem], "story": [], "counts": {}}

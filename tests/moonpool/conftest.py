"""Real child processes for the supervisor's tests."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from moonpool.child import ChildPlan

ROLE_SCRIPT = Path(__file__).parent / "role_script.py"


@pytest.fixture
def plan() -> Callable[..., ChildPlan]:
    """A plan that runs the stand-in role in the given mode."""

    def make(mode: str, *arguments: str, node_id: str = "", tier: int = 0, stop_grace_s: float = 20.0) -> ChildPlan:
        argv = (sys.executable, str(ROLE_SCRIPT), mode, *arguments)
        return ChildPlan(node_id or f"{mode}-0", "test", argv, {}, tier, stop_grace_s)

    return make


@pytest.fixture
def track() -> Iterator[Callable[[int], psutil.Process]]:
    """Watch a process by pid; whatever is watched is killed at the end of the test, should it still be there."""
    watched: list[psutil.Process] = []

    def watch(pid: int) -> psutil.Process:
        process = psutil.Process(pid)
        watched.append(process)
        return process

    yield watch
    for process in watched:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL) if process.is_running() else None

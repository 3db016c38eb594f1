"""Real child processes for the supervisor's tests."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonpool.supervision.child import Child, ChildPlan, LogFile

ROLE_SCRIPT = Path(__file__).parent / "role_script.py"


@dataclass(frozen=True)
class ScriptPlan:
    """A node that is any program."""

    node_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    tier: int = 0
    stop_grace_s: float = 20.0
    role: str = "test"


class Scripts:
    """A runtime that runs those programs; keeps who was released."""

    def __init__(self) -> None:
        self.released: list[str] = []

    async def launch(
        self,
        plan: ScriptPlan,
        log: LogFile,
        *,
        on_ready: Callable[[dict[str, Any]], None],
        on_line: Callable[[str], None],
    ) -> Child:
        return await Child.start(ChildPlan(plan.node_id, plan.argv, plan.env), log, on_ready=on_ready, on_line=on_line)

    def release(self, node_id: str) -> None:
        self.released.append(node_id)


@pytest.fixture
def scripts() -> Scripts:
    return Scripts()


@pytest.fixture
def program() -> type[ScriptPlan]:
    """(node_id, argv, env, tier, stop_grace_s) of a program of the test's own."""
    return ScriptPlan


@pytest.fixture
def plan() -> Callable[..., ScriptPlan]:
    """A plan that runs the stand-in role in the given mode."""

    def make(mode: str, *arguments: str, node_id: str = "", tier: int = 0, stop_grace_s: float = 20.0) -> ScriptPlan:
        argv = (sys.executable, str(ROLE_SCRIPT), mode, *arguments)
        return ScriptPlan(node_id or f"{mode}-0", argv, {}, tier, stop_grace_s)

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

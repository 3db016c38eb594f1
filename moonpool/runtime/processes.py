"""Runtime of one machine: each node is a child process, with its settings in a file of the run directory."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from moonpool.plan import RolePlan
from moonpool.python_path import module_command
from moonpool.supervision.child import Child, ChildPlan, LogFile
from moonpool.supervision.http_port import LISTENER_VARIABLE
from rpc.private_folder import create_private


class Processes:
    """Runs `plan`'s role as `moonpool ROLE --config FILE`."""

    conductor = ""  # everything runs on this machine
    found: tuple[str, ...] = ()
    outlives = False

    def __init__(self, run_dir: Path, listener: socket.socket | None = None) -> None:
        """`listener`: socket of the HTTP port, which every frontend inherits."""
        self._run_dir = run_dir
        self._listener = listener

    async def launch(
        self,
        plan: RolePlan,
        log: LogFile,
        *,
        on_ready: Callable[[dict[str, Any]], None],
        on_line: Callable[[str], None],
    ) -> Child:
        """As Runtime.launch."""
        child = child_plan(plan.node_id, plan.role, plan.settings, plan.env, self._run_dir)
        if plan.role == "frontend" and self._listener is not None:
            descriptor = self._listener.fileno()
            child = replace(child, env={**child.env, LISTENER_VARIABLE: str(descriptor)}, descriptors=(descriptor,))
        return await Child.start(child, log, on_ready=on_ready, on_line=on_line)

    def bind(self, add_pool: Callable[[int], None]) -> None:
        """As ClusterRuntime.bind: the pool nodes are planned from the start."""

    def release(self, node_id: str) -> None:
        """As Runtime.release; the settings file stays, for inspection."""


def child_plan(node_id: str, role: str, settings: dict[str, Any], env: dict[str, str], folder: Path) -> ChildPlan:
    """Return the command that runs a role; its settings are in a file, so that no secret appears in a process list."""
    path = folder / f"{node_id}.yaml"
    with open(create_private(path), "w", encoding="utf-8") as file:
        yaml.safe_dump(settings, file, sort_keys=False)
    return ChildPlan(node_id, module_command("moonpool", role, "--config", str(path)), env)

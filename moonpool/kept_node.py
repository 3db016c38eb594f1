"""One node under supervision: its plan, its present process, and what others are told of it. Decides nothing."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from moonpool.log_file import LogFile
from moonpool.runtime.seam import NodePlan, Running

P = TypeVar("P", bound=NodePlan)


@dataclass(frozen=True)
class NodeState:
    """What is known of one node now."""

    node_id: str
    role: str
    pid: int | None  # None: not running
    announcement: dict[str, Any] | None  # its MOONPOOL_READY; None: not ready
    restarts: int
    log_path: Path
    leaving: bool = False


class SupervisorEvents:
    """What a supervisor tells; every method may be overridden. Called on the event loop."""

    def on_ready(self, state: NodeState, seconds: float) -> None:
        """The node's process is ready, `seconds` after its start."""

    def on_exit(self, state: NodeState, cause: str, restart_in_s: float | None) -> None:
        """The node's process ended unasked; it is started again, or given up when `restart_in_s` is None."""

    def on_left(self, state: NodeState) -> None:
        """The node was drained or removed; it does not come back."""

    def on_line(self, node_id: str, line: str) -> None:
        """The node logged a line."""

    def on_change(self) -> None:
        """A pid or a readiness changed, or a node left."""


class KeptNode(Generic[P]):
    """A plan and its present process."""

    def __init__(self, plan: P, log_path: Path, *, on_trial: bool) -> None:
        self.plan = plan
        self.log_path = log_path
        self.log = LogFile(log_path)
        self.running: Running | None = None
        self.announcement: dict[str, Any] | None = None
        self.restarts = 0
        self.on_trial = on_trial
        self.leaving = False
        self.failure: GaveUp | None = None
        self.killed_because = ""
        self.starting = asyncio.Lock()
        self.start_error = ""

    def tail(self) -> tuple[str, ...]:
        """Its last lines, or why it could not be started."""
        if self.running is not None:
            return tuple(self.running.tail)
        return (self.start_error,) if self.start_error else ()

    def state(self) -> NodeState:
        alive = self.running is not None and not self.running.ended.done()
        return NodeState(
            node_id=self.plan.node_id,
            role=self.plan.role,
            pid=self.running.pid if alive and self.running is not None else None,
            announcement=self.announcement,
            restarts=self.restarts,
            log_path=self.log_path,
            leaving=self.leaving,
        )


class GaveUp(Exception):
    """A node is not to be started again."""

    def __init__(self, reason: str, node: KeptNode[Any], child_exit_code: int) -> None:
        super().__init__(f"{node.plan.node_id} {reason}")
        self.reason = reason
        self.node = node
        self.child_exit_code = child_exit_code

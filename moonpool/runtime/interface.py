"""Interface between supervision, which decides when processes start and stop, and the runtimes that do it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from moonpool.supervision.child import LogFile


class NodePlan(Protocol):
    """Attributes of a node that supervision needs; a runtime needs more."""

    @property
    def node_id(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def tier(self) -> int:
        """Lower tiers start first and stop last."""
        ...

    @property
    def stop_grace_s(self) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        ...


class Running(Protocol):
    """One life of a node's process."""

    @property
    def pid(self) -> int | None:
        """Process id of the role on its host; None before its start."""
        ...

    @property
    def tail(self) -> Sequence[str]:
        """The last lines that it logged."""
        ...

    @property
    def drained(self) -> bool:
        """True once it announced that it ends because it was drained."""
        ...

    @property
    def ended(self) -> "asyncio.Task[int]":
        """Task with its exit code, done once its last line was read; negative codes are signals."""
        ...

    def terminate(self) -> None:
        """Request a clean stop."""

    def kill(self) -> None:
        """Kill it and all that it started. Does nothing if it has ended."""


Plan = TypeVar("Plan", bound=NodePlan, contravariant=True)


class Runtime(Protocol[Plan]):
    """Launches nodes' processes."""

    async def launch(
        self,
        plan: Plan,
        log: LogFile,
        *,
        on_ready: Callable[[dict[str, Any]], None],
        on_line: Callable[[str], None],
    ) -> Running:
        """Start one life of the node and return at once; the callbacks run on the event loop.

        Raises OSError if it cannot be started now.
        """
        ...

    def release(self, node_id: str) -> None:
        """Release what is kept for a node that does not come back."""

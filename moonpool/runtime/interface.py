"""The seam between supervision, which decides when a node's process is started and ended, and what does it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from moonpool.supervision.child import LogFile


class NodePlan(Protocol):
    """What supervision must know of a node; a runtime knows more."""

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
        """Between SIGTERM and SIGKILL."""
        ...


class Running(Protocol):
    """One life of a node's process."""

    @property
    def pid(self) -> int | None:
        """Of the role's process on its host; None before it was started."""
        ...

    @property
    def tail(self) -> Sequence[str]:
        """Its last lines."""
        ...

    @property
    def drained(self) -> bool:
        """It said that it ends because the cluster no longer wants it."""
        ...

    @property
    def ended(self) -> "asyncio.Task[int]":
        """Its exit code, once its last line was read; negative codes are signals."""
        ...

    def terminate(self) -> None:
        """Ask for a clean stop."""

    def kill(self) -> None:
        """End it and whatever it started. Without effect on one that has ended."""


Plan = TypeVar("Plan", bound=NodePlan, contravariant=True)


class Runtime(Protocol[Plan]):
    """Starts nodes' processes."""

    async def launch(
        self,
        plan: Plan,
        log: LogFile,
        *,
        on_ready: Callable[[dict[str, Any]], None],
        on_line: Callable[[str], None],
    ) -> Running:
        """Begin one life of the node, and return at once; lines and readiness are told on the event loop.

        Raises OSError when it cannot be begun now.
        """
        ...

    def release(self, node_id: str) -> None:
        """The node does not come back: give up what was kept for it."""

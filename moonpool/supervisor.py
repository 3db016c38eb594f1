"""Keeps the processes of a cluster alive: starts them, brings the dead ones back, ends them all. Knows no role."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.child import Child, ChildPlan
from moonpool.errors import RoleFailed, StartupFailed
from moonpool.log_file import LogFile
from moonpool.restart import CONFIG_EXIT_CODE, GiveUp, RestartPolicy, RestartTracker, exit_text

_CANNOT_START_EXIT_CODE = 126  # the shell's for a command that cannot be executed


@dataclass(frozen=True)
class NodeState:
    """What is known of one node now."""

    node_id: str
    role: str
    pid: int | None  # None: not running
    announcement: dict[str, Any] | None  # its MOONPOOL_READY; None: not ready
    restarts: int
    log_path: Path


class SupervisorEvents:
    """What a supervisor tells; every method may be overridden. Called on the event loop."""

    def on_ready(self, state: NodeState, seconds: float) -> None:
        """The node's process is ready, `seconds` after its start."""

    def on_exit(self, state: NodeState, cause: str, restart_in_s: float | None) -> None:
        """The node's process ended unasked; it is started again, or given up when `restart_in_s` is None."""

    def on_line(self, node_id: str, line: str) -> None:
        """The node logged a line."""

    def on_change(self) -> None:
        """A pid or a readiness changed."""


class Supervisor:
    """Runs the plans' processes until told to stop.

    Use: `async with supervisor:` starts all; `await wait_ready(timeout)`; `await wait_failed()`; leaving the block ends
    every process: SIGTERM by tiers, the highest first, SIGKILL after the plans' grace, or at once after `hurry`.
    """

    def __init__(
        self,
        plans: Sequence[ChildPlan],
        *,
        log_dir: Path,
        events: SupervisorEvents | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._events = events or SupervisorEvents()
        self._policy = policy or RestartPolicy()
        self._nodes = [_Node(plan, log_dir / f"{plan.node_id}.log") for plan in sorted(plans, key=lambda p: p.tier)]
        self._hurry = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._all_ready = asyncio.Event()

    async def __aenter__(self) -> "Supervisor":
        self._tasks = [asyncio.create_task(self._keep(node), name=f"keep-{node.plan.node_id}") for node in self._nodes]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def states(self) -> list[NodeState]:
        """Every node's state, in order of start."""
        return [node.state() for node in self._nodes]

    async def wait_ready(self, timeout_s: float) -> None:
        """Until every node is ready. Raises StartupFailed, with the log's tail, when one never will be."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.unless_failed(self._all_ready.wait())
        except TimeoutError:
            late = next(node for node in self._nodes if node.announcement is None)
            raise self.startup_failure(late.plan.node_id, f"was not ready within {timeout_s:g} s") from None

    async def unless_failed(self, work: Coroutine[Any, Any, Any]) -> None:
        """`work` to its end; raises StartupFailed as soon as a node is given up."""
        working = asyncio.create_task(work)
        try:
            waited: list[asyncio.Task[Any]] = [working, *self._tasks]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure(StartupFailed)
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def wait_failed(self) -> None:
        """Until a node is given up: raises RoleFailed."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._raise_failure(RoleFailed)

    def startup_failure(self, node_id: str, reason: str) -> StartupFailed:
        """The error for a node that is not as it should be, with the tail of its log."""
        node = next(node for node in self._nodes if node.plan.node_id == node_id)
        return StartupFailed(reason, node_id=node_id, log_tail=node.tail(), log_path=str(node.log_path))

    def hurry(self) -> None:
        """Kill instead of waiting for clean stops."""
        self._hurry.set()

    async def stop(self) -> None:
        """End every process; returns when none is left."""
        self._stopping.set()
        for node in self._nodes:
            async with node.starting:  # a process being born must be seen by what follows
                pass
        for tier in sorted({node.plan.tier for node in self._nodes}, reverse=True):
            await self._stop_tier([node for node in self._nodes if node.plan.tier == tier])
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self._nodes:
            node.log.close()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, _GaveUp):
                raise result

    async def _stop_tier(self, nodes: list["_Node"]) -> None:
        running = [node for node in nodes if node.follow is not None and not node.follow.done()]
        if not running:
            return
        for node in running:
            assert node.child is not None
            node.child.terminate()
        follows = [node.follow for node in running if node.follow is not None]
        ended: asyncio.Task[Any] = asyncio.create_task(asyncio.wait(follows))
        hurried: asyncio.Task[Any] = asyncio.create_task(self._hurry.wait())
        grace_s = max(node.plan.stop_grace_s for node in running)
        await asyncio.wait([ended, hurried], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for node in running:
            assert node.child is not None
            node.child.kill()  # without effect on one that has ended
        await ended

    async def _keep(self, node: "_Node") -> None:
        """Run one node's process for ever; raises _GaveUp when it is not to be started again."""
        tracker = RestartTracker(self._policy)
        while True:
            exit_code = await self._run(node, tracker)
            if exit_code is None or self._stopping.is_set():
                return
            decision = tracker.on_exit(time.monotonic_ns(), exit_code)
            node.announcement = None
            delay_s = None if isinstance(decision, GiveUp) else decision.delay_s
            self._events.on_exit(node.state(), exit_text(exit_code), delay_s)
            self._events.on_change()
            if isinstance(decision, GiveUp):
                raise _GaveUp(decision.reason, node, exit_code)
            await asyncio.sleep(decision.delay_s)
            node.restarts += 1

    async def _run(self, node: "_Node", tracker: RestartTracker) -> int | None:
        """One life of a node's process: its exit code; None when the supervisor stops, and nothing was started."""
        started_s = time.monotonic()

        def on_ready(child: Child, announcement: dict[str, Any]) -> None:
            if node.announcement is not None or child is not node.child:
                return
            node.announcement = announcement
            tracker.on_ready(time.monotonic_ns())
            self._events.on_ready(node.state(), time.monotonic() - started_s)
            if all(other.announcement is not None for other in self._nodes):
                self._all_ready.set()
            self._events.on_change()

        def on_line(line: str) -> None:
            self._events.on_line(node.plan.node_id, line)

        async with node.starting:
            if self._stopping.is_set():
                return None
            try:
                node.child, node.follow = await Child.start(node.plan, node.log, on_ready=on_ready, on_line=on_line)
            except OSError as error:  # no memory or no process left to give: later there may be
                node.start_error = f"cannot start {node.plan.argv[0]}: {error}"
                node.log.write(node.start_error)
                on_line(node.start_error)
                return _CANNOT_START_EXIT_CODE
        self._events.on_change()
        return await asyncio.shield(node.follow)

    def _raise_failure(self, kind: type[RoleFailed]) -> None:
        """Raise what ended a node's keeper, as `kind` if the node was given up."""
        for task in self._tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if isinstance(error, _GaveUp):
                node = error.node
                raise kind(
                    error.reason,
                    node_id=node.plan.node_id,
                    log_tail=node.tail(),
                    log_path=str(node.log_path),
                    exit_code=CONFIG_EXIT_CODE if error.child_exit_code == CONFIG_EXIT_CODE else kind.exit_code,
                ) from None
            if error is not None:
                raise error


class _Node:
    """A plan and its present process."""

    def __init__(self, plan: ChildPlan, log_path: Path) -> None:
        self.plan = plan
        self.log_path = log_path
        self.log = LogFile(log_path)
        self.child: Child | None = None
        self.follow: asyncio.Task[int] | None = None
        self.announcement: dict[str, Any] | None = None
        self.restarts = 0
        self.starting = asyncio.Lock()
        self.start_error = ""

    def tail(self) -> tuple[str, ...]:
        if self.child is not None:
            return tuple(self.child.tail)
        return (self.start_error,) if self.start_error else ()

    def state(self) -> NodeState:
        alive = self.child is not None and self.follow is not None and not self.follow.done()
        return NodeState(
            node_id=self.plan.node_id,
            role=self.plan.role,
            pid=self.child.pid if alive and self.child is not None else None,
            announcement=self.announcement,
            restarts=self.restarts,
            log_path=self.log_path,
        )


class _GaveUp(Exception):
    """A node is not to be started again."""

    def __init__(self, reason: str, node: _Node, child_exit_code: int) -> None:
        super().__init__(f"{node.plan.node_id} {reason}")
        self.reason = reason
        self.node = node
        self.child_exit_code = child_exit_code

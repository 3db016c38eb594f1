"""Supervisor of a cluster's processes: starts them, restarts those that die, stops them all.

It depends neither on the nodes' roles nor on the runtime that runs the processes. Everything here runs on one event
loop. Each node has a keeper task (`_keep`), which lives from `add` until the node is forgotten or given up. A node's
`starting` lock is held from the decision to launch until the process is known, so that `stop` and `remove` always see
a process that is being started. `_changed` is replaced by a new event at each change and wakes all waiting tasks.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from moonpool.errors import RoleFailed, StartupFailed
from moonpool.runtime.interface import NodePlan, Running, Runtime
from moonpool.supervision.child import LogFile
from moonpool.supervision.restart import CONFIG_EXIT_CODE, GiveUp, RestartPolicy, RestartTracker, exit_text

P = TypeVar("P", bound=NodePlan)


@dataclass(frozen=True)
class NodeState:
    """State of one node at one moment."""

    node_id: str
    role: str
    pid: int | None  # None: not running
    announcement: dict[str, Any] | None  # its MOONPOOL_READY; None: not ready
    restarts: int
    log_path: Path
    leaving: bool = False


class SupervisorEvents:
    """Callbacks of a supervisor, on the event loop; every method may be overridden."""

    def on_ready(self, state: NodeState, seconds: float) -> None:
        """Called when the node's process is ready, `seconds` after its start."""

    def on_exit(self, state: NodeState, cause: str, restart_in_s: float | None) -> None:
        """Called when the process ended unexpectedly; it is restarted, or given up if `restart_in_s` is None."""

    def on_left(self, state: NodeState) -> None:
        """Called when the node was drained or removed for good."""

    def on_line(self, node_id: str, line: str) -> None:
        """Called with each line that the node logs."""

    def on_change(self) -> None:
        """Called when a pid or a readiness changed, or a node left."""


class SupervisedNode(Generic[P]):
    """A node under supervision: its plan, its current process and its log."""

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
        """Return its last lines, or the reason why it could not be started."""
        if self.running is not None:
            return tuple(self.running.tail)
        return (self.start_error,) if self.start_error else ()

    def state(self) -> NodeState:
        """Return its current state."""
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
    """A node will not be restarted."""

    def __init__(self, reason: str, node: SupervisedNode[Any], child_exit_code: int) -> None:
        super().__init__(f"{node.plan.node_id} {reason}")
        self.reason = reason
        self.node = node
        self.child_exit_code = child_exit_code


_CANNOT_START_EXIT_CODE = 126  # the shell's for a command that cannot be executed
_KILLED_S = 30.0  # limit for the end of a killed process


class Supervisor(Generic[P]):
    """Runs the plans' processes until it is stopped.

    Use: `async with supervisor:` starts all; `await wait_ready(timeout)`; `await wait_failed()`. Leaving the block
    stops every process: SIGTERM by tier, the highest first, then SIGKILL after the plans' grace, at once if hurried.
    """

    def __init__(
        self,
        plans: Sequence[P],
        *,
        runtime: Runtime[P],
        log_dir: Path,
        events: SupervisorEvents | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._runtime = runtime
        self._log_dir = log_dir
        self._events = events or SupervisorEvents()
        self._policy = policy or RestartPolicy()
        self._first_plans = sorted(plans, key=lambda plan: plan.tier)
        self._nodes: dict[str, SupervisedNode[P]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._hurry = asyncio.Event()
        self._let_go = False
        self._stopping = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "Supervisor[P]":
        for plan in self._first_plans:
            self.add(plan)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def states(self) -> list[NodeState]:
        """Return every node's state, in order of start."""
        return [node.state() for node in self._nodes.values()]

    def plans(self) -> dict[str, P]:
        """Return every node's plan by node id."""
        return {node_id: node.plan for node_id, node in self._nodes.items()}

    def add(self, plan: P, *, on_trial: bool = False) -> None:
        """Start another node. A node that never becomes ready stops the cluster, unless it is `on_trial`."""
        node = self._nodes[plan.node_id] = SupervisedNode(
            plan, self._log_dir / f"{plan.node_id}.log", on_trial=on_trial
        )
        self._tasks[plan.node_id] = asyncio.create_task(self._keep(node), name=f"keep-{plan.node_id}")

    async def remove(self, node_id: str, *, grace_s: float) -> None:
        """Remove a node, and return when its process has ended.

        The process has `grace_s` to end by itself before it is killed. It is not restarted.
        """
        node = self._nodes.get(node_id)
        if node is None:
            return
        node.leaving = True
        task = self._tasks[node_id]
        if node.running is not None and not node.running.ended.done():
            await asyncio.wait([task], timeout=grace_s)
            async with node.starting:
                if node.running is not None:
                    node.running.kill()
            await asyncio.wait([task], timeout=_KILLED_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._forget(node)

    def terminate(self, node_id: str) -> None:
        """Request a clean stop of a node's process."""
        node = self._nodes.get(node_id)
        if node is not None and node.running is not None:
            node.running.terminate()

    def restart(self, node_id: str, reason: str) -> None:
        """Kill a process that hangs; it is restarted as after any other exit."""
        node = self._nodes.get(node_id)
        if node is not None and node.running is not None and not node.running.ended.done():
            node.killed_because = reason
            node.running.kill()

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every node is ready. Raises StartupFailed, with the log's tail, if a node is not ready in time."""
        await self._wait_ready(lambda: [n for n in self._nodes.values() if n.announcement is None], timeout_s)

    async def wait_node_ready(self, node_id: str, timeout_s: float) -> None:
        """Wait like `wait_ready`, for one added node."""
        node = self._nodes[node_id]
        await self._wait_ready(lambda: [] if node.announcement is not None or node.failure else [node], timeout_s)
        if node.failure is not None:
            raise self._failure_of(node.failure, StartupFailed)

    async def _wait_ready(self, late: Callable[[], list[SupervisedNode[P]]], timeout_s: float) -> None:
        async def all_ready() -> None:
            while late():
                await self._changed.wait()

        try:
            async with asyncio.timeout(timeout_s):
                await self.unless_failed(all_ready())
        except TimeoutError:
            missing = late()[0]
            raise self.startup_failure(missing.plan.node_id, f"was not ready within {timeout_s:g} s") from None

    async def unless_failed(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` to its end. Raises StartupFailed as soon as a node is given up."""
        working = asyncio.create_task(work)
        failed = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait([working, failed], return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure(StartupFailed)
            await working
        finally:
            for task in (working, failed):
                task.cancel()
            await asyncio.gather(working, failed, return_exceptions=True)

    async def wait_failed(self) -> None:
        """Wait until a node is given up, then raise RoleFailed."""
        await self._failed.wait()
        self._raise_failure(RoleFailed)

    def startup_failure(self, node_id: str, reason: str) -> StartupFailed:
        """Return the error for a node that failed to start, with the tail of its log."""
        node = self._nodes[node_id]
        return StartupFailed(reason, node_id=node_id, log_tail=node.tail(), log_path=str(node.log_path))

    def hurry(self) -> None:
        """Kill instead of waiting for clean stops."""
        self._hurry.set()

    def let_go(self) -> None:
        """Leave the processes running at the stop; a later supervisor takes them over."""
        self._let_go = True

    async def stop(self) -> None:
        """Stop every process, and return when none is left; after `let_go` they keep running, unless `hurry` is set."""
        self._stopping.set()
        nodes = list(self._nodes.values())
        for node in nodes:
            async with node.starting:  # wait for a launch in progress
                pass
        tiers = [] if self._let_go and not self._hurry.is_set() else sorted({node.plan.tier for node in nodes})
        for tier in reversed(tiers):
            await self._stop_tier([node for node in nodes if node.plan.tier == tier])
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for node in nodes:
            node.log.close()
        if self._failure is not None and not isinstance(self._failure, GaveUp):
            raise self._failure

    async def _stop_tier(self, nodes: list[SupervisedNode[P]]) -> None:
        running = [node.running for node in nodes if node.running is not None and not node.running.ended.done()]
        if not running:
            return
        for one in running:
            one.terminate()
        ended: asyncio.Task[Any] = asyncio.create_task(asyncio.wait([one.ended for one in running]))
        hurried: asyncio.Task[Any] = asyncio.create_task(self._hurry.wait())
        grace_s = max(node.plan.stop_grace_s for node in nodes)
        await asyncio.wait([ended, hurried], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        for one in running:
            one.kill()
        await ended

    async def _keep(self, node: SupervisedNode[P]) -> None:
        """Run one node's process, and restart it, until it is removed or given up."""
        try:
            await self._live(node)
        except GaveUp as error:
            node.failure = error
            if node.on_trial or node.leaving:
                self._notify()
            else:
                self._fail(error)
        except Exception as error:
            self._fail(error)

    async def _live(self, node: SupervisedNode[P]) -> None:
        tracker = RestartTracker(self._policy)
        while True:
            exit_code = await self._run(node, tracker)
            if exit_code is None or self._stopping.is_set():
                return
            node.announcement = None
            drained = exit_code == 0 and node.running is not None and node.running.drained
            if drained or node.leaving:
                self._forget(node)
                return
            decision = tracker.on_exit(time.monotonic_ns(), exit_code)
            delay_s = None if isinstance(decision, GiveUp) else decision.delay_s
            self._events.on_exit(node.state(), node.killed_because or exit_text(exit_code), delay_s)
            node.killed_because = ""
            self._notify()
            if isinstance(decision, GiveUp):
                raise GaveUp(decision.reason, node, exit_code)
            await asyncio.sleep(decision.delay_s)
            node.restarts += 1

    async def _run(self, node: SupervisedNode[P], tracker: RestartTracker) -> int | None:
        """Run a node's process once and return its exit code; None if the supervisor stops and nothing was started."""
        started_s = time.monotonic()

        def on_ready(announcement: dict[str, Any]) -> None:
            if node.announcement is None:
                node.announcement = announcement
                node.on_trial = False
                tracker.on_ready(time.monotonic_ns())
                self._events.on_ready(node.state(), time.monotonic() - started_s)
                self._notify()
            elif node.announcement != announcement:  # it stood by, and now serves
                node.announcement = announcement
                self._notify()

        def on_line(line: str) -> None:
            self._events.on_line(node.plan.node_id, line)

        async with node.starting:
            if self._stopping.is_set() or node.leaving:
                return None
            try:
                node.running = await self._runtime.launch(node.plan, node.log, on_ready=on_ready, on_line=on_line)
            except OSError as error:  # out of memory or processes: a later attempt may succeed
                node.start_error = f"cannot start {node.plan.node_id}: {error}"
                node.log.write(node.start_error)
                on_line(node.start_error)
                return _CANNOT_START_EXIT_CODE
        self._notify()
        return await asyncio.shield(node.running.ended)

    def _forget(self, node: SupervisedNode[P]) -> None:
        if self._nodes.get(node.plan.node_id) is node:
            del self._nodes[node.plan.node_id], self._tasks[node.plan.node_id]
            node.log.close()
            self._runtime.release(node.plan.node_id)
            self._events.on_left(node.state())
            self._notify()

    def _notify(self) -> None:
        """Wake all waiting tasks, and call `on_change`."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._events.on_change()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._failed.set()

    def _raise_failure(self, kind: type[RoleFailed]) -> None:
        """Raise the error that ended a node's keeper task, as `kind` if the node was given up."""
        if isinstance(self._failure, GaveUp):
            raise self._failure_of(self._failure, kind)
        if self._failure is not None:
            raise self._failure

    def _failure_of(self, error: GaveUp, kind: type[RoleFailed]) -> RoleFailed:
        return kind(
            error.reason,
            node_id=error.node.plan.node_id,
            log_tail=error.node.tail(),
            log_path=str(error.node.log_path),
            exit_code=CONFIG_EXIT_CODE if error.child_exit_code == CONFIG_EXIT_CODE else kind.exit_code,
        )

"""Carries out a change in the number of workers: new ones start before others drain, so no request is lost."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.errors import ClusterNotFound, DrainRefused, StartupFailed
from moonpool.plan import Planner, RolePlan
from moonpool.scaling.client import drain_node
from moonpool.scaling.counts import changes, workers
from moonpool.supervision.supervisor import Supervisor

_DRAIN_MARGIN_S = 10.0  # added to the worker's own limit


@dataclass(frozen=True)
class ScalingStep:
    """Progress of one node during a change."""

    node_id: str
    what: str  # starting, ready, draining, gone
    seconds: float = 0.0


class Scaler:
    """Scales one running cluster, one change at a time."""

    def __init__(self, supervisor: Supervisor[RolePlan], planner: Planner, *, conductor: str, startup_s: float) -> None:
        self._supervisor = supervisor
        self._planner = planner
        self._conductor = conductor
        self._startup_s = startup_s
        self._lock = asyncio.Lock()

    async def scale(self, wanted: Mapping[str, int], *, force: bool, on_step: Callable[[ScalingStep], None]) -> None:
        """Change the counts, and return when every group has its count.

        Raises ScaleRefused, or StartupFailed if a new worker does not start: it is removed, and nothing was drained.
        """
        async with self._lock:
            present = workers(self._supervisor.states(), self._supervisor.plans())
            todo = changes(present, wanted, self._planner.groups, force=force)
            new = [self._planner.next_worker(change.group) for change in todo for _ in range(change.num_new)]
            await _all([self._start(plan, on_step) for plan in new])
            leaving = [node_id for change in todo for node_id in change.leaving]
            await _all([self._drain(node_id, on_step) for node_id in leaving])

    async def _start(self, plan: RolePlan, on_step: Callable[[ScalingStep], None]) -> None:
        began_s = time.monotonic()
        on_step(ScalingStep(plan.node_id, "starting"))
        self._supervisor.add(plan, on_trial=True)
        try:
            await self._supervisor.wait_node_ready(plan.node_id, self._startup_s)
        except StartupFailed:
            await self._supervisor.remove(plan.node_id, grace_s=0.0)
            raise
        on_step(ScalingStep(plan.node_id, "ready", time.monotonic() - began_s))

    async def _drain(self, node_id: str, on_step: Callable[[ScalingStep], None]) -> None:
        began_s = time.monotonic()
        plan = self._supervisor.plans().get(node_id)
        if plan is None:  # it has left meanwhile
            on_step(ScalingStep(node_id, "gone"))
            return
        grace_s = plan.stop_grace_s
        on_step(ScalingStep(node_id, "draining"))
        removing = asyncio.create_task(self._supervisor.remove(node_id, grace_s=grace_s + _DRAIN_MARGIN_S))
        await asyncio.sleep(0)  # now its exit is expected
        try:
            await drain_node(self._conductor, node_id)
        except (
            DrainRefused,
            ClusterNotFound,
        ):  # it has not joined, or the conductor is away: SIGTERM drains it too
            self._supervisor.terminate(node_id)
        await removing
        on_step(ScalingStep(node_id, "gone", time.monotonic() - began_s))


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all to their ends, then raise the first failure."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result

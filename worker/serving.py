"""A worker's life from ready to gone: start, serve, drain, close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from messenger.control import ControlServer, dialled
from worker.node import WorkerNode
from worker.settle import in_thread

DRAIN_GRACE_S = 20.0
STOP_GRACE_S = 0.5


async def serve_until(
    node: WorkerNode, server: ControlServer, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """Join the cluster and call `on_ready` with the target that others dial; on `stop` take no new work, finish what
    runs, and close.
    """
    try:
        target = dialled(server.target, node.config.advertise)
        await in_thread(node.warm_up)
        if await _unless(stop, _join(node, target)):
            on_ready(target)
            await stop.wait()
            node.draining.set()
            node.reporter.hurry()
            await node.jobs.wait_idle(DRAIN_GRACE_S)
    finally:
        await server.stop(STOP_GRACE_S)
        await node.close()


async def _join(node: WorkerNode, target: str) -> None:
    await node.start(target)
    await node.reporter.first_join()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether `work` ended before `stop` was set; it is cancelled otherwise."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)

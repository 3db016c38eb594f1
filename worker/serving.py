"""A worker's life from ready to gone: start, serve, drain, close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from messenger.control import ControlServer, dialled
from worker.errors import EngineBroken
from worker.node import WorkerNode
from worker.settle import in_thread

STOP_GRACE_S = 0.5


async def serve_until(
    node: WorkerNode, server: ControlServer, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> bool:
    """Join the cluster and call `on_ready` with the target that others dial; on `stop`, or when the conductor says so,
    take no new work, finish what runs, and close. Whether it was the conductor: then the node is not wanted back.

    Raises EngineBroken, once all is closed, when the engine is past hope: a supervisor starts another process.
    """
    drained = False
    try:
        target = dialled(server.target, node.config.advertise)
        await in_thread(node.warm_up)
        if await _unless(stop, _join(node, target)):
            on_ready(target)
            await _first_of(stop, node.draining, node.broken)
            drained = not stop.is_set() and not node.broken.done()
            node.draining.set()
            node.reporter.hurry()
            if node.broken.done():
                raise EngineBroken(f"the engine of {node.config.node_id} is broken: {node.broken.result()}")
            await node.jobs.wait_idle(node.config.drain_grace_s)
    finally:
        await server.stop(STOP_GRACE_S)
        await node.close()
    return drained


async def _first_of(stop: asyncio.Event, draining: asyncio.Event, broken: asyncio.Future[str]) -> None:
    waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(event.wait()) for event in (stop, draining)]
    try:
        await asyncio.wait([*waits, broken], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


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

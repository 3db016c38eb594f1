"""A worker's life from ready to gone: start, serve, drain, close."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from messenger.control import ControlServer
from worker.node import WorkerNode

DRAIN_GRACE_S = 20.0
STOP_GRACE_S = 0.5


async def serve_until(
    node: WorkerNode, server: ControlServer, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """Join the cluster, call `on_ready(target)`, and on `stop` take no new work, finish what runs, and close."""
    try:
        await asyncio.to_thread(node.warm_up)
        await node.start(server.target)
        await node.reporter.first_join()
        on_ready(server.target)
        await stop.wait()
        node.draining.set()
        await node.wait_idle(DRAIN_GRACE_S)
    finally:
        await server.stop(STOP_GRACE_S)
        await node.close()

"""Lifecycle of a worker process: start, serve, drain, close."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

from rpc.control import ControlServer, target_to_dial
from rpc.waiting import first_of
from worker.engine_node import EngineNode
from worker.errors import EngineBroken
from worker.policy import StepWatch
from worker.shielded_wait import in_thread

log = logging.getLogger(__name__)

STOP_GRACE_S = 0.5


async def serve_until(
    node: EngineNode, server: ControlServer, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> bool:
    """Join the cluster, serve, and on `stop` or a conductor's drain finish running requests and close.

    Calls `on_ready` with the node's gRPC target once it has joined. Returns True if a conductor drained the node, which
    must then not be restarted. Raises EngineBroken after closing if the engine fails every step: a supervisor then
    starts another process. The process ends at once if a step never ends.
    """
    drained = False
    watching = asyncio.create_task(_watch_steps(node))
    try:
        target = target_to_dial(server.target, node.config.host.advertise)
        await in_thread(node.warm_up)
        if await _unless(stop, _join(node, target)):
            on_ready(target)
            await first_of(stop, node.draining, node.broken)
            drained = not stop.is_set() and not node.broken.done()
            node.draining.set()
            node.reporter.hurry()
            if node.broken.done():
                raise EngineBroken(f"the engine of {node.config.node_id} is broken: {node.broken.result()}")
            await node.jobs.wait_idle(node.config.engine.worker_drain_grace_s)
    finally:
        await server.stop(STOP_GRACE_S)
        await node.close()
        watching.cancel()
    return drained


async def _watch_steps(node: EngineNode) -> None:
    """End the process, as SIGKILL would, if a step of the engine takes longer than `step_timeout_s`.

    Nothing is closed: the engine's thread cannot be stopped, and may still use all memory. Others notice within
    milliseconds that the connections to this process broke.
    """
    timeout_s, watch = node.config.engine.step_timeout_s, StepWatch()
    while timeout_s:
        await asyncio.sleep(timeout_s / watch.LOOKS)
        if watch.look(node.engine.step_in_progress):
            log.critical(
                "a step of the engine of %s has not ended within --step-timeout (%g s): the worker ends now, and its "
                "requests move to other workers",
                *(node.config.node_id, timeout_s),
            )
            logging.shutdown()
            os._exit(1)


async def _join(node: EngineNode, target: str) -> None:
    await node.start(target)
    await node.reporter.first_join()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Return True if `work` ended before `stop` was set; otherwise cancel it and return False."""
    working = asyncio.ensure_future(work)
    try:
        await first_of(working, stop)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

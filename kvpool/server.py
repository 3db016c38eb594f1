"""The life of a pool node's process: start, listen, join, serve, stop."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import grpc.aio

from kvpool.config import PoolNodeConfig
from kvpool.local.door import open_door
from kvpool.membership import stay_joined
from kvpool.node import PoolNode
from kvpool.service import PoolService
from moonpool_proto.v1 import pool_pb2_grpc
from rpc.control import dialled, start_server

__all__ = ["serve_pool_node"]

_STOP_GRACE_S = 1.0


async def serve_pool_node(config: PoolNodeConfig, stop: asyncio.Event, on_ready: Callable[[str], None]) -> bool:
    """Serve until `stop` is set, or until the conductor has the node drained: whether it had.

    `on_ready(target)`, with the target that others dial, is called once calls are answered, joined to a conductor or
    not. Each run is a new incarnation with an empty arena. Raises AddressInUse or BindFailed when it cannot listen.
    """
    node = PoolNode(config, secrets.randbits(64))
    await node.start()
    door = None
    try:
        door = await open_door(node)

        def add(server: grpc.aio.Server) -> None:
            pool_pb2_grpc.add_PoolServicer_to_server(PoolService(node), server)

        server = await start_server(config.listen, add)
        target = dialled(server.target, config.advertise)
        drained = asyncio.create_task(_drained(node))
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(stop.wait()), drained]
        try:
            joins = (stay_joined(node, target, conductor) for conductor in config.conductor_targets)
            tasks.extend(asyncio.create_task(join) for join in joins)
            on_ready(target)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return drained in done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            node.stop_events()
            await server.stop(_STOP_GRACE_S)
    finally:
        if door is not None:
            await door.close()
        await node.close()


async def _drained(node: PoolNode) -> None:
    await node.draining.wait()
    await node.wait_unused()

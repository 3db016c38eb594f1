"""Worker process. It can run every phase; its role determines which requests the conductor sends it."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import grpc

from decode_node.server import DecodeService
from moonpool_proto.v1.common_pb2 import ROLE_AGGREGATED, ROLE_DECODE, ROLE_PREFILL, Role
from moonpool_proto.v1.pool_pb2_grpc import add_OwnBlocksServicer_to_server
from moonpool_proto.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from prefill_node.server import PrefillService
from rpc.control import start_server
from telemetry import RoleMetrics
from worker.aggregated import AggregatedService
from worker.config import WorkerConfig
from worker.node import WorkerNode
from worker.servicer import WorkerService
from worker.serving import serve_until

_ROLES = {"prefill": ROLE_PREFILL, "decode": ROLE_DECODE, "aggregated": ROLE_AGGREGATED}


async def serve_worker(
    config: WorkerConfig,
    role: str,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    metrics: RoleMetrics | None = None,
) -> bool:
    """Run a worker with the initial role "prefill", "decode" or "aggregated" until `stop` is set or it is drained.

    Returns True if it was drained.
    """
    closing = AsyncExitStack()
    node = _node(config, _ROLES[role])
    prefill, decode = PrefillService(node), DecodeService(node)
    closing.push_async_callback(prefill.close)
    face = WorkerService(
        node,
        prefill=prefill.serve,
        whole=AggregatedService(node).serve,
        decode=decode,
        helper=prefill.helper,
    )

    def ready(target: str) -> None:
        if metrics is not None:
            metrics.export_node(node.sample)
        on_ready(target)

    def add_services(server: grpc.aio.Server) -> None:
        add_WorkerServicer_to_server(face, server)
        add_OwnBlocksServicer_to_server(node.own_blocks, server)

    server = await start_server(config.listen.listen, add_services)
    try:
        return await serve_until(node, server, stop, ready)
    finally:
        await closing.aclose()


def _node(config: WorkerConfig, role: Role.ValueType) -> WorkerNode:
    if config.engine.engine != "vllm":
        return WorkerNode(config, role)
    from vllm_worker.node import VllmNode

    return VllmNode(config, role)

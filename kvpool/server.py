"""Life of a pool node's process: start, listen, join the conductors, serve, stop."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from kvpool import node_metrics
from kvpool.config import PoolNodeConfig
from kvpool.local.server import start_local_pool_server
from kvpool.node import PoolNode
from kvpool.service import PoolService
from messenger.frames import VERSION as KV_WIRE
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc, pool_pb2_grpc
from rpc.control import control_error, end_if_cancelled, open_channel, outgoing, start_server, target_to_dial
from rpc.metric_samples import node_sample
from rpc.versions import named, own_software
from rpc.waiting import Backoff
from telemetry import RoleMetrics

_log = logging.getLogger(__name__)


async def stay_joined(node: PoolNode, target: str, conductor: str) -> None:
    """Stay joined to the conductor at `conductor` until cancelled; reconnect after every failure.

    `target` is the address under which others reach this node.
    """
    last_trouble = ""
    backoff = Backoff()
    while True:
        channel = open_channel(conductor)
        try:
            stub: conductor_pb2_grpc.ConductorAsyncStub = conductor_pb2_grpc.ConductorStub(channel)
            reports = outgoing(_reports(node, target), what="Conductor.Join", target=conductor)
            async for command in stub.Join(reports):
                if command.HasField("accepted"):
                    _log.info("joined the conductor at %s, %s", conductor, named(command.accepted.software))
                    last_trouble = ""
                    backoff.succeeded()
                elif command.HasField("drain"):
                    node.draining.set()
            trouble = "it closed the stream"
        except grpc.aio.AioRpcError as error:
            trouble = control_error(error, what="Conductor.Join", target=conductor).reason
        finally:
            await channel.close()
        end_if_cancelled()
        if trouble != last_trouble:
            _log.warning("not joined to the conductor at %s, retrying: %s", conductor, trouble)
            last_trouble = trouble
        await asyncio.sleep(backoff.failed())


async def _reports(node: PoolNode, target: str) -> AsyncIterator[conductor_pb2.NodeReport]:
    endpoint = node.messenger.endpoint
    first = _report(node)
    first.node.CopyFrom(
        conductor_pb2.Node(
            node_id=node.config.node_id,
            role=common_pb2.ROLE_POOL,
            incarnation=node.incarnation,
            target=target,
            endpoint=endpoint.to_proto(),
            host_id=node.config.host.host_id or endpoint.host_id,
            software=own_software(kv_wire=KV_WIRE),
        )
    )
    num_reported = 0 if node.ssd is None else node.ssd.loader.num_measured
    yield first
    while True:
        await asyncio.sleep(node.config.report_s)
        report = _report(node)
        if node.ssd is not None:
            loader, num_new = node.ssd.loader, node.ssd.loader.num_measured - num_reported
            num_reported = loader.num_measured
            for nbytes, seconds in list(loader.measured)[-num_new:] if num_new else []:
                report.transfers.add(bytes=nbytes, seconds=seconds, path="ssd_read")
        yield report


def _report(node: PoolNode) -> conductor_pb2.NodeReport:
    """Return a report of counters and gauges; most other fields are for nodes that run requests."""
    values = node_metrics.counters(node) | node_metrics.gauges(node)
    return conductor_pb2.NodeReport(
        draining=node.draining.is_set(), counters={name: float(value) for name, value in values.items()}
    )


_STOP_GRACE_S = 1.0


async def serve_pool_node(
    config: PoolNodeConfig,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    metrics: RoleMetrics | None = None,
) -> bool:
    """Serve until `stop` is set or the conductor drains the node. Returns True if it was drained.

    `on_ready(target)` is called with the address that others dial as soon as calls are answered, whether or not a
    conductor was joined. Each run is a new incarnation with an empty arena. Raises AddressInUse or BindFailed if the
    server cannot listen, PoolConfigError if arena or SSD tier cannot be opened.
    """
    node = PoolNode(config, secrets.randbits(64))
    await node.start()
    if metrics is not None:
        about = conductor_pb2.Node(node_id=config.node_id, role=common_pb2.ROLE_POOL)
        metrics.export_node(lambda: node_sample(about, _report(node)))
    local_server = None
    try:
        local_server = await start_local_pool_server(node)

        def add(server: grpc.aio.Server) -> None:
            pool_pb2_grpc.add_PoolServicer_to_server(PoolService(node), server)

        server = await start_server(config.listen.listen, add)
        target = target_to_dial(server.target, config.host.advertise)
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
            node.event_streams.close()
            await server.stop(_STOP_GRACE_S)
    finally:
        if local_server is not None:
            await local_server.close()
        await node.close()


async def _drained(node: PoolNode) -> None:
    await node.draining.wait()
    await node.wait_unused()

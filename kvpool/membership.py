"""A pool node's place in the cluster: joins a conductor, reports every second, joins again for ever."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc.aio

from kvpool import node_numbers
from kvpool.node import PoolNode
from messenger.frames import VERSION as KV_WIRE
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc
from rpc.backoff import Backoff
from rpc.control import control_error, end_if_cancelled, open_channel, outgoing
from rpc.versions import named, own_software

__all__ = ["stay_joined"]

_log = logging.getLogger(__name__)


async def stay_joined(node: PoolNode, target: str, conductor: str) -> None:
    """Be a member of the conductor at `conductor`, reachable at `target`, until cancelled."""
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
            trouble = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            trouble = control_error(error, what="Conductor.Join", target=conductor).reason
        finally:
            await channel.close()
        end_if_cancelled()
        if trouble != last_trouble:
            _log.warning("not joined to the conductor at %s, trying on: %s", conductor, trouble)
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
            host_id=node.config.host_id or endpoint.host_id,
            software=own_software(kv_wire=KV_WIRE),
        )
    )
    yield first
    while True:
        await asyncio.sleep(node.config.report_s)
        yield _report(node)


def _report(node: PoolNode) -> conductor_pb2.NodeReport:
    """Totals and gauges alone: a pool node runs no requests."""
    values = node_numbers.counters(node) | node_numbers.gauges(node)
    return conductor_pb2.NodeReport(
        draining=node.draining.is_set(), counters={name: float(value) for name, value in values.items()}
    )

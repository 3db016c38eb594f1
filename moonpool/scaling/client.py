"""Requests of the commands `scale`, `drain` and `switch` to a running cluster, and what they print of the replies."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from moonpool.cluster_view.collector import ask_cluster, call_conductor
from moonpool.cluster_view.failed_calls import conductor_silent
from moonpool.cluster_view.reply import role_name
from moonpool.errors import ClusterNotFound, DrainRefused, MoonpoolError, ScaleRefused
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.supervisor_pb2 import ScaleRequest
from moonpool_proto.v1.supervisor_pb2_grpc import SupervisorStub
from rpc.control import CallRefused, ControlError, control_error, open_channel

ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
_POLL_S = 0.2


async def drain_node(conductor: str, node_id: str) -> None:
    """Ask the conductor to drain a node, without waiting for it. Raises DrainRefused, ClusterNotFound."""
    await _order(conductor, "DrainNode", conductor_pb2.DrainNodeRequest(node_id=node_id), DrainRefused)


def last_of_its_kind(cluster: conductor_pb2.ClusterReply, node_id: str) -> bool:
    """Return True if the node's model can be served now, but not without this node."""
    model = next((status.node.model for status in cluster.nodes if status.node.node_id == node_id), "")
    remaining = {
        status.node.role
        for status in cluster.nodes
        if status.node.model == model and not status.report.draining and status.node.node_id != node_id
    }
    serves = common_pb2.ROLE_AGGREGATED in remaining or remaining >= {common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE}
    return bool(model) and model in cluster.ready_models and not serves


async def ask_to_scale(target: str, wanted: Mapping[str, int], *, force: bool) -> None:
    """Change the counts by a call to `serve` at `target`, print each step, and return when all is done.

    Raises ScaleRefused, ClusterNotFound, or MoonpoolError when the change failed.
    """
    changed = False
    async with open_channel(target) as channel:
        try:
            async for step in SupervisorStub(channel).Scale(ScaleRequest(counts=wanted, force=force)):
                changed = True
                took = f" after {step.seconds:.1f} s" if step.what in ("ready", "gone") else ""
                print(f"{step.node_id:<18} {step.what}{took}", flush=True)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise ScaleRefused(error.details() or "refused") from error
            if error.code() == grpc.StatusCode.ABORTED:
                raise MoonpoolError(error.details() or "it failed") from error
            reason = control_error(error, what="Supervisor.Scale", target=target)
            raise ClusterNotFound(f"no `moonpool serve` answers: {reason}") from error
    if not changed:
        print("nothing to do: the cluster has the requested counts")


async def drain_and_wait(conductor: str, node_id: str, *, force: bool, wait_s: float) -> None:
    """Drain the node and wait until it has left. Raises DrainRefused, ClusterNotFound."""
    if not force and last_of_its_kind(await ask_cluster(conductor), node_id):
        raise DrainRefused(f"without {node_id} its model cannot be served; --force drains it anyway")
    await drain_node(conductor, node_id)
    print(f"{node_id} is draining", flush=True)

    def has_left(node: conductor_pb2.NodeStatus | None) -> str:
        return f"{node_id} has left" if node is None else ""

    if not await _wait_for(conductor, node_id, has_left, wait_s) and wait_s:
        raise DrainRefused(f"{node_id} has not left after {wait_s:g} s; it continues to drain")


async def switch_and_wait(conductor: str, node_id: str, role: str, *, wait_s: float) -> None:
    """Change the node's role and wait until it has changed. Raises ScaleRefused, ClusterNotFound."""
    request = conductor_pb2.SwitchNodeRequest(node_id=node_id, role=ROLES[role])
    await _order(conductor, "SwitchNode", request, ScaleRefused)
    print(f"{node_id} finishes its requests", flush=True)
    began_s = time.monotonic()

    def has_switched(node: conductor_pb2.NodeStatus | None) -> str:
        if node is None:
            raise ScaleRefused(f"{node_id} has left")
        switched = role_name(node.node.role) == role
        return f"{node_id} is a {role} node after {time.monotonic() - began_s:.1f} s" if switched else ""

    if not await _wait_for(conductor, node_id, has_switched, wait_s) and wait_s:
        raise ScaleRefused(
            f"{node_id} is not a {role} node after {wait_s:g} s: a prefill node keeps its role if its prompts are not "
            "finished within --worker-drain-grace; try again"
        )


async def _order(conductor: str, method: str, request: Any, refused: type[MoonpoolError]) -> None:
    """Call a method of the conductor. Raises `refused` with its reason, or ClusterNotFound."""
    try:
        await call_conductor(conductor, method, request)
    except CallRefused as error:
        raise refused(error.reason) from error
    except ControlError as error:
        raise conductor_silent(error) from error


async def _wait_for(
    conductor: str, node_id: str, news: Callable[[conductor_pb2.NodeStatus | None], str], wait_s: float
) -> bool:
    """Poll the node until `news` of it is not empty, and print that; return False after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while time.monotonic() < deadline_s:
        nodes = (await ask_cluster(conductor)).nodes
        if text := news(next((status for status in nodes if status.node.node_id == node_id), None)):
            print(text)
            return True
        await asyncio.sleep(_POLL_S)
    return False

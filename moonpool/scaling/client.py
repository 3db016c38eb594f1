"""Asks the conductor to let one node finish its work and leave.

What `scale` and `drain` ask of a running cluster, and what they print of its answers.

What `switch` asks of the conductor, and what it prints of the node's way to its other role.
"""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import grpc

from moonpool.cluster_view.collector import ask_cluster
from moonpool.cluster_view.status import role_name
from moonpool.errors import ClusterNotFound, DrainRefused, MoonpoolError, ScaleRefused
from moonpool.supervision.run_dir import supervisor_target
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from moonpool_proto.v1.supervisor_pb2 import ScaleRequest
from moonpool_proto.v1.supervisor_pb2_grpc import SupervisorStub
from rpc.control import CallRefused, ControlError, call, control_error, open_channel

_ANSWER_S = 10.0


async def drain_node(conductor: str, node_id: str) -> None:
    """Returns once the node was asked. Raises DrainRefused, or ClusterNotFound when the conductor does not answer."""
    async with open_channel(conductor) as channel:
        asked = ConductorStub(channel).DrainNode(conductor_pb2.DrainNodeRequest(node_id=node_id))
        try:
            await call(asked, what="Conductor.DrainNode", target=conductor, deadline_s=_ANSWER_S)
        except CallRefused as error:
            raise DrainRefused(error.reason) from error
        except ControlError as error:
            raise ClusterNotFound(f"the conductor does not answer: {error}") from error


def last_of_its_kind(cluster: conductor_pb2.ClusterReply, node_id: str) -> bool:
    """Whether nothing could serve the node's model once it has left, while something can now."""
    model = next((status.node.model for status in cluster.nodes if status.node.node_id == node_id), "")
    stays = [
        status.node
        for status in cluster.nodes
        if status.node.model == model and not status.report.draining and status.node.node_id != node_id
    ]
    roles = {node.role for node in stays}
    serves = common_pb2.ROLE_AGGREGATED in roles or {common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE} <= roles
    return bool(model) and model in cluster.ready_models and not serves


_POLL_S = 0.2


async def ask_to_scale(run_dir: Path, wanted: Mapping[str, int], *, force: bool) -> None:
    """Until it is done, telling each step. Raises ScaleRefused, ClusterNotFound, or MoonpoolError when it failed."""
    target = supervisor_target(run_dir)
    seen = False
    async with open_channel(target) as channel:
        try:
            async for step in SupervisorStub(channel).Scale(ScaleRequest(counts=wanted, force=force)):
                seen = True
                took = f" after {step.seconds:.1f} s" if step.what in ("ready", "gone") else ""
                print(f"{step.node_id:<18} {step.what}{took}", flush=True)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise ScaleRefused(error.details() or "refused") from error
            if error.code() == grpc.StatusCode.ABORTED:
                raise MoonpoolError(error.details() or "it failed") from error
            told = control_error(error, what="Supervisor.Scale", target=target)
            raise ClusterNotFound(f"no `moonpool serve` answers in {run_dir}: {told}") from error
    if not seen:
        print("nothing to do: these are the counts already")


async def drain_and_wait(conductor: str, node_id: str, *, force: bool, wait_s: float) -> None:
    """Have the node drained, and wait until it has left. Raises DrainRefused or ClusterNotFound."""

    if not force and last_of_its_kind(await ask_cluster(conductor), node_id):
        raise DrainRefused(
            f"{node_id} is the last that its model cannot be served without; --force drains it all the same"
        )
    await drain_node(conductor, node_id)
    print(f"{node_id} is draining", flush=True)
    deadline_s = time.monotonic() + wait_s
    while time.monotonic() < deadline_s:
        cluster = await ask_cluster(conductor)
        if all(status.node.node_id != node_id for status in cluster.nodes):
            print(f"{node_id} has left")
            return
        await asyncio.sleep(_POLL_S)
    if wait_s:
        raise DrainRefused(f"{node_id} is still there after {wait_s:g} s; it goes on draining")


ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}


async def switch_and_wait(conductor: str, node_id: str, role: str, *, wait_s: float) -> None:
    """Have the node change its role, and wait until it has. Raises ScaleRefused or ClusterNotFound."""
    async with open_channel(conductor) as channel:
        asked = ConductorStub(channel).SwitchNode(conductor_pb2.SwitchNodeRequest(node_id=node_id, role=ROLES[role]))
        try:
            await call(asked, what="Conductor.SwitchNode", target=conductor, deadline_s=_ANSWER_S)
        except CallRefused as error:
            raise ScaleRefused(error.reason) from error
        except ControlError as error:
            raise ClusterNotFound(f"the conductor does not answer: {error}") from error
    print(f"{node_id} finishes what it has", flush=True)
    began_s = time.monotonic()
    while time.monotonic() < began_s + wait_s:
        status = next(
            (status for status in (await ask_cluster(conductor)).nodes if status.node.node_id == node_id), None
        )
        if status is None:
            raise ScaleRefused(f"{node_id} has left")
        if role_name(status.node.role) == role:
            print(f"{node_id} is a {role} node after {time.monotonic() - began_s:.1f} s")
            return
        await asyncio.sleep(_POLL_S)
    if wait_s:
        raise ScaleRefused(
            f"{node_id} is no {role} node after {wait_s:g} s: a prefill node whose prompts are not over within its "
            "--worker-drain-grace stays what it is; ask again"
        )

"""What `scale` and `drain` ask of a running cluster, and what they print of its answers."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import grpc

from moonpool.draining import drain_node, last_of_its_kind
from moonpool.errors import ClusterNotFound, DrainRefused, MoonpoolError, ScaleRefused
from moonpool.questions import ask_cluster
from moonpool.supervisor_service import supervisor_target
from moonpool_proto.v1.supervisor_pb2 import ScaleRequest
from moonpool_proto.v1.supervisor_pb2_grpc import SupervisorStub
from rpc.control import control_error, open_channel

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

"""What `switch` asks of the conductor, and what it prints of the node's way to its other role."""

import asyncio
import time

from moonpool.errors import ClusterNotFound, ScaleRefused
from moonpool.questions import ask_cluster
from moonpool.status import role_name
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from rpc.control import ControlError, Refused, call, open_channel

ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
_ANSWER_S = 10.0
_POLL_S = 0.2


async def switch_and_wait(conductor: str, node_id: str, role: str, *, wait_s: float) -> None:
    """Have the node change its role, and wait until it has. Raises ScaleRefused or ClusterNotFound."""
    async with open_channel(conductor) as channel:
        asked = ConductorStub(channel).SwitchNode(conductor_pb2.SwitchNodeRequest(node_id=node_id, role=ROLES[role]))
        try:
            await call(asked, what="Conductor.SwitchNode", target=conductor, deadline_s=_ANSWER_S)
        except Refused as error:
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

"""Asks the conductor to let one node finish its work and leave."""

from moonpool.errors import ClusterNotFound, DrainRefused
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from rpc.control import ControlError, Refused, call, open_channel

_ANSWER_S = 10.0


async def drain_node(conductor: str, node_id: str) -> None:
    """Returns once the node was asked. Raises DrainRefused, or ClusterNotFound when the conductor does not answer."""
    async with open_channel(conductor) as channel:
        asked = ConductorStub(channel).DrainNode(conductor_pb2.DrainNodeRequest(node_id=node_id))
        try:
            await call(asked, what="Conductor.DrainNode", target=conductor, deadline_s=_ANSWER_S)
        except Refused as error:
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

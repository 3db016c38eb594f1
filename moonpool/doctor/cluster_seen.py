"""What can be seen of a running cluster from here: what its conductors, nodes and front doors say. Judges nothing."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from moonpool.doctor.peers import Peer, observe_peer
from moonpool.errors import ClusterNotFound, ConfigError, SloNotChanged
from moonpool.locate import Located
from moonpool.questions import ask_conductor, conductors_of
from moonpool.slo_client import ask_slo
from moonpool_proto.v1 import common_pb2
from moonpool_proto.v1.pool_pb2_grpc import PoolStub
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import ControlError, call, open_channel

if TYPE_CHECKING:
    from moonpool_proto.v1 import conductor_pb2

_ANSWER_S: Final = 5.0
_AT_A_TIME: Final = 32


@dataclass(frozen=True)
class FrontDoor:
    """A front door's own word: `trouble` is why it takes no requests, "" when it does."""

    url: str
    trouble: str


@dataclass(frozen=True)
class ClusterSeen:
    """All that was seen, at one moment or nearly so."""

    conductors: "Mapping[str, conductor_pb2.ClusterReply | str]"  # by name; text: why it did not answer
    objectives: "conductor_pb2.ShowSloReply | str"
    silent: Mapping[str, str]  # nodes whose control port did not answer from here, and why
    doors: Mapping[str, Peer]  # what came of a greeting at the nodes' KV ports
    fronts: Sequence[FrontDoor]

    @property
    def told(self) -> "conductor_pb2.ClusterReply":
        """What the first conductor that answers says. Raises ClusterNotFound if none does."""
        for reply in self.conductors.values():
            if not isinstance(reply, str):
                return reply
        raise ClusterNotFound("; ".join(map(str, self.conductors.values())))


async def observe_cluster(located: Located, further: Sequence[str] = ()) -> ClusterSeen:
    """`further`: gRPC addresses of other conductors. Raises ClusterNotFound when no conductor answers."""
    targets = conductors_of(located) | {target: target for target in further}
    replies = await asyncio.gather(*map(_asked, targets.values()))
    seen = ClusterSeen(dict(zip(targets, replies, strict=True)), "", {}, {}, ())
    nodes = seen.told.nodes
    few = asyncio.Semaphore(_AT_A_TIME)

    async def greeted(address: str) -> Peer:
        async with few:
            return await asyncio.to_thread(observe_peer, address)

    async def called(node: "conductor_pb2.Node") -> str:
        async with few:
            return await _trouble(node)

    at = {item.node.node_id: _kv_address(item.node) for item in nodes if item.node.endpoint.tcp_port}
    objectives, troubles, doors, fronts = await asyncio.gather(
        _objectives(next(targets[name] for name, reply in seen.conductors.items() if not isinstance(reply, str))),
        asyncio.gather(*(called(item.node) for item in nodes)),
        asyncio.gather(*map(greeted, at.values())),
        asyncio.gather(*(asyncio.to_thread(_front_door, url) for url in located.urls)),
    )
    silent = {item.node.node_id: why for item, why in zip(nodes, troubles, strict=True) if why}
    return ClusterSeen(seen.conductors, objectives, silent, dict(zip(at, doors, strict=True)), fronts)


async def _asked(target: str) -> "conductor_pb2.ClusterReply | str":
    try:
        return await ask_conductor(target, deadline_s=_ANSWER_S)
    except ControlError as error:
        return str(error)


async def _trouble(node: "conductor_pb2.Node") -> str:
    """Why it does not answer; "" when it does."""
    async with open_channel(node.target) as channel:
        stub = (PoolStub if node.role == common_pb2.ROLE_POOL else WorkerStub)(channel)
        try:
            await call(stub.State(common_pb2.JsonRequest()), what="State", target=node.target, deadline_s=_ANSWER_S)
        except ControlError as error:
            return str(error)
    return ""


async def _objectives(target: str) -> "conductor_pb2.ShowSloReply | str":
    try:
        return await ask_slo(target)
    except (ClusterNotFound, ConfigError, SloNotChanged) as error:
        return str(error)


def _kv_address(node: "conductor_pb2.Node") -> str:
    host = node.endpoint.tcp_host
    return f"[{host}]:{node.endpoint.tcp_port}" if ":" in host else f"{host}:{node.endpoint.tcp_port}"


def _front_door(url: str) -> FrontDoor:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/ready", timeout=_ANSWER_S):
            return FrontDoor(url, "")
    except urllib.error.HTTPError as error:
        with error:
            return FrontDoor(url, _reason(error.read(1 << 16)) or f"answers with status {error.code}")
    except (OSError, ValueError) as error:
        return FrontDoor(url, f"does not answer: {error}")


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return ""

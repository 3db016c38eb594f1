"""Asks a cluster's processes: what the conductor knows of the nodes, and every role's own Validate.

Asks a live cluster's pool nodes: their state, single blocks, to be emptied, to be verified. No printing.

What can be seen of a running cluster from here: what its conductors, nodes and front doors say. Judges nothing.
"""

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvpool import KvPoolError
from kvpool.client import PoolClient
from kvpool.handles import Flushed, Verified
from moonpool.cluster_view.locate import Located
from moonpool.cluster_view.pool_status import (
    PoolNodeFigures,
    PoolStatus,
    is_pool,
    node_figures,
    pool_status,
    silent_node,
)
from moonpool.cluster_view.status import role_name
from moonpool.doctor.peers import Peer, observe_peer
from moonpool.errors import ClusterNotFound, ConfigError, PoolNotAsked, SloNotChanged
from moonpool.slo.client import ask_slo
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from moonpool_proto.v1.pool_pb2_grpc import PoolStub
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import ControlError, call, open_channel
from rpc.errors import NetworkError

if TYPE_CHECKING:
    from moonpool_proto.v1 import conductor_pb2


ANSWER_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Answer:
    """One process's Validate."""

    node_id: str
    role: str
    target: str
    ok: bool
    problems: tuple[str, ...] = ()
    counts: dict[str, Any] = field(default_factory=dict)


async def ask_cluster(conductor: str) -> conductor_pb2.ClusterReply:
    """The nodes as the conductor sees them. Raises ClusterNotFound when it does not answer."""
    try:
        return await ask_conductor(conductor, deadline_s=ANSWER_DEADLINE_S)
    except ControlError as error:
        raise ClusterNotFound(f"the conductor does not answer: {error}") from error


async def ask_conductor(conductor: str, *, deadline_s: float) -> conductor_pb2.ClusterReply:
    """The same; raises messenger's ControlError."""
    async with open_channel(conductor) as channel:
        return await call(
            ConductorStub(channel).Cluster(conductor_pb2.ClusterRequest()),
            what="Conductor.Cluster",
            target=conductor,
            deadline_s=deadline_s,
        )


async def validate_cluster(located: Located, *, admin_key: str = "") -> list[Answer]:
    """Every process's answer, the conductors' first; one that does not answer is an answer with a problem.

    `admin_key`: for front doors that have admins' API keys.
    """
    cluster = await ask_cluster(located.conductor)
    asked = [_validate(name, "conductor", target, ConductorStub) for name, target in conductors_of(located).items()]
    for status in cluster.nodes:
        stub = PoolStub if status.node.role == common_pb2.ROLE_POOL else WorkerStub
        asked.append(_validate(status.node.node_id, role_name(status.node.role), status.node.target, stub))
    asked += [_validate_frontend(url, admin_key) for url in located.urls]
    answers = list(await asyncio.gather(*asked))
    return answers + _not_joined(located, {answer.node_id for answer in answers})


def conductors_of(located: Located) -> dict[str, str]:
    """Targets by name: the one that was asked for, and what else of them `serve` started."""
    further = located.ready.nodes.items() if located.ready is not None else ()
    return {"conductor": located.conductor} | {name: node.target for name, node in further if node.role == "conductor"}


def _not_joined(located: Located, seen: set[str]) -> list[Answer]:
    """The nodes that `serve` started and the conductor does not know."""
    if located.ready is None:
        return []
    return [
        Answer(node_id, node.role, node.target, ok=False, problems=("the conductor does not know it",))
        for node_id, node in located.ready.nodes.items()
        if node_id not in seen
    ]


async def _validate(node_id: str, role: str, target: str, stub: Callable[[Any], Any]) -> Answer:
    async with open_channel(target) as channel:
        rpc: Awaitable[common_pb2.JsonReply] = stub(channel).Validate(common_pb2.JsonRequest())
        try:
            reply = await call(rpc, what="Validate", target=target, deadline_s=ANSWER_DEADLINE_S)
        except ControlError as error:
            return Answer(node_id, role, target, ok=False, problems=(f"no answer: {error}",))
    return _answer(node_id, role, target, reply.json)


async def _validate_frontend(url: str, admin_key: str) -> Answer:
    def fetch() -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        asked = urllib.request.Request(f"{url}/validate", headers=headers)
        with opener.open(asked, timeout=ANSWER_DEADLINE_S) as reply:
            return str(reply.read().decode())

    try:
        text = await asyncio.to_thread(fetch)
    except urllib.error.HTTPError as error:
        error.close()
        hint = "; give an admin's API key with --admin-key-file" if error.code in (401, 403) else ""
        return Answer("frontend", "frontend", url, ok=False, problems=(f"it answers {error.code}{hint}",))
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        return Answer("frontend", "frontend", url, ok=False, problems=(f"no answer: {error}",))
    return _answer("frontend", "frontend", url, text)


def _answer(node_id: str, role: str, target: str, text: str) -> Answer:
    try:
        content = json.loads(text)
        return Answer(node_id, role, target, bool(content["ok"]), tuple(content["problems"]), dict(content["counts"]))
    except (ValueError, KeyError, TypeError) as error:
        return Answer(node_id, role, target, ok=False, problems=(f"its answer is no Validate reply: {error!r}",))


__all__ = ["FoundBlock", "ask_pool_status", "flush_nodes", "inspect_key", "pool_nodes", "verify_nodes"]

T = TypeVar("T")
_OWNER = "moonpool-pool"
_INSPECT_DEADLINE_S = 60.0  # the blocks' bytes are read, perhaps from a slow disk


@dataclass(frozen=True)
class FoundBlock:
    """A block as one node holds it; `facts` as `kvpool.inspection` tells them."""

    node_id: str
    facts: dict[str, Any]


async def ask_pool_status(conductor: str) -> PoolStatus:
    """Of all pool nodes; one that does not answer is told as such. Raises ClusterNotFound."""
    reply = await ask_cluster(conductor)
    nodes = await asyncio.gather(*(_figures(item, reply) for item in reply.nodes if is_pool(item)))
    return pool_status(reply, sorted(nodes, key=lambda node: node.node_id))


async def pool_nodes(conductor: str, node_id: str = "") -> dict[str, str]:
    """Addresses of the pool nodes by id, or of the one that is meant.

    Raises ClusterNotFound, ConfigError for an id that is no pool node's, PoolNotAsked where there is none.
    """
    reply = await ask_cluster(conductor)
    known = {item.node.node_id: item.node.target for item in reply.nodes if is_pool(item)}
    if not known:
        raise PoolNotAsked("no pool node has joined the cluster")
    if node_id and node_id not in known:
        raise ConfigError(f"there is no pool node {node_id!r}; there is {', '.join(sorted(known))}")
    return {name: known[name] for name in sorted(known) if name == (node_id or name)}


async def inspect_key(nodes: dict[str, str], key_prefix: bytes) -> list[FoundBlock]:
    """Every copy of the blocks whose key begins so. Raises PoolNotAsked."""

    async def ask(node_id: str, client: PoolClient) -> list[FoundBlock]:
        found = await client.inspect(key_prefix, deadline_s=_INSPECT_DEADLINE_S)
        return [FoundBlock(node_id, facts) for facts in found]

    found = await _ask_all(nodes, ask)
    return [block for blocks in found.values() for block in blocks]


async def flush_nodes(nodes: dict[str, str], *, dram_only: bool) -> dict[str, Flushed]:
    """Empty the nodes of what nobody uses. Raises PoolNotAsked."""

    async def ask(node_id: str, client: PoolClient) -> Flushed:
        return await client.flush(dram_only=dram_only)

    return await _ask_all(nodes, ask)


async def verify_nodes(nodes: dict[str, str]) -> AsyncIterator[tuple[str, Verified]]:
    """Verify one node after the other, telling progress. Raises PoolNotAsked."""
    for node_id, target in nodes.items():
        client = _client(target)
        try:
            async for done in client.verify():
                yield node_id, done
        except (KvPoolError, NetworkError) as error:
            raise PoolNotAsked(f"{node_id}: {error}") from error
        finally:
            await client.close()


async def _figures(item: conductor_pb2.NodeStatus, reply: conductor_pb2.ClusterReply) -> PoolNodeFigures:
    client = _client(item.node.target)
    try:
        return node_figures(item, reply, await client.state(deadline_s=ANSWER_DEADLINE_S))
    except NetworkError as error:
        return silent_node(item, reply, str(error))
    finally:
        await client.close()


async def _ask_all(nodes: dict[str, str], ask: Callable[[str, PoolClient], Awaitable[T]]) -> dict[str, T]:
    async def one(node_id: str, target: str) -> T:
        client = _client(target)
        try:
            return await ask(node_id, client)
        except (KvPoolError, NetworkError) as error:
            raise PoolNotAsked(f"{node_id}: {error}") from error
        finally:
            await client.close()

    answers = await asyncio.gather(*(one(*node) for node in nodes.items()))
    return dict(zip(nodes, answers, strict=True))


def _client(target: str) -> PoolClient:
    return PoolClient(target, owner=_OWNER, owner_incarnation=0)


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

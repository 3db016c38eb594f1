"""Calls to a running cluster's pool nodes: their state, single blocks, emptying and verifying them. Prints nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpool import KvPoolError
from kvpool.client import PoolClient
from kvpool.handles import Flushed, Verified
from moonpool.cluster_view.collector import ANSWER_DEADLINE_S, ask_cluster
from moonpool.cluster_view.locate import Located
from moonpool.cluster_view.pool_status import PoolNodeStatus, PoolStatus, node_status, pool_status, unreachable_node
from moonpool.cluster_view.reply import is_pool
from moonpool.errors import ConfigError, PoolCallFailed
from moonpool_proto.v1 import conductor_pb2
from rpc.errors import NetworkError

T = TypeVar("T")
_OWNER = "moonpool-pool"
_INSPECT_DEADLINE_S = 60.0  # the blocks' bytes are read, perhaps from a slow disk


@dataclass(frozen=True)
class FoundBlock:
    """A block as one node holds it; `facts` has the fields of `kvpool.inspection`."""

    node_id: str
    facts: dict[str, Any]


async def ask_pool_status(located: Located) -> PoolStatus:
    """Return the status of all pool nodes, including those that do not answer. Raises ClusterNotFound."""
    reply = await ask_cluster(located.conductor)
    nodes = await asyncio.gather(
        *(_status(located.target_of(item.node), item, reply) for item in reply.nodes if is_pool(item))
    )
    return pool_status(reply, sorted(nodes, key=lambda node: node.node_id))


async def pool_nodes(located: Located, node_id: str = "") -> dict[str, str]:
    """Return the pool nodes' targets by id, or only that of `node_id`.

    Raises ClusterNotFound, ConfigError for an unknown id, PoolCallFailed if there is no pool node.
    """
    reply = await ask_cluster(located.conductor)
    known = {item.node.node_id: located.target_of(item.node) for item in reply.nodes if is_pool(item)}
    if not known:
        raise PoolCallFailed("no pool node has joined the cluster")
    if node_id and node_id not in known:
        raise ConfigError(f"--node must be one of {', '.join(sorted(known))}, got {node_id!r}")
    return {name: known[name] for name in sorted(known) if name == (node_id or name)}


async def inspect_key(nodes: dict[str, str], key_prefix: bytes) -> list[FoundBlock]:
    """Return every copy of the blocks whose key starts with the prefix. Raises PoolCallFailed."""

    async def inspect(client: PoolClient) -> list[dict[str, Any]]:
        return await client.inspect(key_prefix, deadline_s=_INSPECT_DEADLINE_S)

    found = await _each(nodes, inspect)
    return [FoundBlock(node_id, facts) for node_id, blocks in found.items() for facts in blocks]


async def flush_nodes(nodes: dict[str, str], *, dram_only: bool) -> dict[str, Flushed]:
    """Remove all blocks that are not in use from the nodes. Raises PoolCallFailed."""
    return await _each(nodes, lambda client: client.flush(dram_only=dram_only))


async def verify_nodes(nodes: dict[str, str]) -> AsyncIterator[tuple[str, Verified]]:
    """Verify one node after the other and yield its progress. Raises PoolCallFailed."""
    for node_id, target in nodes.items():
        async with _client(target) as client:
            try:
                async for done in client.verify():
                    yield node_id, done
            except (KvPoolError, NetworkError) as error:
                raise PoolCallFailed(f"{node_id}: {error}") from error


async def _status(target: str, item: conductor_pb2.NodeStatus, reply: conductor_pb2.ClusterReply) -> PoolNodeStatus:
    async with _client(target) as client:
        try:
            return node_status(item, reply, await client.state(deadline_s=ANSWER_DEADLINE_S))
        except NetworkError as error:
            return unreachable_node(item, reply, str(error))


async def _each(nodes: dict[str, str], ask: Callable[[PoolClient], Awaitable[T]]) -> dict[str, T]:
    """Ask all nodes at once. Raises PoolCallFailed, naming the node that failed."""

    async def one(node_id: str, target: str) -> T:
        async with _client(target) as client:
            try:
                return await ask(client)
            except (KvPoolError, NetworkError) as error:
                raise PoolCallFailed(f"{node_id}: {error}") from error

    answers = await asyncio.gather(*(one(*node) for node in nodes.items()))
    return dict(zip(nodes, answers, strict=True))


@asynccontextmanager
async def _client(target: str) -> AsyncIterator[PoolClient]:
    client = PoolClient(target, owner=_OWNER, owner_incarnation=0)
    try:
        yield client
    finally:
        await client.close()

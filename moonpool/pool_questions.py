"""Asks a live cluster's pool nodes: their state, single blocks, to be emptied, to be verified. No printing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpool import KvPoolError
from kvpool.client import PoolClient
from kvpool.handles import Flushed, Verified
from moonpool.errors import ConfigError, PoolNotAsked
from moonpool.pool_figures import PoolNodeFigures, PoolStatus, is_pool, node_figures, pool_status, silent_node
from moonpool.questions import ANSWER_DEADLINE_S, ask_cluster
from moonpool_proto.v1 import conductor_pb2
from rpc.errors import NetworkError

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

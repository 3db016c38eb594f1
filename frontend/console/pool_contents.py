"""Contents of the KV pool by model and by tenant, as the pool nodes report them when a viewer asks.

Pool nodes know namespaces, not models, and accounts, not tenants: the console's state names both.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from frontend.cluster import ClusterWatch
from frontend.console.shared_build import SharedBuild
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.pool_pb2_grpc import PoolStub
from rpc.control import call, open_channel
from rpc.errors import NetworkError
from rpc.kv_namespaces import namespace_users

_EVERY_S: Final = 2.0
_ASK_S: Final = 2.0
_CONCURRENT: Final = 16
_MOST_ROWS: Final = 200  # of models, and of accounts
_TIERS: Final = ("dram", "ssd")

Json = Mapping[str, Any]


class PoolContents:
    """Reader of the pool nodes' contents."""

    def __init__(self, cluster: ClusterWatch) -> None:
        self._cluster = cluster
        self._shared = SharedBuild(self._read, _EVERY_S)

    async def get(self) -> dict[str, Any]:
        """Return the contents, at most two seconds old plus the pool nodes' response time."""
        return await self._shared.get()

    async def close(self) -> None:
        """Stop reading."""
        await self._shared.close()

    async def _read(self) -> dict[str, Any]:
        nodes, slots = list(self._cluster.reply.nodes), asyncio.Semaphore(_CONCURRENT)

        async def ask(node: conductor_pb2.Node) -> Json | str:
            async with slots, open_channel(node.target) as channel:
                asked = PoolStub(channel).State(common_pb2.JsonRequest())
                try:
                    reply = await call(asked, what="Pool.State", target=node.target, deadline_s=_ASK_S)
                except NetworkError as error:
                    return str(error)
            return dict(json.loads(reply.json))

        pools = [status.node for status in nodes if status.node.role == common_pb2.ROLE_POOL]
        states = await asyncio.gather(*map(ask, pools))
        found = [state for state in states if not isinstance(state, str)]
        problems = {node.node_id: state for node, state in zip(pools, states, strict=True) if isinstance(state, str)}
        return {**pool_contents(found, namespace_users(nodes)), "problems": problems}


def pool_contents(states: Sequence[Json], users: Mapping[str, str]) -> dict[str, Any]:
    """Return what the pool nodes hold by namespace and by account, most bytes first.

    `states`: their answers to State; `users`: the model of each namespace. Nodes of earlier versions report neither
    tiers nor retained prefixes.
    """
    held: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    retained: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for state in states:
        for namespace, contents in state["namespaces"].items():
            for tier, here in contents.get("tiers", {}).items():
                _add(held[namespace, tier], here["blocks"], here["used_bytes"])
        for tier, tenants in state.get("retained", {}).items():
            for each in tenants:
                _add(retained[each["account"], tier], each["prefixes"], each["bytes"])
    return {
        "namespaces": [
            {"namespace": name, "model": users.get(name, ""), **tiers} for name, tiers in _rows(held, "blocks")
        ],
        "retained": [{"account": account, **tiers} for account, tiers in _rows(retained, "prefixes")],
        "refused": _count(states, "pool_retained_refused"),
        "preempted": _count(states, "pool_retained_preempted"),
    }


def _rows(found: Mapping[tuple[str, str], Sequence[int]], unit: str) -> list[tuple[str, dict[str, dict[str, int]]]]:
    """Return (name, {tier: {unit, "bytes"}}) of the `_MOST_ROWS` names with the most bytes, in any tier."""
    rows: dict[str, dict[str, dict[str, int]]] = {}
    for (name, tier), (number, nbytes) in found.items():
        row = rows.setdefault(name, {each: {unit: 0, "bytes": 0} for each in _TIERS})
        row[tier] = {unit: number, "bytes": nbytes}
    order = sorted(rows, key=lambda name: (-sum(tier["bytes"] for tier in rows[name].values()), name))
    return [(name, rows[name]) for name in order[:_MOST_ROWS]]


def _add(total: list[int], number: int, nbytes: int) -> None:
    total[0] += number
    total[1] += nbytes


def _count(states: Sequence[Json], name: str) -> int:
    return sum(int(state["counters"].get(name, 0)) for state in states)

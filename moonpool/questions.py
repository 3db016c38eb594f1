"""Asks a cluster's processes: what the conductor knows of the nodes, and every role's own Validate."""

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from moonpool.errors import ClusterNotFound
from moonpool.locate import Located
from moonpool.status import role_name
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from moonpool_proto.v1.pool_pb2_grpc import PoolStub
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import ControlError, call, open_channel

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

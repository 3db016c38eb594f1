"""Collects the state of a running cluster from its conductors, nodes and API servers, for every view of it.

It judges and prints nothing. `reply.py` interprets the conductor's reply, from which the views compute their figures.
"""

import asyncio
import http.client
import json
import urllib.error
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from moonpool.cluster_view.failed_calls import conductor_silent
from moonpool.cluster_view.locate import Located
from moonpool.cluster_view.reply import is_pool, role_name
from moonpool.doctor.peers import PeerProbe, observe_peer
from moonpool.errors import ClusterNotFound, ConfigError, SloNotChanged
from moonpool.slo.client import ask_slo
from moonpool.supervision.http_port import open_url
from moonpool.supervision.ready_file import ReadyFile, ReadyNode
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from moonpool_proto.v1.pool_pb2_grpc import PoolStub
from moonpool_proto.v1.supervisor_pb2_grpc import SupervisorStub
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import CallRefused, ControlError, call, open_channel
from rpc.gateway import conductor_url, conductors_behind, supervisor_url

T = TypeVar("T")

ANSWER_DEADLINE_S: Final = 10.0
_OBSERVATION_DEADLINE_S: Final = 5.0
_CONCURRENT_PROBES: Final = 32


@dataclass(frozen=True)
class ValidationResult:
    """One process's reply to Validate; `problems` are its failures, or the error of the call."""

    node_id: str
    role: str
    target: str
    ok: bool
    problems: tuple[str, ...] = ()
    counts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FrontendState:
    """State of one API server; `trouble` is the reason why it accepts no requests, "" if it does."""

    url: str
    trouble: str


@dataclass(frozen=True)
class ClusterObservation:
    """Observations of a cluster at about the same time; a string in place of a reply is the error of the call."""

    conductors: Mapping[str, conductor_pb2.ClusterReply | str]  # by name
    objectives: conductor_pb2.ShowSloReply | str
    unreachable: Mapping[str, str]  # nodes whose control port does not answer from here, with the error
    kv_ports: Mapping[str, PeerProbe] | None  # probes of the nodes' KV ports, by node id; None: not probed
    frontends: Sequence[FrontendState]
    viewpoint: str = "here"  # from where the control ports were called

    @property
    def reply(self) -> conductor_pb2.ClusterReply:
        """First conductor's reply. Raises ClusterNotFound if no conductor replied."""
        for reply in self.conductors.values():
            if not isinstance(reply, str):
                return reply
        raise ClusterNotFound("; ".join(map(str, self.conductors.values())))


async def call_conductor(conductor: str, method: str, request: Any, *, deadline_s: float = ANSWER_DEADLINE_S) -> Any:
    """Call one method of a conductor's service and return its reply. Raises ControlError."""
    async with open_channel(conductor) as channel:
        rpc = getattr(ConductorStub(channel), method)(request)
        return await call(rpc, what=f"Conductor.{method}", target=conductor, deadline_s=deadline_s)


async def ask_conductor(conductor: str, *, deadline_s: float) -> conductor_pb2.ClusterReply:
    """Return the nodes as the conductor sees them. Raises ControlError."""
    reply = await call_conductor(conductor, "Cluster", conductor_pb2.ClusterRequest(), deadline_s=deadline_s)
    assert isinstance(reply, conductor_pb2.ClusterReply)
    return reply


async def ask_cluster(conductor: str) -> conductor_pb2.ClusterReply:
    """Return the nodes as the conductor sees them. Raises ClusterNotFound when it does not answer."""
    try:
        return await ask_conductor(conductor, deadline_s=ANSWER_DEADLINE_S)
    except ControlError as error:
        raise conductor_silent(error) from error


async def conductors_of(located: Located) -> dict[str, str]:
    """Return conductors' targets by name: those that were given, all that `serve` started, or those of the API server.

    Raises ClusterNotFound if the API server does not answer.
    """
    if located.gateway:
        try:
            known = await call(
                conductors_behind(located.gateway),
                what="The list of conductors",
                target=located.gateway,
                deadline_s=ANSWER_DEADLINE_S,
            )
        except ControlError as error:
            raise conductor_silent(error) from error
        return {"conductor" if len(known) == 1 else target: conductor_url(located.gateway, target) for target in known}
    nodes = located.ready.nodes.items() if located.ready is not None else ()
    started = {name: node.target for name, node in nodes if node.role == "conductor"}
    return {"conductor": located.conductor} | started | {target: target for target in located.others}


async def with_processes(located: Located) -> Located:
    """Return a cluster behind an API server with the processes that its `serve` started, if there is one.

    Raises ClusterNotFound if the API server does not answer or rejects the call.
    """
    if not located.gateway:
        return located
    target = supervisor_url(located.gateway)
    try:
        reply = await _call_node(target, SupervisorStub, "State", ANSWER_DEADLINE_S)
    except CallRefused as error:
        if error.code in ("NOT_FOUND", "UNIMPLEMENTED"):
            return located
        raise conductor_silent(error) from error
    except ControlError as error:
        raise conductor_silent(error) from error
    nodes = {node_id: ReadyNode(**node) for node_id, node in json.loads(reply.json).items()}
    conductor = next((node.target for node in nodes.values() if node.role == "conductor"), "")
    ready = ReadyFile(located.gateway, model="", supervisor_pid=0, run_dir="", conductor=conductor, nodes=nodes)
    return replace(located, ready=ready)


async def validate_cluster(located: Located, *, admin_key: str = "") -> list[ValidationResult]:
    """Return every process's answer to Validate, the conductors' first; raises ClusterNotFound.

    A process that does not answer is a result with a problem. `admin_key` is for API servers that require one.
    """
    located = await with_processes(located)
    cluster = await ask_cluster(located.conductor)
    conductors = await conductors_of(located)
    calls = [_validate(name, "conductor", target, ConductorStub) for name, target in conductors.items()]
    calls += [
        _validate(item.node.node_id, role_name(item.node.role), located.target_of(item.node), _stub_of(item))
        for item in cluster.nodes
    ]
    calls += [_validate_frontend(_serving_frontend(located, url), url, admin_key) for url in located.urls]
    answers = list(await asyncio.gather(*calls))
    answered = {answer.node_id for answer in answers}
    started = located.ready.nodes.items() if located.ready is not None else ()
    return answers + [
        ValidationResult(node_id, node.role, node.target, ok=False, problems=("unknown to the conductor",))
        for node_id, node in started
        if node_id not in answered and node.role != "frontend"  # only the one that serves has an address
    ]


async def look_at_cluster(located: Located) -> tuple[conductor_pb2.ClusterReply, ReadyFile | None]:
    """Return the nodes as the conductor sees them, and the processes that `serve` started. Raises ClusterNotFound."""
    reply, known = await asyncio.gather(ask_cluster(located.conductor), with_processes(located))
    return reply, known.ready


async def observe_cluster(located: Located) -> ClusterObservation:
    """Observe conductors, nodes, KV ports, objectives and API servers. Raises ClusterNotFound if no conductor answers.

    KV ports are probed only with direct access: API servers forward no KV.
    """
    targets = await conductors_of(located)
    replies = await asyncio.gather(
        *(_or_reason(ask_conductor(target, deadline_s=_OBSERVATION_DEADLINE_S)) for target in targets.values())
    )
    seen = ClusterObservation(dict(zip(targets, replies, strict=True)), "", {}, {}, ())
    nodes = seen.reply.nodes
    limit = asyncio.Semaphore(_CONCURRENT_PROBES)

    async def probed(address: str) -> PeerProbe:
        async with limit:
            return await asyncio.to_thread(observe_peer, address)

    async def called(item: conductor_pb2.NodeStatus) -> Any:
        async with limit:
            return await _or_reason(
                _call_node(located.target_of(item.node), _stub_of(item), "State", _OBSERVATION_DEADLINE_S)
            )

    addresses = {} if located.gateway else _kv_addresses(nodes)
    answering = next(targets[name] for name, reply in seen.conductors.items() if not isinstance(reply, str))
    objectives, answers, kv_ports, frontends = await asyncio.gather(
        _or_reason(ask_slo(answering)),
        asyncio.gather(*map(called, nodes)),
        asyncio.gather(*map(probed, addresses.values())),
        asyncio.gather(*(asyncio.to_thread(_frontend_state, url) for url in located.urls)),
    )
    unreachable = {item.node.node_id: why for item, why in zip(nodes, answers, strict=True) if isinstance(why, str)}
    return ClusterObservation(
        seen.conductors,
        objectives,
        unreachable,
        None if located.gateway else dict(zip(addresses, kv_ports, strict=True)),
        frontends,
        "the API server" if located.gateway else "here",
    )


async def _or_reason(work: Awaitable[T]) -> T | str:
    """Return the result, or the text of the error that prevented it."""
    try:
        return await work
    except (ControlError, ClusterNotFound, ConfigError, SloNotChanged) as error:
        return str(error) or type(error).__name__


def _stub_of(item: conductor_pb2.NodeStatus) -> Callable[[Any], Any]:
    return PoolStub if is_pool(item) else WorkerStub


async def _call_node(target: str, stub: Callable[[Any], Any], method: str, deadline_s: float) -> common_pb2.JsonReply:
    """Call a method that every role has, without arguments. Raises ControlError."""
    async with open_channel(target) as channel:
        rpc: Awaitable[common_pb2.JsonReply] = getattr(stub(channel), method)(common_pb2.JsonRequest())
        return await call(rpc, what=method, target=target, deadline_s=deadline_s)


async def _validate(node_id: str, role: str, target: str, stub: Callable[[Any], Any]) -> ValidationResult:
    try:
        reply = await _call_node(target, stub, "Validate", ANSWER_DEADLINE_S)
    except ControlError as error:
        return ValidationResult(node_id, role, target, ok=False, problems=(f"no answer: {error}",))
    return _validation_result(node_id, role, target, reply.json)


def _serving_frontend(located: Located, url: str) -> str:
    """Return the node id of the frontend that serves at `url`, "frontend" if it is unknown."""
    started = located.ready.nodes.items() if located.ready is not None else ()
    return next((node_id for node_id, node in started if node.role == "frontend" and node.target == url), "frontend")


async def _validate_frontend(node_id: str, url: str, admin_key: str) -> ValidationResult:
    def fetch() -> str:
        headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        with open_url(f"{url}/validate", ANSWER_DEADLINE_S, headers=headers) as reply:
            return str(reply.read().decode())

    try:
        text = await asyncio.to_thread(fetch)
    except urllib.error.HTTPError as error:
        error.close()
        hint = "; give an admin's API key with --api-key-file" if error.code in (401, 403) else ""
        problem = f"HTTP status {error.code}{hint}"
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        problem = f"no answer: {error}"
    else:
        return _validation_result(node_id, "frontend", url, text)
    return ValidationResult(node_id, "frontend", url, ok=False, problems=(problem,))


def _validation_result(node_id: str, role: str, target: str, text: str) -> ValidationResult:
    try:
        content = json.loads(text)
        problems, counts = tuple(content["problems"]), dict(content["counts"])
        return ValidationResult(node_id, role, target, bool(content["ok"]), problems, counts)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"not a Validate reply: {error!r}"
        return ValidationResult(node_id, role, target, ok=False, problems=(problem,))


def _kv_addresses(nodes: Iterable[conductor_pb2.NodeStatus]) -> dict[str, str]:
    return {item.node.node_id: _kv_address(item.node) for item in nodes if item.node.endpoint.tcp_port}


def _kv_address(node: conductor_pb2.Node) -> str:
    host = node.endpoint.tcp_host
    return f"[{host}]:{node.endpoint.tcp_port}" if ":" in host else f"{host}:{node.endpoint.tcp_port}"


def _frontend_state(url: str) -> FrontendState:
    try:
        with open_url(f"{url}/ready", _OBSERVATION_DEADLINE_S):
            return FrontendState(url, "")
    except urllib.error.HTTPError as error:
        with error:
            return FrontendState(url, _reason(error.read(1 << 16)) or f"HTTP status {error.code}")
    except (OSError, ValueError) as error:
        return FrontendState(url, f"no answer: {error}")


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["reason"])
    except (ValueError, KeyError, TypeError):
        return ""

"""Routes under /admin: calls of operators' commands, forwarded to conductors, nodes and `serve` as JSON.

Views of the cluster require a key with admin scope if any keys are configured; changes always require one. Only the
methods listed here are forwarded. The form of messages and errors is that of `rpc.gateway`.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple

import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from frontend.callers import ApiCaller
from frontend.console.routes import SECURITY_HEADERS, read_object
from frontend.errors import ApiError, Conflict, InvalidRequest, NoSuchNode, RequestDeadline, ServiceUnavailable
from frontend.service import Service
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from moonpool_proto.v1.pool_pb2_grpc import PoolStub
from moonpool_proto.v1.supervisor_pb2_grpc import SupervisorStub
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import CallRefused, ControlError, call, control_error, open_channel
from rpc.gateway import ADMIN, LINES, request_type, to_json
from settings.node import SUPERVISOR_SOCKET

_log = logging.getLogger(__name__)

_VIEWS: Final[Mapping[str, frozenset[str]]] = {
    "Conductor": frozenset({"Cluster", "ShowSlo", "Explain", "State", "Validate"}),
    "Pool": frozenset({"State", "Validate"}),
    "Worker": frozenset({"State", "Validate"}),
    "Supervisor": frozenset({"State"}),
}
_CHANGES: Final[Mapping[str, frozenset[str]]] = {
    "Conductor": frozenset({"DrainNode", "SwitchNode", "ChangeSlo"}),
    "Pool": frozenset({"Inspect", "Flush", "Verify"}),  # an inspection removes damaged blocks
    "Worker": frozenset(),
    "Supervisor": frozenset({"Scale"}),
}
_STREAMS: Final = frozenset({"Verify", "Scale"})
_METHODS: Final = frozenset().union(*_VIEWS.values(), *_CHANGES.values())
_STUBS: Final[Mapping[str, Any]] = {
    "Conductor": ConductorStub,
    "Pool": PoolStub,
    "Worker": WorkerStub,
    "Supervisor": SupervisorStub,
}
_CONDUCTORS: Final = f"{ADMIN}conductors"
_DEADLINE_S: Final = 60.0
_LOGGED_NBYTES: Final = 200
_FLUSH_S: Final = 600.0  # writes the whole memory to SSD
_ERRORS: Final[Mapping[str, type[ApiError]]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "NOT_FOUND": NoSuchNode,
    "FAILED_PRECONDITION": Conflict,
    "ABORTED": Conflict,
    "UNAVAILABLE": ServiceUnavailable,
    "DEADLINE_EXCEEDED": RequestDeadline,
}


class _AdminCall(NamedTuple):
    """Parts of a path: a conductor's target may contain slashes."""

    place: str  # "nodes/pool-0"
    kind: str  # "nodes"
    name: str  # "pool-0"; "" for a place of which there is one
    method: str

    @classmethod
    def of(cls, path: str) -> "_AdminCall":
        """Split a path below /admin/."""
        place, _, method = path.removeprefix(ADMIN).rpartition("/")
        kind, _, name = place.partition("/")
        return cls(place, kind, name, method)


class AdminRoutes:
    """Handler of all paths below /admin/."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def methods(self, path: str) -> tuple[str, ...]:
        """Return the allowed methods of a path; () if it does not exist."""
        if path == _CONDUCTORS:
            return ("GET",)
        called = _AdminCall.of(path)
        has_name = called.kind in ("conductors", "nodes") and called.name != ""
        is_known = has_name or called.place in ("conductor", "supervisor")
        return ("POST",) if is_known and called.method in _METHODS else ()

    async def __call__(self, http: Request) -> Response:
        """Answer a request whose path and method are valid. Raises ApiError."""
        path: str = http.scope["path"]
        if path == _CONDUCTORS:
            self._service.keys.viewer(http.headers.get("authorization"))
            return _answer(json.dumps({"conductors": self._service.conductor.targets}).encode())
        called = _AdminCall.of(path)
        method = called.method
        # The key is checked first: whoever has none does not learn which nodes exist.
        caller = self._checked(http, method)
        service, target = self._process(called.kind, called.name)
        if method not in _VIEWS[service] | _CHANGES[service]:
            raise InvalidRequest(f"{method} is not a method of {called.place[:100]!r}", code="INVALID_ARGUMENT")
        request = _request(service, method, await read_object(self._service, http))
        if caller is not None:
            _sign(request, caller)
            who, what = caller.key_name or caller.tenant or "admin", to_json(request)[:_LOGGED_NBYTES]
            _log.info("%s calls %s of %r: %r", who, method, called.place, what)
        if method in _STREAMS:
            return StreamingResponse(_lines(service, target, method, request), media_type=LINES, headers=_HEADERS)
        try:
            reply = await self._forwarded(service, target, method, request)
        except ControlError as error:
            raise _error(error) from error
        return _answer(await asyncio.to_thread(to_json, reply))

    def _checked(self, http: Request, method: str) -> ApiCaller | None:
        """Check the key; return the caller of a change. Raises Unauthorized, Forbidden."""
        authorization = http.headers.get("authorization")
        if any(method in methods for methods in _CHANGES.values()):
            return self._service.keys.admin(authorization)
        self._service.keys.viewer(authorization)
        return None

    def _process(self, kind: str, name: str) -> tuple[str, str]:
        """Return a process's service and address; "" is that of the preferred conductor. Raises NoSuchNode."""
        if kind == "nodes":
            return self._node(name)
        if kind != "supervisor":
            return "Conductor", name
        folder = self._service.config.node.socket_dir
        if folder is None or not (folder / SUPERVISOR_SOCKET).exists():
            raise NoSuchNode("no `moonpool serve` on this machine started the API server", code="NOT_FOUND")
        return "Supervisor", f"unix:{folder / SUPERVISOR_SOCKET}"

    def _node(self, node_id: str) -> tuple[str, str]:
        """Return a node's service and address. Raises NoSuchNode."""
        for status in self._service.cluster.reply.nodes:
            if status.node.node_id == node_id:
                return "Pool" if status.node.role == common_pb2.ROLE_POOL else "Worker", status.node.target
        raise NoSuchNode(f"no node {node_id[:100]!r} has joined the cluster", code="NOT_FOUND")

    async def _forwarded(self, service: str, target: str, method: str, request: Message) -> Message:
        """Call a node, the conductor at `target`, or without one the first that answers. Raises ControlError."""
        deadline_s = _FLUSH_S if method == "Flush" else _DEADLINE_S
        if service != "Conductor":
            async with open_channel(target) as channel:
                pending = getattr(_STUBS[service](channel), method)(request)
                reply: Message = await call(pending, what=f"{service}.{method}", target=target, deadline_s=deadline_s)
                return reply
        client = self._service.conductor
        if not target:
            return await client.act(method, lambda stub: getattr(stub, method)(request), deadline_s=deadline_s)
        if target not in client.targets:
            known = ", ".join(client.targets)
            raise NoSuchNode(f"the conductor must be one of {known}, got {target[:100]!r}", code="NOT_FOUND")
        return await client.ask(
            method, lambda stub: getattr(stub, method)(request), target=target, deadline_s=deadline_s
        )


def _request(service: str, method: str, body: Mapping[str, Any]) -> Message:
    """Return the request message of a body. Raises InvalidRequest."""
    request = request_type(service, method)()
    try:
        json_format.ParseDict(dict(body), request)
    except json_format.ParseError as error:
        raise InvalidRequest(f"the body is not a request of {method}: {error}", code="INVALID_ARGUMENT") from error
    if isinstance(request, conductor_pb2.ClusterRequest):
        request.Clear()  # only frontends report tenants
    return request


def _sign(request: Message, caller: ApiCaller) -> None:
    """Add the key's name to the author of a change of objectives: the rest is what the caller claims."""
    if isinstance(request, conductor_pb2.ChangeSloRequest) and (name := caller.key_name or caller.tenant):
        request.author = f"{request.author} (key {name})"


async def _lines(service: str, target: str, method: str, request: Message) -> AsyncIterator[bytes]:
    """Yield a line for each message of a node's stream; the last one is an error if the stream fails."""
    async with open_channel(target) as channel:
        try:
            async for message in getattr(_STUBS[service](channel), method)(request):
                yield to_json(message) + b"\n"
        except grpc.aio.AioRpcError as error:
            failed = _error(control_error(error, what=f"{service}.{method}", target=target))
            yield json.dumps(failed.body()).encode() + b"\n"


def _error(error: ControlError) -> ApiError:
    message = error.reason if isinstance(error, CallRefused) else str(error)  # which names the process
    return _ERRORS.get(error.code, ApiError)(message, code=error.code)


_HEADERS: Final[Mapping[str, str]] = {"cache-control": "no-store", **SECURITY_HEADERS}


def _answer(body: bytes) -> Response:
    return Response(body, headers={"content-type": "application/json", **_HEADERS})

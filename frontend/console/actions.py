"""Admins' actions from the console: calls to a conductor, and its refusals as API errors."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from frontend.conductor import ConductorClient
from frontend.errors import ApiError, Conflict, InvalidRequest, NoSuchNode, ServiceUnavailable
from moonpool_proto.v1 import common_pb2, conductor_pb2
from rpc.control import CallRefused, ControlError

if TYPE_CHECKING:
    from moonpool_proto.v1.conductor_pb2_grpc import ConductorAsyncStub

_log = logging.getLogger(__name__)


_CALL_S: Final = 10.0
_EXPLAIN_S: Final = 15.0  # the conductor may have to read many files; the page waits for all of them for 20 s
_ROLES: Final = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
_REFUSALS: Final[Mapping[str, type[ApiError]]] = {
    "NOT_FOUND": NoSuchNode,
    "FAILED_PRECONDITION": Conflict,
    "INVALID_ARGUMENT": InvalidRequest,
}

T = TypeVar("T")


class ConsoleActions:
    """Actions and queries. Each raises ApiError for a refusal and ServiceUnavailable if no conductor answers."""

    def __init__(self, conductor: ConductorClient) -> None:
        self._conductor = conductor

    async def drain(self, body: Mapping[str, Any], who: str) -> dict[str, Any]:
        """Drain a node: it finishes its work and leaves the cluster."""
        node_id = _text(body, "node_id")
        _log.info("%s drains node %r from the console", who, node_id)
        request = conductor_pb2.DrainNodeRequest(node_id=node_id)
        await self._act("DrainNode", lambda stub: stub.DrainNode(request))
        return {"node_id": node_id}

    async def switch(self, body: Mapping[str, Any], who: str) -> dict[str, Any]:
        """Switch a node's role."""
        node_id, role = _text(body, "node_id"), _text(body, "role")
        if role not in _ROLES:
            raise InvalidRequest(f"role must be prefill or decode, got {role[:40]!r}", param="role")
        _log.info("%s switches node %r to role %s from the console", who, node_id, role)
        request = conductor_pb2.SwitchNodeRequest(node_id=node_id, role=_ROLES[role])
        await self._act("SwitchNode", lambda stub: stub.SwitchNode(request))
        return {"node_id": node_id, "role": role}

    async def objectives(self) -> dict[str, Any]:
        """Return the objectives in force and their last versions."""
        reply = await self._act("ShowSlo", lambda stub: stub.ShowSlo(conductor_pb2.ShowSloRequest(history=20)))
        return {
            "current": _version(reply.current),
            "history": [_version(each) for each in reply.history],
            "acknowledged": [
                {"conductor": each.node_id, "version": each.version, "digest": each.digest}
                for each in reply.acknowledged
            ],
            "kept": reply.kept,
            "trouble": reply.trouble,
            "drift": list(reply.drift),
            "unmeetable": list(reply.unmeetable),
        }

    async def change_objectives(self, body: Mapping[str, Any], who: str) -> dict[str, Any]:
        """Create a new version of the objectives.

        With `trial`, only return its differences and a preview of its effect.
        """
        content, trial = body.get("content"), body.get("trial", False)
        if not isinstance(content, dict):
            raise InvalidRequest("content must be the objectives as a JSON object", param="content")
        if not isinstance(trial, bool):
            raise InvalidRequest("trial must be true or false", param="trial")
        expected = body.get("expect_version")
        if expected is not None and (type(expected) is not int or not 0 <= expected < 1 << 63):
            raise InvalidRequest("expect_version must be a non-negative integer", param="expect_version")
        request = conductor_pb2.ChangeSloRequest(
            author=who,
            reason="a preview" if trial else _text(body, "reason"),
            content=_json(content),
            expect_version=expected,
            trial=trial,
        )
        if not trial:
            _log.info("%s changes the objectives from the console: %r", who, request.reason)
        reply = await self._act("ChangeSlo", lambda stub: stub.ChangeSlo(request))
        return {
            "version": _version(reply.version),
            "differences": list(reply.differences),
            "warnings": list(reply.warnings),
            "notes": list(reply.notes),
            "preview": _preview(reply.preview) if reply.HasField("preview") else None,
        }

    async def explain(self, request_id: str) -> list[dict[str, Any]]:
        """Return each conductor's explanation of a request, since any of them may have placed it."""
        request = conductor_pb2.ExplainRequest(request_id=request_id)
        return await asyncio.gather(*(self._explanation(target, request) for target in self._conductor.targets))

    async def _explanation(self, target: str, request: conductor_pb2.ExplainRequest) -> dict[str, Any]:
        try:
            reply = await self._conductor.ask(
                "Explain", lambda stub: stub.Explain(request), target=target, deadline_s=_EXPLAIN_S
            )
        except ControlError as error:
            return {"target": target, "problem": str(error), "log": None, "remembered": None}
        return {"target": target, "problem": "", **json.loads(reply.json, parse_constant=lambda _: None)}

    async def _act(self, what: str, make: "Callable[[ConductorAsyncStub], Awaitable[T]]") -> T:
        try:
            return await self._conductor.act(what, make, deadline_s=_CALL_S)
        except CallRefused as error:
            _refuse(error)
        except ControlError as error:
            raise ServiceUnavailable(f"no conductor answers: {error}", code="conductor_away") from error


def _refuse(error: CallRefused) -> NoReturn:
    kind = _REFUSALS.get(error.code)
    if kind is None:
        raise ServiceUnavailable(f"the conductor refused the action: {error}", code="refused") from error
    raise kind(str(error), code="refused") from error


def _json(content: Any) -> str:
    try:
        return json.dumps(content)
    except RecursionError as error:
        raise InvalidRequest("content must not be nested so deeply", param="content") from error


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value.strip() or len(value) > 1000 or not _is_whole(value):
        raise InvalidRequest(f"{name} must be a string of 1 to 1000 characters", param=name)
    return value


def _is_whole(text: str) -> bool:
    # JSON strings may contain lone surrogates, which UTF-8 cannot encode.
    return text.encode("utf-8", "ignore").decode() == text


def _version(version: conductor_pb2.SloVersion) -> dict[str, Any]:
    return {
        "version": version.version,
        "content": json.loads(version.content),
        "author": version.author,
        "reason": version.reason,
        "at_s": version.at_s,
        "origin": version.origin,
        "digest": version.digest,
    }


def _preview(preview: conductor_pb2.SloPreview) -> dict[str, Any]:
    told = {name: getattr(preview, name) for name in ("judged", "span_s", "forgotten", "admission", "mode")}
    names = [field.name for field in conductor_pb2.SloPreviewRow.DESCRIPTOR.fields]
    return told | {"rows": [{name: getattr(row, name) for name in names} for row in preview.rows]}

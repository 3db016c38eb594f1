"""Calls of the commands `moonpool slo …` to a running cluster's conductor."""

import asyncio
import time
from typing import Any, TypeVar

import grpc

from moonpool.cluster_view.failed_calls import conductor_silent
from moonpool.errors import ClusterNotFound, ConfigError, SloNotChanged
from moonpool_proto.v1 import conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from rpc.control import control_error, open_channel

T = TypeVar("T")
_DEADLINE_S = 15.0  # longer than the store's own deadlines
_POLL_S = 0.2


async def ask_slo(conductor: str, *, history: int = 0) -> conductor_pb2.ShowSloReply:
    """Return the objectives in force. Raises ClusterNotFound if the conductor does not answer."""
    async with open_channel(conductor) as channel:
        request = conductor_pb2.ShowSloRequest(history=history)
        return await _call(ConductorStub(channel).ShowSlo(request), "Conductor.ShowSlo", conductor)


async def change_slo(conductor: str, change: conductor_pb2.ChangeSloRequest) -> conductor_pb2.ChangeSloReply:
    """Change the objectives. Raises ConfigError for invalid ones, SloNotChanged, ClusterNotFound."""
    async with open_channel(conductor) as channel:
        return await _call(ConductorStub(channel).ChangeSlo(change), "Conductor.ChangeSlo", conductor)


async def wait_until_acknowledged(conductor: str, version: int, *, wait_s: float) -> conductor_pb2.ShowSloReply:
    """Wait until every conductor applies the version or a later one. Raises SloNotChanged, naming those that do not."""
    deadline_s = time.monotonic() + wait_s
    while True:
        seen = await ask_slo(conductor)
        behind = [each for each in seen.acknowledged if each.version < version]
        if not behind and not seen.trouble:
            return seen
        if time.monotonic() >= deadline_s:
            nodes = ", ".join(f"{each.node_id} (version {each.version})" for each in behind)
            state = f"not yet acknowledged by {nodes}" if nodes else f"no acknowledgement is known: {seen.trouble}"
            raise SloNotChanged(f"version {version} is stored, but after {wait_s:g} s {state}; see `moonpool slo show`")
        await asyncio.sleep(_POLL_S)


async def _call(rpc: "grpc.aio.UnaryUnaryCall[Any, T]", what: str, target: str) -> T:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await rpc
    except TimeoutError as error:
        raise ClusterNotFound(f"the conductor at {target} does not answer in {_DEADLINE_S:g} s") from error
    except grpc.aio.AioRpcError as error:
        reason = error.details() or "refused"
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            raise ConfigError(reason) from error
        if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
            raise SloNotChanged(reason) from error
        raise conductor_silent(control_error(error, what=what, target=target)) from error

"""gRPC service of `serve` itself, at supervisor.sock in its run directory: Scale and State."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc

from moonpool.errors import MoonpoolError, ScaleRefused
from moonpool.plan import RolePlan
from moonpool.scaling.scaler import Scaler, ScalingStep
from moonpool.supervision.ready_file import ready_nodes
from moonpool.supervision.run_dir import supervisor_target
from moonpool.supervision.supervisor import Supervisor
from moonpool_proto.v1 import common_pb2, supervisor_pb2
from moonpool_proto.v1.supervisor_pb2_grpc import SupervisorServicer, add_SupervisorServicer_to_server
from rpc.control import ControlServer, start_server

Context = grpc.aio.ServicerContext[Any, Any]


class SupervisorService(SupervisorServicer):
    """Carries out changes of scale, and reports the state of the nodes."""

    def __init__(self, scaler: Scaler, supervisor: Supervisor[RolePlan]) -> None:
        self._scaler = scaler
        self._supervisor = supervisor
        self._changes: set[asyncio.Task[None]] = set()

    async def serve(self, run_dir: Path) -> ControlServer:
        """Start listening; the caller must stop the returned server."""
        return await start_server(
            supervisor_target(run_dir), lambda server: add_SupervisorServicer_to_server(self, server)
        )

    def scale(
        self,
        counts: Mapping[str, int],
        *,
        force: bool = False,
        on_step: Callable[[ScalingStep], None] = lambda step: None,
    ) -> "asyncio.Task[None]":
        """Start a change, which continues even if its caller leaves."""
        change = asyncio.create_task(self._scaler.scale(counts, force=force, on_step=on_step))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return change

    async def Scale(
        self, request: supervisor_pb2.ScaleRequest, context: Context
    ) -> AsyncIterator[supervisor_pb2.ScaleStep]:
        steps: asyncio.Queue[ScalingStep | None] = asyncio.Queue()
        change = self.scale(dict(request.counts), force=request.force, on_step=steps.put_nowait)
        change.add_done_callback(lambda _: steps.put_nowait(None))
        while (step := await steps.get()) is not None:
            yield supervisor_pb2.ScaleStep(**asdict(step))
        try:
            await asyncio.shield(change)
        except ScaleRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except MoonpoolError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))

    async def State(self, request: common_pb2.JsonRequest, context: Context) -> common_pb2.JsonReply:
        nodes = ready_nodes(self._supervisor.states(), self._supervisor.plans())
        return common_pb2.JsonReply(json=json.dumps({node_id: asdict(node) for node_id, node in nodes.items()}))

    async def close(self) -> None:
        """Cancel changes in progress."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

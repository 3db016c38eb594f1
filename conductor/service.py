"""gRPC service of the conductor: converts messages and calls core, registry and pool nodes. Makes no decisions."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from conductor import wire
from conductor.core import Core
from conductor.directory.feeds import directory_samples, sample
from conductor.errors import FrontendRefused, JoinRefused, MalformedCall, NodeInUse, SwitchRefused, UnknownNode
from conductor.metrics import admission_samples, cost_samples, tenant_samples
from conductor.overview import overview, request_to_json
from conductor.persistence import Persistence
from conductor.policy.events import NodeJoined, NodeLost
from conductor.pools import PoolNodes
from conductor.registry import JoinedNode, Registry
from conductor.scheduling import Scheduling
from conductor.slo import SloKeeper
from conductor.slo.service import SloCalls
from conductor.worker_memory import WorkerMemory
from kvpool import KvPoolError, short_keys_from_bytes
from moonpool_proto.v1 import common_pb2, conductor_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorServicer
from rpc.versions import own_software
from rpc.waiting import first_of, whole_write
from telemetry import LoopWatch, tracing

__all__ = ["ConductorService"]

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class ConductorService(ConductorServicer):
    """RPC handlers of one conductor."""

    def __init__(
        self,
        core: Core,
        registry: Registry,
        pools: PoolNodes,
        workers: WorkerMemory,
        persistence: Persistence,
        slo: SloKeeper,
        incarnation: int,
        loop_watch: LoopWatch,
    ) -> None:
        self._core = core
        self._registry = registry
        self._pools = pools
        self._workers = workers
        self._persistence = persistence
        self._slo = SloCalls(slo, core)
        self._incarnation = incarnation
        self._loop_watch = loop_watch
        self.scheduling = Scheduling(core, registry, pools, workers)

    async def Join(  # type: ignore[override]  # writes instead of yielding, so that cancellation takes effect immediately
        self, request_iterator: AsyncIterator[conductor_pb2.NodeReport], context: Context
    ) -> None:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("node"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of Join must name the node")
        try:
            member = self._registry.admit(first.node)
        except JoinRefused as error:
            log.warning("refused: %s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        self._joined(member, first)
        reading = asyncio.ensure_future(self._read(member, request_iterator))
        writing = asyncio.ensure_future(self._send_commands(member, context))
        try:
            await first_of(reading, writing, member.replaced)
        finally:
            writing.cancel()
            reading.cancel()
            try:
                end, last_write = await asyncio.gather(reading, writing, return_exceptions=True)
                if isinstance(end, Exception):
                    log.error("a report of node %s cannot be processed", member.node.node_id, exc_info=end)
                if isinstance(last_write, TimeoutError):  # no status can be sent
                    raise asyncio.CancelledError
            finally:  # also if cancelled while waiting for both
                self._left(member)
        if member.replaced.is_set():
            text = f"another stream has joined as {member.node.node_id!r}: node ids must be unique"
            await context.abort(grpc.StatusCode.ABORTED, text)

    async def Schedule(  # type: ignore[override]  # writes instead of yielding, so that cancellation takes effect immediately
        self, request_iterator: AsyncIterator[conductor_pb2.FrontendCalls], context: Context
    ) -> None:
        try:
            await self.scheduling.serve(request_iterator, context.write)
        except FrontendRefused as error:
            log.warning("refused: %s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def Preview(self, request: conductor_pb2.ScheduleRequest, context: Context) -> conductor_pb2.PreviewReply:
        try:
            return self.scheduling.preview(request)
        except MalformedCall as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def Cluster(self, request: conductor_pb2.ClusterRequest, context: Context) -> conductor_pb2.ClusterReply:
        self._slo.keeper.known_tenants.hear(request.frontend_id, request.tenants)
        return conductor_pb2.ClusterReply(
            conductor_incarnation=self._incarnation,
            software=own_software(),
            nodes=self.node_statuses(),
            ready_models=self._core.policy.ready_models(),
            samples=self.samples(),
        )

    def node_statuses(self) -> list[conductor_pb2.NodeStatus]:
        """Return the joined nodes with their last reports."""
        suspects = self._core.policy.suspects
        return [
            conductor_pb2.NodeStatus(node=member.node, report=member.report, suspect=member.node.node_id in suspects)
            for member in self._registry
        ]

    def samples(self) -> list[conductor_pb2.Sample]:
        """Return the conductor's own metrics."""
        return [
            *directory_samples(self._pools.directory_updater, self._workers.updater),
            *self._pools.samples(),
            *self._persistence.samples(),
            *self._core.samples(),
            *admission_samples(self._core.policy),
            *tenant_samples(self._core.policy),
            *cost_samples(self._core.policy),
            *self._registry.switches.samples(),
            *self._slo.keeper.samples(),
            sample("event_loop_lag_seconds", self._loop_watch.lag_s, process="conductor"),
            sample("event_loop_held_seconds", self._loop_watch.own_s, process="conductor"),
            sample("event_loop_stalls_total", self._loop_watch.num_stalls, process="conductor"),
            *(
                sample("trace_spans_total", count, process="conductor", result=result)
                for result, count in tracing.counts().items()
            ),
        ]

    async def DrainNode(
        self, request: conductor_pb2.DrainNodeRequest, context: Context
    ) -> conductor_pb2.DrainNodeReply:
        try:
            self._registry.ask_to_drain(request.node_id)
        except UnknownNode as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except NodeInUse as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        log.info("node %s is asked to drain", request.node_id)
        return conductor_pb2.DrainNodeReply()

    async def ShowSlo(self, request: conductor_pb2.ShowSloRequest, context: Context) -> conductor_pb2.ShowSloReply:
        return await self._slo.show(request, context)

    async def ChangeSlo(
        self, request: conductor_pb2.ChangeSloRequest, context: Context
    ) -> conductor_pb2.ChangeSloReply:
        return await self._slo.change(request, context)

    async def SwitchNode(
        self, request: conductor_pb2.SwitchNodeRequest, context: Context
    ) -> conductor_pb2.SwitchNodeReply:
        try:
            self._registry.ask_to_switch(request.node_id, request.role)
        except UnknownNode as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except SwitchRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        log.info("node %s is asked to become a %s node", request.node_id, wire.ROLES[request.role])
        return conductor_pb2.SwitchNodeReply()

    async def State(self, request: common_pb2.JsonRequest, context: Context) -> common_pb2.JsonReply:
        state = self._core.policy.snapshot(self._core.now_ns())
        state.update(
            incarnation=self._incarnation,
            ready_models=self._core.policy.ready_models(),
            pools=self._pools.state(),
            worker_memory=self._workers.state(),
            shared_store=self._persistence.state(),
            slo=self._slo.keeper.state(),
            role_switches=self._registry.switches.state(),
        )
        return common_pb2.JsonReply(json=json.dumps(state))

    async def Validate(self, request: common_pb2.JsonRequest, context: Context) -> common_pb2.JsonReply:
        problems, counts = self._core.policy.validate()
        counts["copy_tasks"] = self._pools.num_copies
        problems = [
            *problems,
            *(f"directory: {problem}" for problem in self._pools.validate()),
            *(f"directory of workers: {problem}" for problem in self._workers.validate()),
            *(f"{name} = {count} at rest" for name, count in counts.items() if count),
        ]
        return common_pb2.JsonReply(json=json.dumps({"ok": not problems, "problems": problems, "counts": counts}))

    async def Locate(self, request: conductor_pb2.LocateRequest, context: Context) -> conductor_pb2.LocateReply:
        try:
            keys = short_keys_from_bytes(request.chain)
        except KvPoolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        reply = conductor_pb2.LocateReply()
        for pool, held in self._pools.holders(request.kv_namespace, keys):
            reply.holders.add(pool=self._registry.refs[pool], num_blocks=held.blocks, ssd_blocks=held.ssd_blocks)
        return reply

    async def Overview(self, request: conductor_pb2.OverviewRequest, context: Context) -> common_pb2.JsonReply:
        found = overview(self._core, self._registry, self._slo.keeper, request.first_slice)
        return common_pb2.JsonReply(json=json.dumps({"incarnation": self._incarnation, **found}))

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Context) -> common_pb2.JsonReply:
        decisions, known = self._core.log, self._core.policy.history.find(request.request_id)
        now_ns, now_s = self._core.now_ns(), time.time()
        remembered = request_to_json(known, now_ns, now_s) if known is not None else None
        if decisions is None:
            return common_pb2.JsonReply(json=json.dumps({"log": None, "remembered": remembered}))
        try:
            found = await asyncio.to_thread(decisions.find, request.request_id)
        except OSError as error:
            await context.abort(grpc.StatusCode.INTERNAL, f"the decision log in {decisions.folder}: {error}")
        answer = {"log": str(decisions.folder), "remembered": remembered, **found.to_json()}
        return common_pb2.JsonReply(json=json.dumps(answer))

    def _joined(self, member: JoinedNode, first: conductor_pb2.NodeReport) -> None:
        node = member.node
        log.info("node %s joined as %s at %s", node.node_id, wire.ROLES[node.role], node.target)
        self._registry.note(member, first)
        self._core.handle(NodeJoined(wire.node_view(node)))
        self._core.handle(wire.report(node.node_id, first))
        if wire.ROLES[node.role] == "pool":
            self._pools.add(node)
        else:
            self._workers.note(node, is_draining=first.draining)

    async def _send_commands(self, member: JoinedNode, context: Context) -> None:
        accepted = conductor_pb2.JoinAccepted(conductor_incarnation=self._incarnation, software=own_software())
        await whole_write(context.write(conductor_pb2.NodeCommand(accepted=accepted)))
        while True:
            await whole_write(context.write(await member.commands.get()))

    async def _read(self, member: JoinedNode, reports: AsyncIterator[conductor_pb2.NodeReport]) -> None:
        async for report in reports:
            if member.replaced.is_set():
                return
            if report.HasField("node") and report.node != member.node:
                self._registry.renew(member, report.node)
                log.info("node %s is a %s node from now on", report.node.node_id, wire.ROLES[report.node.role])
                self._core.handle(NodeJoined(wire.node_view(report.node)))
            self._registry.note(member, report)
            if wire.ROLES[member.node.role] != "pool":
                self._workers.note(member.node, is_draining=report.draining)
            self._core.handle(wire.report(member.node.node_id, report))

    def _left(self, member: JoinedNode) -> None:
        if not self._registry.remove(member):
            return
        node = member.node
        if member.is_leaving or member.report.draining:
            log.info("node %s has left after draining", node.node_id)
        else:
            log.warning("node %s is lost: its stream ended", node.node_id)
        self._core.handle(NodeLost(node.node_id, node.incarnation))
        if wire.ROLES[node.role] == "pool":
            self._pools.remove(node.node_id)
        else:
            self._workers.remove(node.node_id)

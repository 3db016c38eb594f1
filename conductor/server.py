"""Conductor process: assembles service, policy and pool clients, and runs them until stopped."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.errors import SwitchRefused, UnknownNode
from conductor.metrics import costs_given
from conductor.persistence import Persistence, connect_shared_store
from conductor.policy.decisions import Shrink, SwitchRole
from conductor.policy.events import Tick
from conductor.pools import PoolNodes
from conductor.registry import Registry
from conductor.service import ConductorService
from conductor.slo.service import slo_keeper
from conductor.worker_memory import WorkerMemory
from moonpool_proto.v1 import common_pb2
from moonpool_proto.v1.conductor_pb2_grpc import add_ConductorServicer_to_server
from rpc.control import start_server
from rpc.metric_samples import conductor_samples, node_samples
from telemetry import LoopWatch, RoleMetrics

__all__ = ["ConductorConfig", "serve_conductor"]

log = logging.getLogger(__name__)
_STOP_GRACE_S = 0.2
_ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}


async def serve_conductor(
    config: ConductorConfig,
    stop: asyncio.Event,
    on_ready: Callable[[str], None],
    metrics: RoleMetrics | None = None,
) -> None:
    """Serve until `stop` is set; `on_ready(target)` is called once nodes can join.

    After a restart, workers join again and report the requests they hold; pool nodes resume their events at the
    position of the last directory snapshot, or send all their contents. Raises rpc.errors.AddressInUse or BindFailed,
    ConductorConfigError, and SharedStoreRefused if the Redis server is permanently unusable.
    """
    async with contextlib.AsyncExitStack() as stack:
        shared_store = await connect_shared_store(config)
        stack.push_async_callback(shared_store.close)
        core = Core(config)
        stack.callback(core.close)
        for model, profile in sorted(config.cost_profiles.items()):
            core.handle(costs_given(model, profile))
            log.info("costs of model %r begin with the %s profile %r", model, profile.kind, profile.name)
        pools, registry = PoolNodes(core, shared_store.incarnation, config.copy_timeout_s), Registry()
        stack.push_async_callback(pools.close)
        workers = WorkerMemory()
        stack.push_async_callback(workers.close)
        persistence = Persistence(config, shared_store, pools.directory_updater, registry)
        stack.push_async_callback(persistence.close)
        slo = slo_keeper(config, shared_store, core)
        stack.push_async_callback(slo.close)
        await slo.start()
        watch = LoopWatch()
        stack.push_async_callback(watch.close)
        service = ConductorService(core, registry, pools, workers, persistence, slo, shared_store.incarnation, watch)
        if metrics is not None:
            metrics.export_conductor(
                lambda: conductor_samples(service.samples()), lambda: node_samples(service.node_statuses())
            )
        server = await start_server(config.listen.listen, lambda s: add_ConductorServicer_to_server(service, s))
        ticking = asyncio.create_task(_tick(core, pools, registry, config.tick_s), name="conductor tick")
        try:
            persistence.start()
            workers.start()
            log.info("conductor listens at %s", server.target)
            on_ready(server.target)
            watch.start()
            await stop.wait()
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await server.stop(_STOP_GRACE_S)
            service.scheduling.frontends.close()


async def _tick(core: Core, pools: PoolNodes, registry: Registry, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        for decision in core.handle(Tick()):
            if isinstance(decision, Shrink):
                pools.shrink(decision)
            elif isinstance(decision, SwitchRole):
                _switch(decision, registry)
            else:
                log.warning("released: %s", decision)
        pools.send_replica_hints()


def _switch(decision: SwitchRole, registry: Registry) -> None:
    if decision.is_advice:
        registry.switches.count(registry.change_of(decision.node_id, decision.role), "advised")
        log.info("advice: %s should become a %s node: %s", decision.node_id, decision.role, decision.reason)
        return
    log.info("%s is to become a %s node: %s", decision.node_id, decision.role, decision.reason)
    try:
        registry.ask_to_switch(decision.node_id, _ROLES[decision.role])
    except (UnknownNode, SwitchRefused) as error:
        log.warning("the node keeps its role: %s", error)

"""One role in the foreground: its settings, its serve function, its READY line, its exit code.

Only the process that becomes a role imports the role's serving package.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from moonpool.config import (
    ConductorRole,
    EndpointPickerRole,
    FrontendRole,
    KvAgentRole,
    PoolNodeRole,
    WorkerRole,
)
from moonpool.errors import ConfigError
from moonpool.model_files import with_local_models
from moonpool.role_process.garbage import collect_and_freeze, collect_when_idle, defer_full_collections
from moonpool.supervision.child import DRAINED_LINE, READY_PREFIX
from moonpool.supervision.http_port import LISTENER_VARIABLE
from moonpool.transport_security import secure

if TYPE_CHECKING:
    from telemetry import RoleMetrics

log = logging.getLogger(__name__)

Ready = Callable[[str], None]
Serving = Coroutine[Any, Any, bool | None]  # True: it was drained, and must not be restarted


@dataclass(frozen=True)
class RoleCommand:
    """Command that runs one role."""

    command: str
    composite: type
    # (settings, node id, stop, on_ready, metrics to export at the health endpoint)
    serve: Callable[[Any, str, asyncio.Event, Ready, "RoleMetrics | None"], Serving]
    help: str
    is_internal: bool = False  # started by another process, never by hand


def run_and_exit(role: RoleCommand, config: Any) -> NoReturn:
    """Serve as `run_role` does, then end the process with its exit code. Raises ConfigError."""
    exit_code = run_role(role, config)
    # The role has closed what it opened. The interpreter's own shutdown, with torch and numba loaded, takes a second of
    # CPU in each process, and one Ctrl-C would wait for all of them.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def run_role(role: RoleCommand, config: Any) -> int:
    """Serve until SIGINT or SIGTERM; prints `MOONPOOL_READY {json}` to stdout once the role accepts calls.

    A node that ends because the conductor drained it prints `MOONPOOL_DRAINED`, so that its supervisor does not restart
    it.
    """
    from moonpool.role_configs import node_id_of
    from rpc.control import run
    from telemetry import logs, tracing

    node_id = node_id_of(config.node, role.command)
    logs.configure(role.command, node_id, config.logs.log_level, json=config.logs.log_format == "json")
    stop = asyncio.Event()

    def on_ready(target: str) -> None:
        collect_and_freeze()  # objects created so far live until the end
        announcement = {"node_id": node_id, "role": role.command, "target": target, "pid": os.getpid()}
        print(READY_PREFIX + json.dumps(announcement), flush=True)

    secure(config.tls, config.access)
    if role.composite in (WorkerRole, FrontendRole) or (isinstance(config, EndpointPickerRole) and config.reads_model):
        config = with_local_models(config)
    try:
        tracing.configure(role.command, node_id)
        drained = run(_serve(role, config, node_id, stop, on_ready), stop=stop)
    except Exception as error:
        if isinstance(error, _configuration_errors()):
            raise ConfigError(f"{node_id}: {error}") from error
        log.exception("%s ends: %s", node_id, error)
        return 1
    finally:
        tracing.close()
    if drained:
        print(DRAINED_LINE, flush=True)
    return 0


async def _serve(role: RoleCommand, config: Any, node_id: str, stop: asyncio.Event, on_ready: Ready) -> bool | None:
    """Serve the role, with health endpoints beside it if an address is configured."""
    health = getattr(config, "health", None)  # the frontend serves these routes itself
    address = health.address if health is not None else None
    if address is None:
        return await role.serve(config, node_id, stop, on_ready, None)
    from moonpool.role_process.health import health_answers
    from telemetry import RoleMetrics

    metrics = RoleMetrics(names_tenants=config.health.metrics_tenants)
    async with health_answers(address, node_id, stop, metrics) as (port, became_ready):

        def both_ready(target: str) -> None:
            became_ready()
            on_ready(target)

        log.info("serving /live, /ready and /metrics on port %d", port)
        return await role.serve(config, node_id, stop, both_ready, metrics)


async def _conductor(
    config: ConductorRole, node_id: str, stop: asyncio.Event, on_ready: Ready, metrics: "RoleMetrics | None"
) -> None:
    from conductor.server import serve_conductor
    from moonpool.role_configs import conductor_config

    await serve_conductor(conductor_config(config, node_id), stop, on_ready, metrics)


async def _pool_node(
    config: PoolNodeRole, node_id: str, stop: asyncio.Event, on_ready: Ready, metrics: "RoleMetrics | None"
) -> bool:
    from kvpool.server import serve_pool_node
    from moonpool.role_configs import pool_node_config

    return await serve_pool_node(pool_node_config(config, node_id), stop, on_ready, metrics)


async def _prefill_node(
    config: WorkerRole, node_id: str, stop: asyncio.Event, on_ready: Ready, metrics: "RoleMetrics | None"
) -> bool:
    return await _worker(config, "prefill", node_id, stop, on_ready, metrics)


async def _decode_node(
    config: WorkerRole, node_id: str, stop: asyncio.Event, on_ready: Ready, metrics: "RoleMetrics | None"
) -> bool:
    return await _worker(config, "decode", node_id, stop, on_ready, metrics)


async def _aggregated_node(
    config: WorkerRole, node_id: str, stop: asyncio.Event, on_ready: Ready, metrics: "RoleMetrics | None"
) -> bool:
    return await _worker(config, "aggregated", node_id, stop, on_ready, metrics)


async def _worker(
    config: WorkerRole,
    role: str,
    node_id: str,
    stop: asyncio.Event,
    on_ready: Ready,
    metrics: "RoleMetrics | None",
) -> bool:
    from moonpool.role_configs import worker_config
    from moonpool.role_process.worker import serve_worker

    return await serve_worker(worker_config(config, node_id), role, stop, on_ready, metrics)


async def _kv_agent(
    config: KvAgentRole, node_id: str, stop: asyncio.Event, on_ready: Ready, metrics: "RoleMetrics | None"
) -> None:
    from moonpool.role_configs import kv_agent_config
    from vllm_worker.agent import serve_kv_agent

    await serve_kv_agent(kv_agent_config(config, node_id), config.conductor.conductor, stop, on_ready, metrics)


async def _frontend(
    config: FrontendRole, node_id: str, stop: asyncio.Event, on_ready: Ready, metrics: "RoleMetrics | None"
) -> None:
    from frontend import SharedListener, serve_frontend
    from moonpool.role_configs import frontend_config

    defer_full_collections()
    shared, descriptor, folder = None, os.environ.pop(LISTENER_VARIABLE, ""), config.node.socket_dir
    if descriptor and folder is not None:
        shared = SharedListener(int(descriptor), folder / "frontend.lock")
    await serve_frontend(frontend_config(config, node_id), stop, on_ready, collect_when_idle, shared)


async def _endpoint_picker(
    config: EndpointPickerRole, node_id: str, stop: asyncio.Event, on_ready: Ready, metrics: "RoleMetrics | None"
) -> None:
    from endpoint_picker import serve_endpoint_picker
    from moonpool.role_configs import endpoint_picker_config

    await serve_endpoint_picker(endpoint_picker_config(config, node_id), stop, on_ready, metrics)


# Errors of a serve function after which a retry with the same configuration cannot succeed.
_CONFIGURATION_ERRORS = {
    "rpc.errors": ("AddressInUse", "BindFailed", "InvalidArgument"),
    "messenger.errors": ("RdmaUnavailable",),
    "settings.keys": ("InvalidSetting",),
    "worker.errors": ("StartupError",),
    "kvpool.errors": ("PoolConfigError",),
    "conductor.errors": ("ConductorConfigError", "JoinRefused", "SharedStoreRefused"),
    "frontend.errors": ("FrontendConfigError", "ModelFilesError", "HttpPortInUse"),
    "telemetry.errors": ("BadTracing",),
}


def _configuration_errors() -> tuple[type[Exception], ...]:
    """Return the classes of that table; modules that were not imported cannot have raised, and stay unimported."""
    loaded = [(sys.modules.get(module), names) for module, names in _CONFIGURATION_ERRORS.items()]
    return (ConfigError, *(getattr(module, name) for module, names in loaded if module for name in names))


ROLES: tuple[RoleCommand, ...] = (
    RoleCommand(
        "conductor",
        ConductorRole,
        _conductor,
        "The global scheduler: admits and places each request. Start it first.\n\n"
        "[bold]moonpool node conductor --listen 0.0.0.0:7000[/bold]",
    ),
    RoleCommand(
        "pool-node",
        PoolNodeRole,
        _pool_node,
        "The KV pool of one host: keeps KV in shared memory, outlives the workers, needs no GPU.\n\n"
        "[bold]moonpool node pool --conductor head:7000 --listen 10.0.0.2:7001 --data-host 10.0.0.2 "
        "--pool-bytes 64GiB[/bold]",
    ),
    RoleCommand(
        "prefill-node",
        WorkerRole,
        _prefill_node,
        "A worker that computes prompts and sends their KV, layer by layer, to decode workers.\n\n"
        "[bold]moonpool node prefill --conductor head:7000 --pool 10.0.0.2:7001 --listen 10.0.0.2:7002 "
        "--data-host 10.0.0.2 --model ./my-model[/bold]",
    ),
    RoleCommand(
        "decode-node",
        WorkerRole,
        _decode_node,
        "A worker that receives the KV of computed prompts and generates the answers in batches.\n\n"
        "[bold]moonpool node decode --conductor head:7000 --pool 10.0.0.2:7001 --listen 10.0.0.2:7003 "
        "--data-host 10.0.0.2 --model ./my-model[/bold]",
    ),
    RoleCommand(
        "aggregated-node",
        WorkerRole,
        _aggregated_node,
        "A worker that runs both phases: the baseline for disaggregation.\n\n"
        "[bold]moonpool node aggregated --conductor head:7000 --pool 10.0.0.2:7001 --listen 10.0.0.2:7004 "
        "--data-host 10.0.0.2 --model ./my-model[/bold]",
    ),
    RoleCommand(
        "frontend",
        FrontendRole,
        _frontend,
        "The API server: OpenAI's API, tokenising and streaming. Needs the model's tokenizer, not its weights.\n\n"
        "[bold]moonpool node frontend --conductor head:7000 --model ./my-model --host 0.0.0.0 --port 8000[/bold]",
    ),
    RoleCommand(
        "endpoint-picker",
        EndpointPickerRole,
        _endpoint_picker,
        "Tells a gateway, over Envoy's external processing, which API server or vLLM serves each request; with a "
        "conductor, rejects what would miss its objectives before an API server receives it.\n\n"
        "[bold]moonpool node endpoint-picker --listen 0.0.0.0:9002 --endpoint api-servers:8000 "
        "--conductor head:7000 --model ./my-model[/bold]",
    ),
    RoleCommand(
        "kv-agent",
        KvAgentRole,
        _kv_agent,
        "The slots and the pool of a stock vLLM, whose connector starts it.",
        is_internal=True,
    ),
)

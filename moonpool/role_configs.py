"""Conversion of a role's settings to the configuration object of the package that serves it.

The configuration classes are imported inside the functions, so that a process imports only the package of its role.
"""

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from moonpool.config import (
    ConductorRole,
    EndpointPickerRole,
    FrontendRole,
    KvAgentRole,
    PoolNodeRole,
    WorkerRole,
)
from moonpool.errors import ConfigError
from moonpool.model_files import cost_profiles_of
from moonpool.slo.file import checked_objectives
from moonpool.supervision.run_dir import OBJECTIVES, default_run_dir, make_run_dir
from moonpool.supervision.threads import engine_threads, usable_cores
from settings.conductor import Objectives
from settings.node import ListenSettings, NodeSettings
from settings.worker import ModelSettings

if TYPE_CHECKING:
    from conductor.config import ConductorConfig
    from conductor.policy.objectives import SloRecord
    from endpoint_picker import EndpointPickerConfig
    from frontend import FrontendConfig
    from kvpool import PoolNodeConfig
    from messenger import MessengerConfig
    from worker.config import WorkerConfig


def node_id_of(node: NodeSettings, command: str) -> str:
    """Return the configured node id, or one derived from the command and the host."""
    return node.node_id or f"{command.removesuffix('-node')}-{socket.gethostname()}"


def conductor_config(config: ConductorRole, node_id: str) -> "ConductorConfig":
    from conductor.config import ConductorConfig
    from conductor.redis_url import with_password

    entries, shared, slo = config.further.models, config.shared_store, config.slo
    own_objectives = {entry.name: entry.objectives for entry in entries if entry.objectives != Objectives()}
    redis_url = with_password(shared.redis_url, shared.redis_password)
    slo_dir = slo.slo_dir or (shared.state_dir / OBJECTIVES if shared.state_dir is not None else None)
    return ConductorConfig(
        listen=config.listen,
        node=replace(config.node, node_id=node_id),
        policy=replace(config.policy, model_objectives=own_objectives),
        objectives=_objectives_of_file(config),
        slo=replace(slo, slo_dir=slo_dir),
        cost_profiles=cost_profiles_of(config.costs.cost_profile, [entry.name for entry in entries]),
        decision_log=config.decision_log,
        shared_store=replace(shared, redis_url=redis_url),
    )


def _objectives_of_file(config: ConductorRole) -> "SloRecord | None":
    """Return the content of the objectives file. Raises ConfigError if other settings give objectives, too."""
    path = config.slo.slo_file
    if path is None:
        return None
    given = {"--ttft-slo": config.policy.ttft_slo_s, "--tbt-slo": config.policy.tbt_slo_s}
    given |= {f"those of the model {entry.name!r}": entry.objectives != Objectives() for entry in config.further.models}
    if twice := [name for name, value in given.items() if value]:
        raise ConfigError(f"--slo-file {path} holds all objectives: omit {', '.join(twice)}, or write them to the file")
    return checked_objectives(path)


def pool_node_config(config: PoolNodeRole, node_id: str) -> "PoolNodeConfig":
    from kvpool import PoolNodeConfig

    return PoolNodeConfig(
        node=replace(config.node, node_id=node_id),
        listen=config.listen,
        host=config.host,
        conductor_targets=config.conductor.conductor,
        pool=config.pool,
        messenger=_messenger_config(config, node_id, gpu=None),
    )


def worker_config(config: WorkerRole, node_id: str) -> "WorkerConfig":
    from worker.config import WorkerConfig

    paced = config.engine.engine == "paced"
    device = "cpu" if paced else choose_device(config.engine.device, config.worker.worker_index)
    host_workers = config.worker.host_workers
    return WorkerConfig(
        node=replace(config.node, node_id=node_id),
        listen=config.listen,
        host=config.host,
        conductor_targets=config.conductor.conductor,
        pool_target=config.worker.pool,
        num_device_workers=config.worker.device_workers or device_workers(config.engine.device, device, host_workers),
        num_host_workers=host_workers,
        model=config.model,
        blocks=config.blocks,
        engine=replace(config.engine, device=device, threads=engine_threads(config.engine.threads, 1, usable_cores())),
        kv=config.kv,
        messenger=_messenger_config(config, node_id, gpu=gpu_of(device)),
    )


def kv_agent_config(config: KvAgentRole, node_id: str) -> "WorkerConfig":
    from worker.config import WorkerConfig

    return WorkerConfig(
        node=replace(config.node, node_id=node_id),
        listen=ListenSettings(),
        host=config.host,
        conductor_targets=(),
        pool_target=config.worker.pool,
        model=ModelSettings(),
        blocks=config.blocks,
        engine=replace(config.engine, device="cpu", threads=1),
        kv=config.kv,
        messenger=_messenger_config(config, node_id, gpu=None),
    )


def frontend_config(config: FrontendRole, node_id: str) -> "FrontendConfig":
    from frontend import FrontendConfig, ServedModelConfig

    return FrontendConfig(
        models=tuple(
            ServedModelConfig(entry.path, entry.name, entry.aliases, entry.endless_window, *entry.parsers)
            for entry in config.served
        ),
        conductor_targets=config.conductor.conductor,
        http=config.http,
        blocks=config.blocks,
        node=replace(config.node, node_id=node_id),
    )


def endpoint_picker_config(config: EndpointPickerRole, node_id: str) -> "EndpointPickerConfig":
    from endpoint_picker import EndpointPickerConfig

    return EndpointPickerConfig(
        picker=config.picker,
        node=replace(config.node, node_id=node_id),
        listen=config.listen,
        http=config.http,
        admission=frontend_config(config, node_id) if config.reads_model else None,
    )


def choose_device(device: str, worker_index: int) -> str:
    """Return the torch device of worker number `worker_index` of the host; auto and cuda distribute over the GPUs."""
    if device not in ("auto", "cuda"):
        return device
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus:
        return f"cuda:{worker_index % num_gpus}"
    return "cpu" if device == "auto" else device


def device_workers(device: str, chosen: str, host_workers: int) -> int:
    """Return how many of the host's workers `choose_device(device)` places on the device `chosen`, at most."""
    if device not in ("auto", "cuda") or not chosen.startswith("cuda"):
        return host_workers
    import torch

    return -(-host_workers // torch.cuda.device_count())


def gpu_of(device: str) -> int | None:
    """Return the CUDA index of a torch device; None for the CPU."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


def _messenger_config(
    config: PoolNodeRole | WorkerRole | KvAgentRole, node_id: str, *, gpu: int | None
) -> "MessengerConfig":
    from messenger import MessengerConfig

    shm_dir = make_run_dir(config.node.socket_dir or default_run_dir(node_id))
    return MessengerConfig(transport=config.transport, host=config.host, tls=config.tls, shm_dir=shm_dir, gpu=gpu)

"""Conversion of a role's settings to the configuration object of the package that serves it.

A package's configuration class is imported where it is made: a process imports only what its role needs.
"""

import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.config import ConductorRole, FrontendRole, PoolNodeRole, WorkerRole
from moonpool.errors import ConfigError
from moonpool.model_files import cost_profiles_of
from moonpool.slo.file import checked_objectives
from moonpool.supervision.run_dir import OBJECTIVES, default_run_dir, make_run_dir
from moonpool.supervision.threads import engine_threads, usable_cores
from settings.conductor import Objectives
from settings.messenger import TlsSettings, TransportSettings
from settings.node import HostSettings, NodeSettings

if TYPE_CHECKING:
    from conductor.config import ConductorConfig
    from conductor.policy.objectives import SloRecord
    from frontend import FrontendConfig
    from kvpool import PoolNodeConfig
    from messenger import MessengerConfig
    from worker.config import WorkerConfig


def node_id_of(node: NodeSettings, command: str) -> str:
    """The configured node id, or one derived from the command and the host."""
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
    """The content of the objectives file; no other setting may give objectives beside it."""
    path = config.slo.slo_file
    if path is None:
        return None
    given = {"--ttft-slo": config.policy.ttft_slo_s, "--tbt-slo": config.policy.tbt_slo_s}
    given |= {f"those of the model {entry.name!r}": entry.objectives != Objectives() for entry in config.further.models}
    if twice := [name for name, value in given.items() if value]:
        raise ConfigError(f"--slo-file {path} holds all objectives: leave out {', '.join(twice)}, or write them there")
    return checked_objectives(path)


def pool_node_config(config: PoolNodeRole, node_id: str) -> "PoolNodeConfig":
    from kvpool import PoolNodeConfig

    return PoolNodeConfig(
        node_id=node_id,
        listen=config.listen.listen,
        advertise=config.host.advertise,
        conductor_targets=config.conductor.conductor,
        arena_bytes=config.pool.pool_bytes,
        hugepages=config.pool.pool_hugepages,
        policy=config.pool.pool_policy,
        quotas=config.pool.quotas,
        ssd_dir=config.pool.pool_ssd_dir,
        ssd_bytes=config.pool.ssd_bytes,
        ssd_depth=config.pool.pool_ssd_depth,
        host_id=config.host.host_id,
        messenger=_messenger_config(config.transport, config.tls, config.host, _socket_dir(config.node, node_id)),
    )


def worker_config(config: WorkerRole, node_id: str) -> "WorkerConfig":
    from worker.config import WorkerConfig

    paced = config.engine.engine == "paced"
    device = "cpu" if paced else choose_device(config.engine.device, config.worker.worker_index)
    return WorkerConfig(
        node_id=node_id,
        listen=config.listen.listen,
        advertise=config.host.advertise,
        conductor_targets=config.conductor.conductor,
        pool_target=config.worker.pool,
        model_path=config.model.path,
        served_model_name=config.model.name,
        engine=config.engine.engine,
        paced_profile=config.engine.paced_profile,
        paced_kv_bytes=config.engine.paced_kv_bytes,
        paced_answer_tokens=config.engine.paced_answer_tokens,
        device=device,
        dtype=config.engine.dtype,
        block_tokens=config.model.block_tokens,
        capacity_tokens=config.engine.capacity_tokens,
        max_batch=config.engine.max_batch,
        prefill_chunk_tokens=config.engine.prefill_chunk_tokens,
        prefill_lookahead=config.engine.prefill_lookahead,
        max_model_len=config.engine.max_model_len,
        threads=engine_threads(config.engine.threads, 1, usable_cores()),
        drain_grace_s=config.engine.worker_drain_grace_s,
        lease_s=config.kv.lease_s,
        put_ttl_s=config.kv.put_ttl_s,
        kv_load_wait_s=config.kv.kv_load_wait_s,
        kv_parity_sample=config.kv.kv_parity_sample,
        kv_storage=config.kv.kv_storage,
        push_timeout_s=config.kv.push_timeout_s,
        messenger=replace(
            _messenger_config(config.transport, config.tls, config.host, _socket_dir(config.node, node_id)),
            gpu=gpu_of(device),
        ),
    )


def frontend_config(config: FrontendRole, node_id: str) -> "FrontendConfig":
    from frontend import FrontendConfig, ServedModelConfig

    return FrontendConfig(
        models=tuple(ServedModelConfig(entry.path, entry.name, entry.aliases) for entry in config.served),
        conductor_targets=config.conductor.conductor,
        host=config.http.host,
        port=config.http.port,
        node_id=node_id,
        api_keys=config.http.api_key,
        api_keys_file=config.http.api_keys_file,
        tls_cert=config.http.http_tls_cert,
        tls_key=config.http.http_tls_key,
        metrics_need_admin=config.http.metrics_need_admin,
        max_connections=config.http.max_connections,
        header_timeout_s=config.http.header_timeout_s,
        block_tokens=config.model.block_tokens,
        request_timeout_s=config.http.request_timeout_s,
        drain_grace_s=config.http.drain_grace_s,
        hold_off_s=config.http.hold_off_s,
        endless_idle_s=config.http.endless_idle_s,
        answer_memory_nbytes=config.http.answer_memory_bytes,
    )


def choose_device(device: str, worker_index: int) -> str:
    """The torch device of the host's `worker_index`-th worker: auto and a bare cuda take turns over the GPUs."""
    if device not in ("auto", "cuda"):
        return device
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus:
        return f"cuda:{worker_index % num_gpus}"
    return "cpu" if device == "auto" else device


def gpu_of(device: str) -> int | None:
    """CUDA's number of a torch device; None for the CPU."""
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else None


def _messenger_config(
    transport: TransportSettings, tls: TlsSettings, host: HostSettings, socket_dir: Path
) -> "MessengerConfig":
    from messenger import MessengerConfig

    return MessengerConfig(
        transport=transport,
        host=host,
        tls=tls,
        shm_dir=socket_dir,
    )


def _socket_dir(node: NodeSettings, node_id: str) -> Path:
    return make_run_dir(node.socket_dir or default_run_dir(node_id))

"""From a role's settings to the configuration object of the package that serves it: every field mapped here once.

A package's configuration class is imported where it is made: a process imports only what its role needs.
"""

import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from moonpool.config import ConductorRole, FrontendRole, PoolNodeRole, WorkerRole
from moonpool.config.decision_log import DecisionLogSettings
from moonpool.config.places import HostSettings, NodeSettings
from moonpool.config.transport import TlsSettings, TransportSettings
from moonpool.errors import ConfigError
from moonpool.model_files import cost_profiles_of
from moonpool.slo.file import checked_objectives
from moonpool.supervision.run_dir import OBJECTIVES, default_run_dir, make_run_dir
from moonpool.supervision.threads import engine_threads, usable_cores

if TYPE_CHECKING:
    from conductor.decision_log import DecisionLogConfig
    from conductor.policy.config import Admission, AdmissionMode, RoleSwitching, Undivided
    from conductor.policy.objectives import SloRecord
    from conductor.server import ConductorConfig
    from engine.model import Dtype
    from frontend import FrontendConfig
    from kvpool import PoolNodeConfig
    from messenger import MessengerConfig
    from messenger.config import TransportChoice
    from messenger.memory import HugePages
    from worker.config import WorkerConfig


def node_id_of(node: NodeSettings, command: str) -> str:
    """The name the node was given, or one that the same command on the same host always has."""
    return node.node_id or f"{command.removesuffix('-node')}-{socket.gethostname()}"


def conductor_config(config: ConductorRole, node_id: str) -> "ConductorConfig":
    from conductor.config import ConductorConfig, Objectives
    from conductor.redis_url import with_password

    return ConductorConfig(
        listen=config.listen.listen,
        node_id=node_id,
        ttft_objective_s=config.scheduling.ttft_slo,
        tbt_objective_s=config.scheduling.tbt_slo,
        model_objectives={
            entry.name: Objectives(*entry.objectives)
            for entry in config.further.models
            if entry.objectives != (None, None)
        },
        objectives=_objectives(config),
        objectives_forced=config.slo.slo_force,
        objectives_dir=_objectives_dir(config),
        cost_profiles=cost_profiles_of(config.scheduling.cost_profile, [entry.name for entry in config.further.models]),
        balancing_threshold=config.scheduling.balancing_threshold,
        admission=cast("Admission", config.scheduling.admission),
        admission_mode=cast("AdmissionMode", config.scheduling.admission_mode),
        attained_share=config.scheduling.attained_share,
        overrun_probability=config.scheduling.overrun_probability,
        prefill_group_size=config.scheduling.prefill_group_size,
        prefill_group_min_tokens=config.scheduling.prefill_group_min_tokens,
        max_copies=config.scheduling.max_copies,
        replication_horizon_s=config.scheduling.replication_horizon,
        replica_idle_s=config.scheduling.replica_idle,
        max_queue_s=config.scheduling.max_queue,
        aging_s=config.scheduling.aging,
        max_tenants=config.scheduling.max_tenants,
        max_endless=config.scheduling.max_endless,
        report_timeout_s=config.scheduling.report_timeout,
        role_switching=cast("RoleSwitching", config.scheduling.role_switching),
        undivided=cast("Undivided", config.scheduling.undivided),
        role_hold_s=config.scheduling.role_hold,
        role_rest_s=config.scheduling.role_rest,
        size_grow_hold_s=config.scheduling.size_grow_hold,
        size_shrink_hold_s=config.scheduling.size_shrink_hold,
        decision_log=_decision_log_config(config.decisions),
        redis_url=with_password(config.shared.redis_url, config.shared.redis_password),
        cluster_name=config.shared.cluster_name,
        state_dir=config.shared.state_dir,
    )


def _decision_log_config(settings: DecisionLogSettings) -> "DecisionLogConfig | None":
    from conductor.decision_log import DecisionLogConfig

    if settings.decision_log is None:
        return None
    return DecisionLogConfig(
        settings.decision_log,
        settings.decision_log_size,
        settings.decision_log_files,
        settings.decision_log_block_tokens,
        settings.decision_log_events,
        settings.decision_log_candidates,
    )


def _objectives(config: ConductorRole) -> "SloRecord | None":
    """Those of the file, if there is one: then no other place may say any."""
    path = config.slo.slo_file
    if path is None:
        return None
    said = {"--ttft-slo": config.scheduling.ttft_slo, "--tbt-slo": config.scheduling.tbt_slo}
    said |= {f"those of the model {entry.name!r}": entry.objectives != (None, None) for entry in config.further.models}
    if twice := [name for name, value in said.items() if value]:
        raise ConfigError(f"--slo-file {path} holds all objectives: leave out {', '.join(twice)}, or write them there")
    return checked_objectives(path)


def _objectives_dir(config: ConductorRole) -> Path | None:
    own, state_dir = config.slo.slo_dir, config.shared.state_dir
    return own or (state_dir / OBJECTIVES if state_dir is not None else None)


def pool_node_config(config: PoolNodeRole, node_id: str) -> "PoolNodeConfig":
    from kvpool import PoolNodeConfig

    return PoolNodeConfig(
        node_id=node_id,
        listen=config.listen.listen,
        advertise=config.host.advertise,
        conductor_targets=config.conductor.conductor,
        arena_bytes=config.pool.pool_bytes,
        hugepages=cast("HugePages", config.pool.pool_hugepages),
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
        engine=cast("Literal['transformer', 'paced']", config.engine.engine),
        paced_profile=config.engine.paced_profile,
        paced_kv_bytes=config.engine.paced_kv_bytes,
        paced_answer_tokens=config.engine.paced_answer_tokens,
        device=device,
        dtype=cast("Dtype", config.engine.dtype),
        block_tokens=config.model.block_tokens,
        capacity_tokens=config.engine.capacity_tokens,
        max_batch=config.engine.max_batch,
        prefill_chunk_tokens=config.engine.prefill_chunk_tokens,
        prefill_lookahead=config.engine.prefill_lookahead,
        max_model_len=config.engine.max_model_len,
        threads=engine_threads(config.engine.threads, 1, usable_cores()),
        drain_grace_s=config.engine.worker_drain_grace,
        lease_s=config.pool.lease,
        put_ttl_s=config.pool.put_ttl,
        kv_load_wait_s=config.pool.kv_load_wait,
        kv_parity_sample=config.pool.kv_parity_sample,
        kv_storage=cast("Literal['exact', 'int8']", config.pool.kv_storage),
        push_timeout_s=config.transport.push_timeout,
        messenger=replace(
            _messenger_config(config.transport, config.tls, config.host, _socket_dir(config.node, node_id)),
            gpu=gpu_of(device),
        ),
    )


def frontend_config(config: FrontendRole, node_id: str) -> "FrontendConfig":
    from frontend import FrontendConfig, ModelConfig

    return FrontendConfig(
        models=tuple(ModelConfig(entry.path, entry.name, entry.aliases) for entry in config.served),
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
        header_timeout_s=config.http.header_timeout,
        block_tokens=config.model.block_tokens,
        request_timeout_s=config.http.request_timeout,
        drain_grace_s=config.http.drain_grace,
        hold_off_s=config.http.hold_off,
        endless_idle_s=config.http.endless_idle,
        answer_memory_nbytes=config.http.answer_memory,
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
        listen_host=transport.data_host,
        transport=cast("TransportChoice", transport.transport),
        run_dir=socket_dir,
        host_id=host.host_id or None,
        tcp_port=host.data_port,
        advertise_host=host.data_advertise or None,
        streams_per_peer=transport.streams_per_peer,
        max_connections_per_peer=transport.max_connections_per_peer,
        rdma_devices=transport.rdma_devices,
        rdma_silence_s=transport.rdma_silence,
        tls_cert=tls.tls_cert,
        tls_key=tls.tls_key,
        tls_ca=tls.tls_ca,
        tls_name=tls.tls_name,
    )


def _socket_dir(node: NodeSettings, node_id: str) -> Path:
    return make_run_dir(node.socket_dir or default_run_dir(node_id))

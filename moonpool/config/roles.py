"""Which slices each command reads; what a command reads is its whole configuration."""

from dataclasses import dataclass, field

from moonpool.config.decision_log import DecisionLogSettings
from moonpool.config.fields import Setting, composite_settings
from moonpool.config.health import HealthSettings
from moonpool.config.models import FurtherModels, ModelEntry, served_models
from moonpool.config.places import (
    ConductorTarget,
    HostSettings,
    ListenSettings,
    NodeSettings,
    WorkerSettings,
    is_wildcard,
    target_host,
)
from moonpool.config.pool import PoolSettings
from moonpool.config.scheduling import SchedulingSettings
from moonpool.config.shared_store import SharedStoreSettings
from moonpool.config.slices import (
    EngineSettings,
    HttpSettings,
    LogSettings,
    ModelSettings,
    TopologySettings,
)
from moonpool.config.slo import SloSettings
from moonpool.config.supervision import RuntimeSettings, SupervisorSettings
from moonpool.config.transport import AccessSettings, TlsSettings, TransportSettings
from moonpool.errors import ConfigError


@dataclass(frozen=True)
class ServeConfig:
    """`moonpool serve`."""

    model: ModelSettings = field(default_factory=ModelSettings)
    further: FurtherModels = field(default_factory=FurtherModels)
    topology: TopologySettings = field(default_factory=TopologySettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    decisions: DecisionLogSettings = field(default_factory=DecisionLogSettings)
    slo: SloSettings = field(default_factory=SloSettings)
    shared: SharedStoreSettings = field(default_factory=SharedStoreSettings)
    transport: TransportSettings = field(default_factory=TransportSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    supervisor: SupervisorSettings = field(default_factory=SupervisorSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    logs: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        for entry in self.served:
            _check_capacity(self.model, entry.engine(self.engine), entry)
            _check_storage(entry.engine(self.engine), self.pool)
        if self.transport.transport == "shm" and self.topology.pool_nodes > 1:
            raise ConfigError(
                f"transport is 'shm' and pool_nodes is {self.topology.pool_nodes}: several pool nodes stand for "
                "several hosts, which share no memory; take transport auto or tcp"
            )
        if self.runtime.is_ray and self.topology.pool_nodes > 1:
            raise ConfigError(
                f"pool_nodes is {self.topology.pool_nodes} with the runtime ray, which starts one pool node on each "
                "host that has workers: leave --pool-nodes out"
            )
        if self.runtime.is_ray and self.topology.conductors > 1:
            raise ConfigError(
                f"conductors is {self.topology.conductors} with the runtime ray, whose one conductor runs beside "
                "`serve`: leave --conductors out, or start each role by its own command"
            )
        if is_wildcard(self.transport.data_host) and self.transport.transport != "shm":
            raise ConfigError(
                f"--data-host is {self.transport.data_host!r}, a wildcard, which peers cannot dial: "
                "one machine's processes need an address of it, such as 127.0.0.1"
            )

    @property
    def served(self) -> tuple[ModelEntry, ...]:
        """All models; a request that names none goes to the first."""
        return served_models(self.model, self.further)


@dataclass(frozen=True)
class ConductorRole:
    """`moonpool conductor`."""

    node: NodeSettings
    listen: ListenSettings
    health: HealthSettings
    further: FurtherModels
    scheduling: SchedulingSettings
    decisions: DecisionLogSettings
    slo: SloSettings
    shared: SharedStoreSettings
    tls: TlsSettings
    access: AccessSettings
    logs: LogSettings


@dataclass(frozen=True)
class PoolNodeRole:
    """`moonpool pool-node`."""

    node: NodeSettings
    listen: ListenSettings
    health: HealthSettings
    host: HostSettings
    conductor: ConductorTarget
    pool: PoolSettings
    transport: TransportSettings
    tls: TlsSettings
    access: AccessSettings
    logs: LogSettings

    def __post_init__(self) -> None:
        _check_addresses(self.listen, self.host, self.transport)


@dataclass(frozen=True)
class WorkerRole:
    """`moonpool prefill-node | decode-node | aggregated-node`."""

    node: NodeSettings
    listen: ListenSettings
    health: HealthSettings
    host: HostSettings
    conductor: ConductorTarget
    worker: WorkerSettings
    model: ModelSettings
    engine: EngineSettings
    pool: PoolSettings
    transport: TransportSettings
    tls: TlsSettings
    access: AccessSettings
    logs: LogSettings

    def __post_init__(self) -> None:
        _check_capacity(self.model, self.engine)
        _check_storage(self.engine, self.pool)
        _check_addresses(self.listen, self.host, self.transport)


@dataclass(frozen=True)
class FrontendRole:
    """`moonpool frontend`."""

    node: NodeSettings
    conductor: ConductorTarget
    http: HttpSettings
    model: ModelSettings
    further: FurtherModels
    tls: TlsSettings
    access: AccessSettings
    logs: LogSettings

    def __post_init__(self) -> None:
        _ = self.served

    @property
    def served(self) -> tuple[ModelEntry, ...]:
        """All models; a request that names none goes to the first."""
        return served_models(self.model, self.further)


COMPOSITES: tuple[type, ...] = (ServeConfig, ConductorRole, PoolNodeRole, WorkerRole, FrontendRole)


def _check_capacity(model: ModelSettings, engine: EngineSettings, entry: ModelEntry | None = None) -> None:
    """Memory is given out in whole blocks."""
    if engine.capacity_tokens % model.block_tokens:
        fitting = -(-engine.capacity_tokens // model.block_tokens) * model.block_tokens
        of_model = f"model {entry.name!r}: " if entry is not None and "capacity_tokens" in entry.settings else ""
        raise ConfigError(
            f"{of_model}capacity_tokens is {engine.capacity_tokens} and block_tokens {model.block_tokens}: "
            f"the capacity must be a multiple of the block, {fitting} for example"
        )


def _check_storage(engine: EngineSettings, pool: PoolSettings) -> None:
    """What a paced engine writes is checked bit by bit."""
    if engine.engine == "paced" and pool.kv_storage != "exact":
        raise ConfigError(f"--engine is paced and --kv-storage {pool.kv_storage}: a paced engine's KV is kept exact")


def _check_addresses(listen: ListenSettings, host: HostSettings, transport: TransportSettings) -> None:
    """A node may listen at a wildcard, but others must be told what to dial."""
    if is_wildcard(target_host(listen.listen)) and not host.advertise:
        raise ConfigError(
            f"--listen is {listen.listen!r}, a wildcard, which others cannot dial: "
            "tell them this node's own address with --advertise host:port"
        )
    if is_wildcard(transport.data_host) and transport.transport != "shm" and not host.data_advertise:
        raise ConfigError(
            f"--data-host is {transport.data_host!r}, a wildcard, which peers cannot dial: "
            "tell them this host's own address with --data-advertise"
        )


def all_settings() -> dict[str, Setting]:
    """Every key that any command reads."""
    settings: dict[str, Setting] = {}
    for composite in COMPOSITES:
        settings.update(composite_settings(composite))
    return settings

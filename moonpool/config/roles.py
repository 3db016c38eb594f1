"""The configuration of each command: the settings groups that it reads, and rules over several groups."""

from dataclasses import dataclass, field

from moonpool.config.models import FurtherModels, ModelEntry, served_models
from moonpool.config.serve import RuntimeSettings, SupervisorSettings, TopologySettings
from settings.conductor import CostSettings, DecisionLogSettings, PolicyConfig, SharedStoreSettings, SloSettings
from settings.endpoint_picker import EndpointPickerSettings
from settings.frontend import HttpSettings
from settings.keys import InvalidSetting, Setting, composite_settings
from settings.kvpool import PoolSettings
from settings.messenger import AccessSettings, TlsSettings, TransportSettings
from settings.node import (
    ConductorTargetSettings,
    HealthSettings,
    HostSettings,
    KnownConductorSettings,
    ListenSettings,
    LogSettings,
    NodeSettings,
    is_wildcard,
    target_host,
)
from settings.worker import (
    BlockSettings,
    EngineSettings,
    KvSettings,
    ModelSettings,
    WorkerSettings,
    auto_capacity_problem,
)


@dataclass(frozen=True)
class ServeConfig:
    """`moonpool serve`."""

    model: ModelSettings = field(default_factory=ModelSettings)
    blocks: BlockSettings = field(default_factory=BlockSettings)
    further: FurtherModels = field(default_factory=FurtherModels)
    topology: TopologySettings = field(default_factory=TopologySettings)
    http: HttpSettings = field(default_factory=HttpSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    kv: KvSettings = field(default_factory=KvSettings)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    costs: CostSettings = field(default_factory=CostSettings)
    decision_log: DecisionLogSettings = field(default_factory=DecisionLogSettings)
    slo: SloSettings = field(default_factory=SloSettings)
    shared_store: SharedStoreSettings = field(default_factory=SharedStoreSettings)
    transport: TransportSettings = field(default_factory=TransportSettings)
    tls: TlsSettings = field(default_factory=TlsSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    supervisor: SupervisorSettings = field(default_factory=SupervisorSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    logs: LogSettings = field(default_factory=LogSettings)

    def __post_init__(self) -> None:
        _check_report_timeout(self.policy)
        for entry in self.served:
            _check_capacity(self.blocks, entry.engine(self.engine), entry)
            _check_storage(entry.engine(self.engine), self.kv)
        if self.transport.transport == "shm" and self.topology.pool_nodes > 1:
            raise InvalidSetting(
                f"transport must be auto or tcp with {self.topology.pool_nodes} pool nodes, which stand for hosts "
                "without shared memory, got 'shm'"
            )
        if self.runtime.is_ray and self.topology.pool_nodes > 1:
            raise InvalidSetting(
                "--pool-nodes must be omitted with the runtime ray, which starts a pool node on each host with "
                f"workers, got {self.topology.pool_nodes}"
            )
        if self.runtime.is_ray and self.topology.conductors > 1:
            raise InvalidSetting(
                f"--conductors must be 1 with the runtime ray, got {self.topology.conductors}: to run several, start "
                "each role by its own command"
            )
        if is_wildcard(self.transport.data_host) and self.transport.transport != "shm":
            raise InvalidSetting(
                "--data-host must be an address of this machine that peers can reach, such as 127.0.0.1, got the "
                f"wildcard {self.transport.data_host!r}"
            )

    @property
    def served(self) -> tuple[ModelEntry, ...]:
        """All models; a request that names none uses the first."""
        return served_models(self.model, self.further)


@dataclass(frozen=True)
class ConductorRole:
    """`moonpool conductor`."""

    node: NodeSettings
    listen: ListenSettings
    health: HealthSettings
    further: FurtherModels
    policy: PolicyConfig
    costs: CostSettings
    decision_log: DecisionLogSettings
    slo: SloSettings
    shared_store: SharedStoreSettings
    tls: TlsSettings
    access: AccessSettings
    logs: LogSettings

    def __post_init__(self) -> None:
        _check_report_timeout(self.policy)


@dataclass(frozen=True)
class PoolNodeRole:
    """`moonpool pool-node`."""

    node: NodeSettings
    listen: ListenSettings
    health: HealthSettings
    host: HostSettings
    conductor: ConductorTargetSettings
    pool: PoolSettings
    kv: KvSettings
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
    conductor: ConductorTargetSettings
    worker: WorkerSettings
    model: ModelSettings
    blocks: BlockSettings
    engine: EngineSettings
    pool: PoolSettings
    kv: KvSettings
    transport: TransportSettings
    tls: TlsSettings
    access: AccessSettings
    logs: LogSettings

    def __post_init__(self) -> None:
        _check_capacity(self.blocks, self.engine)
        _check_storage(self.engine, self.kv)
        _check_addresses(self.listen, self.host, self.transport)


@dataclass(frozen=True)
class KvAgentRole:
    """`moonpool kv-agent`, which `MoonpoolConnector` starts beside a stock vLLM. Of `engine` it uses the capacity."""

    node: NodeSettings
    conductor: KnownConductorSettings
    health: HealthSettings
    host: HostSettings
    worker: WorkerSettings
    blocks: BlockSettings
    engine: EngineSettings
    kv: KvSettings
    transport: TransportSettings
    tls: TlsSettings
    access: AccessSettings
    logs: LogSettings

    def __post_init__(self) -> None:
        if self.engine.capacity_tokens is None:
            raise InvalidSetting(auto_capacity_problem("vllm"))
        _check_capacity(self.blocks, self.engine)
        if self.kv.kv_storage != "exact":
            raise InvalidSetting(f"kv_storage must be exact with vLLM, got {self.kv.kv_storage!r}")
        if self.kv.kv_dtype != "auto":
            raise InvalidSetting(f"kv_dtype must be auto with vLLM, got {self.kv.kv_dtype!r}")


@dataclass(frozen=True)
class FrontendRole:
    """`moonpool frontend`."""

    node: NodeSettings
    conductor: ConductorTargetSettings
    http: HttpSettings
    model: ModelSettings
    blocks: BlockSettings
    further: FurtherModels
    tls: TlsSettings
    access: AccessSettings
    logs: LogSettings

    def __post_init__(self) -> None:
        _ = self.served

    @property
    def served(self) -> tuple[ModelEntry, ...]:
        """All models; a request that names none uses the first."""
        return served_models(self.model, self.further)


@dataclass(frozen=True)
class EndpointPickerRole(FrontendRole):
    """`moonpool endpoint-picker`. With a conductor, it reads requests as the API servers do, by their settings."""

    conductor: KnownConductorSettings
    listen: ListenSettings
    health: HealthSettings
    picker: EndpointPickerSettings

    @property
    def reads_model(self) -> bool:
        """True if it needs the models' tokenizers."""
        return bool(self.conductor.conductor) and self.picker.picker_admission


COMPOSITES: tuple[type, ...] = (
    ServeConfig,
    EndpointPickerRole,
    ConductorRole,
    PoolNodeRole,
    WorkerRole,
    FrontendRole,
)


def _check_report_timeout(policy: PolicyConfig) -> None:
    if 0 < policy.report_timeout_s < 2:
        raise InvalidSetting(
            f"--report-timeout must be at least 2, since nodes report every second, or 0 to disable it, got "
            f"{policy.report_timeout_s:g}"
        )


def _check_capacity(blocks: BlockSettings, engine: EngineSettings, entry: ModelEntry | None = None) -> None:
    """Raise InvalidSetting unless the capacity is a whole number of blocks, the unit of allocation."""
    of_model = f"model {entry.name!r}: " if entry is not None and "capacity_tokens" in entry.settings else ""
    if engine.capacity_tokens is None:
        if engine.engine != "transformer":
            raise InvalidSetting(f"{of_model}{auto_capacity_problem(engine.engine)}")
        return
    if engine.capacity_tokens % blocks.block_tokens:
        fitting = -(-engine.capacity_tokens // blocks.block_tokens) * blocks.block_tokens
        raise InvalidSetting(
            f"{of_model}capacity_tokens must be a multiple of block_tokens ({blocks.block_tokens}), for example "
            f"{fitting}, got {engine.capacity_tokens}"
        )


def _check_storage(engine: EngineSettings, kv: KvSettings) -> None:
    """Raise InvalidSetting for rounded KV of other engines than our own: the paced one verifies it bit by bit, and
    vLLM's is copied as it is. A sibling's KV is refused for them, and if it is rounded."""
    if engine.engine != "transformer" and kv.kv_storage != "exact":
        raise InvalidSetting(f"--kv-storage must be exact with --engine {engine.engine}, got {kv.kv_storage}")
    if engine.engine != "transformer" and kv.kv_dtype != "auto":
        raise InvalidSetting(f"--kv-dtype must be auto with --engine {engine.engine}, got {kv.kv_dtype}")
    if kv.reuse_profile and (engine.engine != "transformer" or kv.kv_storage != "exact"):
        raise InvalidSetting(
            "--reuse-profile needs --engine transformer and --kv-storage exact, "
            f"got {engine.engine} and {kv.kv_storage}"
        )


def _check_addresses(listen: ListenSettings, host: HostSettings, transport: TransportSettings) -> None:
    """Raise InvalidSetting if a node listens on a wildcard address and advertises no other."""
    if is_wildcard(target_host(listen.listen)) and not host.advertise:
        raise InvalidSetting(
            f"--listen with the wildcard {listen.listen!r} needs --advertise host:port, an address by which others "
            "reach this node"
        )
    if is_wildcard(transport.data_host) and transport.transport != "shm" and not host.data_advertise:
        raise InvalidSetting(
            f"--data-host with the wildcard {transport.data_host!r} needs --data-advertise, an address by which peers "
            "reach this host"
        )


def all_settings() -> dict[str, Setting]:
    """Return all settings of all commands by YAML key."""
    settings: dict[str, Setting] = {}
    for composite in COMPOSITES:
        settings.update(composite_settings(composite))
    return settings

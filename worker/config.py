"""Configuration of one worker: the settings of its role, with the values that are determined at startup filled in."""

from dataclasses import dataclass, field

from messenger import MessengerConfig
from settings.node import HostSettings, ListenSettings, NodeSettings
from settings.worker import BlockSettings, EngineSettings, KvSettings, ModelSettings, auto_capacity_problem


@dataclass(frozen=True)
class WorkerConfig:
    """Configuration of one engine process: prefill, decode or aggregated. Raises ValueError for invalid values."""

    node: NodeSettings  # node_id is set
    listen: ListenSettings
    conductor_targets: tuple[str, ...]  # gRPC targets of all conductors; none for a worker outside a cluster
    pool_target: str  # gRPC target of this host's pool node
    model: ModelSettings
    engine: EngineSettings  # the torch device and the number of threads are resolved: never auto or 0
    num_device_workers: int = 1  # workers that share the device: with capacity_tokens auto they divide its memory
    num_host_workers: int = 1  # workers that share the host's memory
    host: HostSettings = field(default_factory=HostSettings)
    blocks: BlockSettings = field(default_factory=BlockSettings)
    kv: KvSettings = field(default_factory=KvSettings)
    messenger: MessengerConfig = field(default_factory=MessengerConfig)

    def __post_init__(self) -> None:
        if "int8" in (self.kv.kv_storage, self.kv.kv_dtype) and self.engine.engine == "paced":
            raise ValueError("kv_storage must be exact and kv_dtype auto with a paced engine, got int8")
        if self.kv.reuse_profile and (self.engine.engine != "transformer" or self.kv.kv_storage != "exact"):
            raise ValueError(
                "reuse_profile needs engine transformer and kv_storage exact, "
                f"got {self.engine.engine} and {self.kv.kv_storage}"
            )
        if self.kv.kv_staging == "direct" and self.engine.engine == "paced":
            raise ValueError("kv_staging must be auto or mirror with a paced engine, got direct")
        if self.engine.capacity_tokens is None:
            if self.engine.engine != "transformer":
                raise ValueError(auto_capacity_problem(self.engine.engine))
        elif self.engine.capacity_tokens % self.block_tokens:
            raise ValueError(
                f"capacity_tokens must be a multiple of block_tokens ({self.block_tokens}), got "
                f"{self.engine.capacity_tokens}"
            )

    @property
    def node_id(self) -> str:
        """Name of the node in the cluster."""
        return self.node.node_id

    @property
    def block_tokens(self) -> int:
        """Tokens in a block, which is a slot of the engine."""
        return self.blocks.block_tokens

    @property
    def capacity_tokens(self) -> int:
        """Capacity of the engine's cache; with `auto`, it is known once the engine is loaded (`worker.kv_capacity`)."""
        assert self.engine.capacity_tokens is not None, "the capacity is not chosen yet"
        return self.engine.capacity_tokens

    @property
    def num_slots(self) -> int:
        """Number of slots in the engine's cache."""
        return self.capacity_tokens // self.block_tokens

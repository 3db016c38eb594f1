"""A worker's slice of the configuration; parsed and validated at the edge (`moonpool.config`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from messenger import MessengerConfig

if TYPE_CHECKING:  # it lives beside what imports torch
    from engine.model import Dtype


@dataclass(frozen=True)
class WorkerConfig:
    """What one engine process (prefill, decode or aggregated) needs to know."""

    node_id: str  # name in the cluster, kept over restarts
    listen: str  # gRPC target to serve on
    conductor_targets: tuple[str, ...]  # gRPC targets of all conductors
    pool_target: str  # gRPC target of this host's pool node
    model_path: Path  # Hugging Face folder
    served_model_name: str  # the name that requests use
    engine: Literal["transformer", "paced"] = "transformer"  # what computes; paced: delays of a cost profile
    paced_profile: str = "instant"  # of the paced engine: a bundled cost profile's name, or a file
    paced_kv_bytes: int = 0  # KV of a token, about; 0 = the model's own
    paced_answer_tokens: int = 128  # mean length of answers that end by themselves; 0 = none does
    device: str = "cpu"  # torch device
    dtype: Dtype = "auto"  # weights and KV: auto = float32 on CPU, the checkpoint's on a GPU
    block_tokens: int = 16  # tokens in a block (= an engine slot)
    capacity_tokens: int = 32768  # tokens of KV the engine's slots hold
    max_batch: int = 64  # sequences decoded in one step
    prefill_chunk_tokens: int = 512  # most prompt tokens computed in one step
    prefill_lookahead: int = 3  # requests being loaded or reserved ahead of the one computed
    max_model_len: int = 0  # 0 = the model's own
    threads: int = 1  # CPU threads of the engine
    lease_s: float = 30.0  # lease on pool blocks while they are read
    drain_grace_s: float = 20.0  # for the requests at hand once asked to leave; what is left then moves elsewhere
    kv_load_wait_s: float = 2.0  # a request waits so long for its blocks that are on SSD; then they are computed
    kv_parity_sample: float = 0.0  # share of requests whose reused KV is computed too, and compared
    kv_storage: Literal["exact", "int8"] = "exact"  # how KV is kept in the pool; int8 is an approximation
    put_ttl_s: float = 30.0  # a put not sealed after this long is dropped by the pool
    push_timeout_s: float = 10.0  # a push of KV is given up once the decode node has taken nothing for so long
    advertise: str = ""  # gRPC target that others dial, port 0 = the port listened at; empty = where it listens
    messenger: MessengerConfig = field(default_factory=MessengerConfig)

    def __post_init__(self) -> None:
        for name in ("block_tokens", "capacity_tokens", "max_batch", "prefill_chunk_tokens", "prefill_lookahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.conductor_targets:
            raise ValueError("conductor_targets is empty; a worker needs at least one conductor")
        if self.kv_load_wait_s < 0:
            raise ValueError(f"kv_load_wait_s is {self.kv_load_wait_s}; it must be at least 0")
        if not 0 <= self.kv_parity_sample <= 1:
            raise ValueError(f"kv_parity_sample is {self.kv_parity_sample}; expected a share from 0 to 1")
        if self.kv_storage == "int8" and self.engine == "paced":
            raise ValueError("kv_storage is int8 and the engine paced: its KV is checked and kept exact")
        if self.kv_storage == "int8" and self.kv_parity_sample:
            raise ValueError("kv_parity_sample compares exact KV: it cannot be used with kv_storage int8")
        if self.capacity_tokens % self.block_tokens:
            raise ValueError(
                f"capacity_tokens {self.capacity_tokens} is not a multiple of block_tokens {self.block_tokens}"
            )

    @property
    def num_slots(self) -> int:
        return self.capacity_tokens // self.block_tokens

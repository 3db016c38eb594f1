"""Settings of workers: the model, the engine that computes it, and how a worker uses the KV pool."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from settings.keys import InvalidSetting, Key, SettingsGroup, parse_size

__all__ = [
    "BUNDLED_MODEL",
    "BlockSettings",
    "EngineSettings",
    "KvSettings",
    "ModelSettings",
    "WorkerSettings",
    "name_of_folder",
]

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "moonpool" / "data" / "model"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def name_of_folder(path: Path) -> str:
    """The name of a model that was given none."""
    return "moonpool" if path == BUNDLED_MODEL else path.resolve().name


@dataclass(frozen=True)
class ModelSettings(SettingsGroup):
    """The model and its names."""

    panel: ClassVar[str] = "Model"
    model: Annotated[
        Path | None,
        Key("Hugging Face folder with config.json, *.safetensors and tokenizer.json", default_text="the bundled model"),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Key("Name of the model in requests; further names are aliases", default_text="the folder's name"),
    ] = ()

    @property
    def path(self) -> Path:
        """The model's folder."""
        return self.model or BUNDLED_MODEL

    @property
    def name(self) -> str:
        """The name that metrics and nodes use; requests may use it, too."""
        return self.served_model_name[0] if self.served_model_name else name_of_folder(self.path)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names that requests may use."""
        return self.served_model_name[1:]

    def check(self) -> None:
        if not all(name.strip() for name in self.served_model_name):
            raise InvalidSetting("--served-model-name is empty: give a name, or leave it out for the folder's")


@dataclass(frozen=True)
class BlockSettings(SettingsGroup):
    """Size of the blocks that KV is kept in; the same for all models of a cluster."""

    panel: ClassVar[str] = "Model"
    block_tokens: Annotated[int, Key("Tokens in a KV block, the unit of reuse and transfer", low=1, high=4096)] = 16


@dataclass(frozen=True)
class EngineSettings(SettingsGroup):
    """Computation of one worker's process."""

    panel: ClassVar[str] = "Engine"
    engine: Annotated[
        Literal["transformer", "paced"],
        Key("paced computes nothing: steps take the time of a cost profile, to try a cluster without GPUs"),
    ] = "transformer"
    paced_profile: Annotated[
        str,
        Key(
            "Cost profile of the paced engine: instant (steps take no time), the name of a bundled one, or a JSON file"
        ),
    ] = "instant"
    paced_kv_bytes: Annotated[
        int,
        Key(
            "Approximate KV bytes of a token under the paced engine; all layers are kept",
            low=0,
            parse=parse_size,
            default_text="as many as the model's",
        ),
    ] = 0
    paced_answer_tokens: Annotated[
        int,
        Key("Mean length, in tokens, of answers that the paced engine ends by itself; 0 ends none", low=0, high=10**6),
    ] = 128
    device: Annotated[
        str, Key("cpu, cuda:N, cuda (the host's workers take turns over its GPUs), or auto (cuda if there is a GPU)")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Key("Type of weights and KV; auto: float32 on a CPU, the checkpoint's own on a GPU"),
    ] = "auto"
    threads: Annotated[
        int, Key("CPU threads of each engine process", low=0, high=1024, default_text="cores shared equally")
    ] = 0
    capacity_tokens: Annotated[int, Key("Tokens of KV that one engine holds", low=1)] = 32768
    max_batch: Annotated[int, Key("Most sequences decoded in one step", low=1, high=65536)] = 64
    prefill_chunk_tokens: Annotated[int, Key("Most prompt tokens computed in one step", low=1)] = 512
    prefill_lookahead: Annotated[
        int, Key("Requests whose KV is loaded or reserved ahead of the one computed", low=1, high=1024)
    ] = 3
    max_model_len: Annotated[
        int, Key("Most tokens of a prompt and its answer together", low=0, default_text="the model's own")
    ] = 0
    worker_drain_grace_s: Annotated[
        float,
        Key(
            "Seconds for running requests when a worker is drained or stopped; then they move to another",
            low=0,
            high=86400,
            unit="s",
        ),
    ] = 20.0

    def check(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise InvalidSetting(f"--device is {self.device!r}: expected auto, cpu, cuda or cuda:N")


@dataclass(frozen=True)
class KvSettings(SettingsGroup):
    """How a worker stores KV in the pool, reads it from there and pushes it to other workers."""

    panel: ClassVar[str] = "KV pool"
    put_ttl_s: Annotated[
        float,
        Key("Seconds after which the pool drops blocks whose writer did not finish", low=0.1, high=3600, unit="s"),
    ] = 30.0
    lease_s: Annotated[
        float, Key("Seconds for which a reader's lease keeps blocks in the pool", low=0.1, high=3600, unit="s")
    ] = 30.0
    kv_load_wait_s: Annotated[
        float,
        Key(
            "Seconds that a request waits for its KV on a pool node's SSD; then it is computed",
            low=0,
            high=600,
            unit="s",
        ),
    ] = 2.0
    kv_parity_sample: Annotated[
        float,
        Key("Share of requests whose reused KV is also computed and compared; 0 compares none", low=0, high=1),
    ] = 0.0
    kv_storage: Annotated[
        Literal["exact", "int8"],
        Key("KV in the pool: exact as computed, or rounded to int8, an approximation in less than half the space"),
    ] = "exact"
    push_timeout_s: Annotated[
        float,
        Key(
            "Seconds after which a push of KV to a decode worker that receives nothing fails",
            low=0.1,
            high=3600,
            unit="s",
            panel="Transport",
        ),
    ] = 10.0

    def check(self) -> None:
        if self.kv_storage == "int8" and self.kv_parity_sample:
            raise InvalidSetting("--kv-parity-sample compares exact KV: it cannot be used with --kv-storage int8")


@dataclass(frozen=True)
class WorkerSettings(SettingsGroup):
    """The place of a worker on its host."""

    panel: ClassVar[str] = "This node"
    worker_index: Annotated[
        int, Key("Number of this worker among the host's, from 0: selects its GPU", low=0, high=4096)
    ] = 0
    pool: Annotated[str, Key("gRPC address of this host's pool node", default_text="required")] = ""

    def check(self) -> None:
        if not self.pool:
            raise InvalidSetting("--pool is required: the gRPC address of this host's pool node")

"""Settings of workers: model, engine, and use of the KV pool."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from settings.hub_model import hub_model_of, parse_model
from settings.keys import InvalidSetting, Key, SettingsGroup, parse_size

__all__ = [
    "BUNDLED_MODEL",
    "BlockSettings",
    "EngineSettings",
    "KvSettings",
    "ModelSettings",
    "WorkerSettings",
    "auto_capacity_problem",
    "name_of_model",
]

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "moonpool" / "data" / "model"
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def name_of_model(path: Path) -> str:
    """Return the default name of a model: its Hugging Face id without the revision, or the folder's name."""
    if path == BUNDLED_MODEL:
        return "moonpool"
    hub_model = hub_model_of(path)
    return path.resolve().name if hub_model is None else hub_model.id


@dataclass(frozen=True)
class ModelSettings(SettingsGroup):
    """The model and its names."""

    panel: ClassVar[str] = "Model"
    model: Annotated[
        Path | None,
        Key(
            "Hugging Face folder with config.json, *.safetensors and tokenizer.json, or the id of a model on the "
            "Hugging Face hub, ORG/NAME or ORG/NAME@REVISION, which is downloaded",
            parse=parse_model,
            default_text="the bundled model",
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        Key("Name of the model in requests; additional names are aliases", default_text="the id, or the folder's name"),
    ] = ()

    @property
    def path(self) -> Path:
        """The model's folder, or its Hugging Face id."""
        return self.model or BUNDLED_MODEL

    @property
    def name(self) -> str:
        """First name, which metrics and nodes use."""
        return self.served_model_name[0] if self.served_model_name else name_of_model(self.path)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Additional names that requests may use."""
        return self.served_model_name[1:]

    def check(self) -> None:
        if not all(name.strip() for name in self.served_model_name):
            raise InvalidSetting("--served-model-name must not be empty: give a name, or omit it to use the folder's")


@dataclass(frozen=True)
class BlockSettings(SettingsGroup):
    """Size of KV blocks; the same for all models of a cluster."""

    panel: ClassVar[str] = "Model"
    block_tokens: Annotated[
        int, Key("Tokens per KV block, the unit of reuse and transfer", low=1, high=4096, aliases=("--block-size",))
    ] = 16


@dataclass(frozen=True)
class EngineSettings(SettingsGroup):
    """Computation of one worker's process."""

    panel: ClassVar[str] = "Engine"
    engine: Annotated[
        Literal["transformer", "paced", "vllm"],
        Key(
            "Engine: Moonpool's own transformer, or vllm; paced computes nothing, and its steps take the time of a "
            "cost profile, to try a cluster without GPUs"
        ),
    ] = "transformer"
    engine_backend: Annotated[
        Literal["auto", "compiled", "triton", "flash-attn", "torch"],
        Key("How the transformer computes; auto is compiled on a CPU in float32, and torch otherwise"),
    ] = "auto"
    cuda_graphs: Annotated[
        Literal["off", "on"],
        Key(
            "Whether the transformer records decode steps as CUDA graphs on a GPU, where its backend can (triton), "
            "which saves the time of launching their kernels one by one"
        ),
    ] = "on"
    vllm_args: Annotated[
        str,
        Key(
            "Further arguments of vLLM in one text, such as '--tensor-parallel-size 2'; those that Moonpool sets "
            "itself are refused"
        ),
    ] = ""
    paced_profile: Annotated[
        str,
        Key(
            "Cost profile of the paced engine: instant (steps take no time), the name of a bundled profile, or a JSON "
            "file"
        ),
    ] = "instant"
    paced_kv_bytes: Annotated[
        int,
        Key(
            "Approximate KV bytes per token of the paced engine; the number of layers does not change",
            low=0,
            parse=parse_size,
            default_text="the model's",
        ),
    ] = 0
    paced_answer_tokens: Annotated[
        int,
        Key("Mean tokens of answers that the paced engine ends before max_tokens; 0 ends none", low=0, high=10**6),
    ] = 128
    device: Annotated[
        str,
        Key(
            "Device: cpu, cuda:N, cuda (distributes the host's workers over its GPUs), or auto (cuda if there is a GPU)"
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Key("Type of weights and KV; auto is float32 on a CPU, and the checkpoint's type on a GPU"),
    ] = "auto"
    threads: Annotated[
        int, Key("CPU threads of each engine process", low=0, high=1024, default_text="an equal share of the cores")
    ] = 0
    capacity_tokens: Annotated[
        int | None,
        Key(
            "Capacity of an engine's KV cache in tokens; auto: what the memory that is free after the weights are "
            "loaded holds, at most max_batch sequences of max_model_len",
            low=1,
            none_word="auto",
        ),
    ] = 32768
    memory_fraction: Annotated[
        float,
        Key(
            "Share of the device's free memory that a worker uses for steps and KV with --capacity-tokens auto",
            low=0,
            high=1,
            default_text="0.9 of a GPU's, 0.5 of a host's, divided by the workers there",
        ),
    ] = 0.0
    window_slots: Annotated[
        int,
        Key(
            "KV blocks that an engine holds in the layers with a window, of models that have any",
            low=0,
            default_text="enough for max_batch answers and two prompts",
        ),
    ] = 0
    max_batch: Annotated[
        int, Key("Maximum sequences decoded in one step", low=1, high=65536, aliases=("--max-num-seqs",))
    ] = 64
    preemption: Annotated[
        Literal["off", "on"],
        Key("Whether answers of a class give up their KV pages to waiting requests of a more urgent class"),
    ] = "on"
    prefill_chunk_tokens: Annotated[
        int, Key("Maximum prompt tokens computed in one step", low=1, aliases=("--max-num-batched-tokens",))
    ] = 512
    step_budget: Annotated[
        float,
        Key(
            "Longest step of a worker that decodes, seconds: the prompt tokens beside its answers are bounded to keep "
            "it; 0: --prefill-chunk-tokens alone",
            low=0,
            high=60,
            unit="s",
        ),
    ] = 0.0
    prefill_lookahead: Annotated[
        int, Key("Waiting requests whose KV is loaded or reserved ahead of the running one", low=1, high=1024)
    ] = 3
    max_model_len: Annotated[
        int, Key("Maximum tokens of a prompt and its answer together", low=0, default_text="the model's own")
    ] = 0
    digest_cache: Annotated[
        Literal["on", "off"],
        Key(
            "Whether workers keep the digests of weights in the user's cache folder, and trust them while the files "
            "are unchanged; off: every start hashes all weights"
        ),
    ] = "on"
    step_timeout_s: Annotated[
        float,
        Key(
            "Seconds after which a worker ends at once if a step of its engine has not ended: its requests move to "
            "other workers. Longer than its longest step; 0: never",
            low=0,
            high=86400,
            unit="s",
        ),
    ] = 300.0
    worker_drain_grace_s: Annotated[
        float,
        Key(
            "Seconds that running requests may take to finish when a worker is drained or stopped, before they move "
            "to another",
            low=0,
            high=86400,
            unit="s",
        ),
    ] = 20.0

    def check(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise InvalidSetting(f"--device must be auto, cpu, cuda or cuda:N, got {self.device!r}")


def auto_capacity_problem(engine: str) -> str:
    """Return the error for `capacity_tokens` auto with another engine than the transformer."""
    reason = {
        "vllm": "vLLM sizes its own cache, and the slots beside it are in host memory",
        "paced": "it has no weights and stands for a device of any size",
    }
    return f"capacity_tokens must be a number with --engine {engine}, got auto: {reason[engine]}; set --capacity-tokens"


@dataclass(frozen=True)
class KvSettings(SettingsGroup):
    """Storage of a worker's KV in the pool, loads from it, and pushes to other workers."""

    panel: ClassVar[str] = "KV pool"
    put_ttl_s: Annotated[
        float,
        Key(
            "Seconds after which the pool discards a block whose writer has not finished", low=0.1, high=3600, unit="s"
        ),
    ] = 30.0
    lease_s: Annotated[
        float, Key("Seconds for which a reader's lease protects blocks from eviction", low=0.1, high=3600, unit="s")
    ] = 30.0
    kv_load_wait_s: Annotated[
        float,
        Key(
            "Maximum seconds that a request waits for KV on a pool node's SSD before it computes it",
            low=0,
            high=600,
            unit="s",
        ),
    ] = 2.0
    kv_parity_sample: Annotated[
        float,
        Key("Share of requests whose reused KV is recomputed and compared; 0 disables the check", low=0, high=1),
    ] = 0.0
    kv_dtype: Annotated[
        Literal["auto", "int8"],
        Key(
            "Type of KV in engines, on the wire and in the pool: auto (the model's), or int8, an approximation with a "
            "scale for each group of values, of about half the bytes of 16 bits"
        ),
    ] = "auto"
    kv_int8_group: Annotated[
        int,
        Key("Values of a head that share a scale with --kv-dtype int8", low=0, default_text="half of a head's"),
    ] = 0
    kv_storage: Annotated[
        Literal["exact", "int8"],
        Key("Storage of KV in the pool: exact, or rounded to int8, an approximation in less than half the space"),
    ] = "exact"
    reuse_profile: Annotated[
        tuple[str, ...],
        Key(
            "File of `moonpool droidspeak profile`: its receiver reuses the KV of its sender, whose answers it may "
            "change; may be repeated",
            default_text="none: models reuse their own KV only",
        ),
    ] = ()
    kv_staging: Annotated[
        Literal["auto", "mirror", "direct"],
        Key(
            "Path of a GPU's KV: through a mirror in host memory, direct between the GPU and rdma adapters (needs "
            "--transport rdma), or auto (direct if possible)",
            panel="Transport",
        ),
    ] = "mirror"
    push_timeout_s: Annotated[
        float,
        Key(
            "Seconds after which a push of KV fails if the decode worker receives nothing",
            low=0.1,
            high=3600,
            unit="s",
            panel="Transport",
        ),
    ] = 10.0

    def check(self) -> None:
        if self.kv_dtype == "int8" and self.kv_parity_sample:
            raise InvalidSetting("--kv-parity-sample conflicts with --kv-dtype int8, whose roundings depend on chunks")
        if self.kv_int8_group and self.kv_dtype != "int8":
            raise InvalidSetting(f"--kv-int8-group is for --kv-dtype int8, got --kv-dtype {self.kv_dtype}")
        if self.kv_storage == "int8" and self.kv_parity_sample:
            raise InvalidSetting("--kv-parity-sample conflicts with --kv-storage int8: it compares exact KV")
        if self.kv_storage == "int8" and self.kv_staging == "direct":
            raise InvalidSetting("--kv-staging direct conflicts with --kv-storage int8, which converts in host memory")

    @property
    def int8_scale_group(self) -> int | None:
        """Argument `kv_scale_group` of `engine.load_model`."""
        return self.kv_int8_group if self.kv_dtype == "int8" else None


@dataclass(frozen=True)
class WorkerSettings(SettingsGroup):
    """Position of a worker on its host."""

    panel: ClassVar[str] = "This node"
    worker_index: Annotated[int, Key("Index of this worker on its host, from 0; selects its GPU", low=0, high=4096)] = 0
    host_workers: Annotated[
        int,
        Key("Workers on this host, among which --capacity-tokens auto divides its memory and GPUs", low=1, high=4096),
    ] = 1
    device_workers: Annotated[
        int,
        Key(
            "Workers on this worker's GPU, among which --capacity-tokens auto divides its memory",
            low=0,
            high=4096,
            default_text="0: --host-workers over the GPUs of the host",
        ),
    ] = 0
    pool: Annotated[str, Key("gRPC address of this host's pool node", default_text="required")] = ""

    def check(self) -> None:
        if not self.pool:
            raise InvalidSetting("--pool is required: give the gRPC address of this host's pool node")

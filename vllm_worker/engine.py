"""vLLM behind `worker.engine_interface`: its configuration, the slots beside it, and what its KV depends on."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from engine import EngineError
from engine.digest_cache import DigestCache
from engine.model import fingerprint_of
from kvpool import KvGroup, KvSpec, Provenance
from messenger import Messenger
from vllm_worker.block_layout import SlotLayout
from vllm_worker.engine_args import engine_args, prepare_environment, require_vllm
from vllm_worker.event_subscriber import EventSockets
from worker.config import WorkerConfig
from worker.engine_interface import Engine
from worker.errors import RequestRefused, StartupError
from worker.kv_memory import values_differ
from worker.policy import BatchLimits
from worker.request import Request
from worker.slot_memory import EngineMemory, SlotMemory
from worker.transformer import hardware_name


@dataclass(frozen=True, slots=True)
class VllmLimits:
    """The limits of a model that vLLM computes."""

    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()


class EngineInVllm(Engine):
    """A model that vLLM computes in processes of its own, with slots of `spec` beside them."""

    spec: KvSpec

    def new_memory(
        self, messenger: Messenger, *, num_slots: int, block_tokens: int, limits: BatchLimits | None = None
    ) -> VllmMemory:
        return VllmMemory(self.spec, num_slots, messenger)

    def new_stored(self, memory: EngineMemory, messenger: Messenger) -> tuple[SlotMemory, Provenance]:
        return memory, Provenance.EXACT

    def warm_up(self) -> None:
        return  # vLLM does that when it starts

    def check(self, request: Request) -> None:
        # vLLM checks everything else when a request is submitted.
        if request.rolling is not None:
            raise RequestRefused(
                "unsupported", "vLLM has no windows of endless requests (endless.window, --endless-window)"
            )


class VllmEngine(EngineInVllm):
    """vLLM's configuration of one worker; `vllm_worker.runner` starts and drives it."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises StartupError if vLLM is not installed or refuses the configuration."""
        prepare_environment(config)
        version = require_vllm()
        folder = config.messenger.shm_dir or Path(tempfile.mkdtemp(prefix="moonpool-kv-"))
        self.socket_path = folder / f"vllm-{os.getpid()}.sock"
        self.event_sockets = EventSockets.beside(self.socket_path)
        args = engine_args(config, self.socket_path)
        try:
            self.vllm_config = args.create_engine_config()
        except Exception as error:  # vLLM's own checks of the model and the arguments raise many types
            raise StartupError(f"vLLM refuses the configuration: {error}") from error
        model = self.vllm_config.model_config
        require_plain_kv(self.vllm_config)
        self.config = VllmLimits(model.get_vocab_size(), model.max_model_len, end_ids(model))
        self.spec = kv_spec(self.vllm_config)
        digests = DigestCache() if config.engine.digest_cache == "on" else None
        self.fingerprint = weights_fingerprint(config.model.path, digests)
        self.computation = computation(version, self.vllm_config)
        engine = config.engine
        kind = torch.device(torch.device(engine.device).type)  # of the GPUs, only vLLM's own are visible now
        self.hardware = f"vLLM {version}, {hardware_name(kind, engine.threads)}"

    @property
    def num_ranks(self) -> int:
        """Number of vLLM's processes that hold KV: its tensor-parallel degree."""
        degree: int = self.vllm_config.parallel_config.tensor_parallel_size
        return degree


class VllmMemory(EngineMemory):
    """Slots in host memory, between which and vLLM's blocks KV is copied (`vllm_worker.connector`)."""

    def __init__(self, spec: KvSpec, num_slots: int, messenger: Messenger) -> None:
        super().__init__(spec, num_slots, messenger, other_writers=True)
        self.layout = SlotLayout.of(spec, num_slots)

    @property
    def writable_fd(self) -> int:
        """Descriptor with which vLLM's processes map the slots."""
        assert self._memory is not None
        return self._memory.writable_fd

    def differ(
        self, group: int, given: NDArray[np.uint8], computed: NDArray[np.uint8], valid: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        return values_differ(self.spec, group, given, computed, valid)


def require_plain_kv(vllm_config: Any) -> None:
    """Raise StartupError for models and layouts whose KV has another shape than [layers, heads, tokens, head_dim]."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    rounded = vllm_config.cache_config.cache_dtype
    problems = {
        f"--kv-cache-dtype {rounded} on a CPU": rounded != "auto" and vllm_config.device_config.device_type == "cpu",
        "multi-head latent attention": model.use_mla,
        "layers without attention (Mamba, linear attention)": model.is_hybrid or model.is_attention_free,
        "an encoder": model.is_encoder_decoder,
        f"--pipeline-parallel-size {parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
    }
    for what, is_so in problems.items():
        if is_so:
            raise StartupError(f"vLLM with {what} is not supported: its KV has no place in the pool's layout")


def kv_spec(vllm_config: Any) -> KvSpec:
    """Return what a token's KV consists of.

    Layers of all kinds form one group: vLLM divides its blocks among them by itself.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dtype = str(model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype).removeprefix("torch.")
    dtype = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype)
    group = KvGroup(
        kind="full",
        window=0,
        layers=tuple(range(model.get_num_layers(vllm_config.parallel_config))),
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        dtype=dtype,
    )
    return KvSpec((group,), cache.block_size)


def weights_fingerprint(folder: Path, digests: DigestCache | None = None) -> str:
    """Return a 16-byte hash, in hex, of the model: the native engine's, or one of the files if it lacks the family.

    The former need not hash weights whose digest `digests` has.
    """
    try:
        return fingerprint_of(folder, digests)
    except EngineError:
        total = blake3(derive_key_context="moonpool v1 2026 model files", max_threads=blake3.AUTO)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        total.update(f"{path.name} {path.stat().st_size}\n".encode())
        total.update_mmap(path)
    return total.digest(length=16).hex()


def computation(version: str, vllm_config: Any) -> str:
    """Return what KV and tokens depend on beside the weights.

    That includes vLLM's version and the kind of processor, since its kernels differ from one to the other.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parts = (version, model.dtype, cache.cache_dtype, model.quantization, processor_kind(vllm_config))
    return "vllm " + " ".join(map(str, parts))


def processor_kind(vllm_config: Any) -> str:
    """Return the GPU's compute capability, or the CPU's widest vector instructions."""
    if vllm_config.device_config.device_type == "cuda":
        return "cuda %d.%d" % torch.cuda.get_device_capability()  # noqa: UP031  # of a pair
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def end_ids(model: Any) -> tuple[int, ...]:
    """Return the ids that end an answer of the model, as its configuration names them."""
    found = model.hf_text_config.eos_token_id
    ids: list[int] = [] if found is None else found if isinstance(found, list) else [found]
    return tuple(ids)

"""A worker whose engine is vLLM. All methods run on the event loop, except `warm_up`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from engine import EngineError
from engine.model import fingerprint_of
from kvpool import KvGroup, KvSpec, kv_namespace
from moonpool_proto.v1.common_pb2 import ROLE_AGGREGATED, Role
from moonpool_proto.v1.conductor_pb2 import Node
from vllm_worker.engine_args import engine_args, prepare_environment, require_vllm
from vllm_worker.runner import VllmRunner
from worker.config import WorkerConfig
from worker.engine_node import EngineNode
from worker.errors import StartupError
from worker.grammar_matching import GrammarCompiler
from worker.request import EngineSequence, Request
from worker.transformer import hardware_name


class VllmNode(EngineNode):
    """The components of a worker around vLLM, which schedules, computes and keeps KV by itself."""

    engine: VllmRunner

    def __init__(self, config: WorkerConfig, role: Role.ValueType) -> None:
        """Raises StartupError if vLLM is not installed, or refuses the configuration, or for a role that hands over."""
        if role != ROLE_AGGREGATED:
            raise StartupError(
                f"--engine vllm runs aggregated workers only, got {Role.Name(role)}: start it as an aggregated node"
            )
        super().__init__(config, role)
        self._has_engine = False
        prepare_environment(config)
        self._version = require_vllm()
        args = engine_args(config)
        try:
            vllm_config = args.create_engine_config()
        except Exception as error:  # vLLM's own checks of the model and the arguments raise many types
            raise StartupError(f"vLLM refuses the configuration: {error}") from error
        model = vllm_config.model_config
        self._vllm_config = vllm_config
        self.vocab_size = model.get_vocab_size()
        self.max_model_len = model.max_model_len
        self.spec = kv_spec(vllm_config)
        self.fingerprint = weights_fingerprint(config.model.path)
        self.namespace = kv_namespace(f"{self.fingerprint} {computation(self._version, vllm_config)}", self.spec)
        self.grammars = GrammarCompiler(config.model.path, self.vocab_size, end_ids(model), self._count_grammar)

    def warm_up(self) -> None:
        self.grammars.warm_up()

    async def start(self, target: str) -> None:
        """Start vLLM, which takes from seconds to minutes, and begin to join the conductors. Raises StartupError."""
        try:
            self.engine = await asyncio.to_thread(VllmRunner.start, self._vllm_config, self._on_step, self._on_decode)
            self._has_engine = True
            await self.engine.warm_up()
        except Exception as error:
            raise StartupError(f"vLLM does not start: {error}") from error
        self.engine.watch()
        self._begin_joining(target)

    async def close(self) -> None:
        await self._end_requests()
        if self._has_engine:
            await self.engine.close()
        await asyncio.to_thread(self.grammars.close)

    def _on_decode(self, batch: int, context_tokens: int, seconds: float) -> None:
        if self.has_started:
            self.reporter.decode(batch, context_tokens, seconds)

    def _engine_description(self) -> Node:
        engine = self.config.engine
        return Node(
            kv_namespace=self.namespace,
            spec=self.spec.to_proto(),
            capacity_tokens=self.capacity_tokens,
            kv_bytes_per_token=self.spec.bytes_per_token,
            model_fingerprint=self.fingerprint,
            hardware=f"vLLM {self._version}, {hardware_name(torch.device(engine.device), engine.threads)}",
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens of KV that vLLM has room for."""
        blocks: int = self.engine.config.cache_config.num_gpu_blocks
        return blocks * self.config.block_tokens

    @property
    def kv_nbytes(self) -> int:
        return self.capacity_tokens * self.spec.bytes_per_token

    @property
    def free_tokens(self) -> int:
        return int(self.capacity_tokens * (1.0 - self.engine.usage))

    def check(self, request: Request) -> None:
        return  # vLLM checks a request when it is submitted

    def _engine_counters(self) -> dict[str, float]:
        return {"preemptions": float(self.engine.preemptions)}

    def _kv_at_rest(self) -> tuple[list[str], dict[str, float]]:
        return [], {}

    def _stepped(self, sequence: EngineSequence) -> None:
        if timing := self.timings.get(id(sequence)):
            timing.cached_tokens = sequence.reused_tokens
            self.counters.add("cached_tokens", sequence.reused_tokens)


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


def weights_fingerprint(folder: Path) -> str:
    """Return a 16-byte hash, in hex, of the model: the native engine's, or one of the files if it lacks the family."""
    try:
        return fingerprint_of(folder)
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

"""How many sequences a machine decodes at once, and how fast, by PPL.LLM's rule for planning hardware.

Sequences of a mean length fill the memory that the weights leave. A step then takes the longer of two times: its
arithmetic at 60 % of the peak rate, and the reading of the weights and of all KV at 80 % of the memory's bandwidth.
Throughput is the batch divided by that time. The rule ignores prefill, launches, activations, and communication between
GPUs: where a model needs several, they are taken as one with their memory and rates together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from engine.config import ModelConfig
from engine.folder import layer_parts

COMPUTE_SHARE: Final = 0.6
MEMORY_SHARE: Final = 0.8
MOST_WEIGHTS: Final = 0.85
"""Share of the memory that weights may take before there are more GPUs."""
MOST_GPUS: Final = 64
_GIB = 2.0**30  # data sheets say GB, of memory in GiB


@dataclass(frozen=True)
class GpuSheet:
    """A GPU by its data sheet: dense rates, without sparsity."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: float  # in 16 bits with sums in 32
    int8_per_s: float


GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        GpuSheet("RTX 4090", 24 * _GIB, 1.008e12, 165e12, 661e12),
        GpuSheet("A100", 80 * _GIB, 2.039e12, 312e12, 624e12),
        GpuSheet("A800", 80 * _GIB, 2.039e12, 312e12, 624e12),
        GpuSheet("H100", 80 * _GIB, 3.35e12, 989e12, 1979e12),
        GpuSheet("H800", 80 * _GIB, 3.35e12, 989e12, 1979e12),
        GpuSheet("H200", 141 * _GIB, 4.8e12, 989e12, 1979e12),
        GpuSheet("B200", 180 * _GIB, 8.0e12, 2250e12, 4500e12),
    )
}


@dataclass(frozen=True)
class NumberFormat:
    """How a value is stored: its bytes, scales included, and whether products are of integers."""

    name: str
    value_bytes: float
    in_int8: bool = False


WEIGHT_FORMATS: Final = {
    of.name: of
    for of in (
        NumberFormat("16-bit", 2.0),
        NumberFormat("w8a8", 1.0, in_int8=True),
        NumberFormat("int4", 0.5 + 2 / 128),  # 128 values share a scale of 16 bits
    )
}
KV_FORMATS: Final = {
    of.name: of
    for of in (
        NumberFormat("16-bit", 2.0),
        NumberFormat("int8", 1.0 + 2 / 64),  # 64 values share a scale of 16 bits
        NumberFormat("int8-8", 1.0 + 2 / 8),  # PPL.LLM's: 8 values
    )
}


@dataclass(frozen=True)
class PlannedModel:
    """The sizes on which a model's costs depend, which are those of its parameters, its attention and its KV."""

    name: str
    parameters: float
    used_parameters: float  # by one token, without the look-up of its embedding
    query_size: int
    kv_values: int  # of a token in one layer that owns KV
    layer_windows: tuple[int, ...]  # of all layers; 0 = full attention
    kv_windows: tuple[int, ...]  # of the layers that own KV

    def cached_values(self, tokens: int) -> int:
        """Return the KV values of a sequence of `tokens`."""
        return self.kv_values * sum(min(tokens, window) if window else tokens for window in self.kv_windows)

    def flops(self, tokens: int) -> float:
        """Return one token's operations after `tokens`: two per parameter, four per query value and visible key."""
        seen = sum(min(tokens, window) if window else tokens for window in self.layer_windows)
        return 2 * self.used_parameters + 4 * self.query_size * seen


def planned_model(name: str, config: ModelConfig) -> PlannedModel:
    """Return the costs of a model of this configuration."""
    d, embedding = config.hidden_size, config.vocab_size * config.hidden_size
    looked_up = 0 if config.tie_word_embeddings else embedding
    parts = (part for layer in range(config.num_layers) for part in layer_parts(config, layer))
    total = looked_up + embedding + d + sum(prod(part.shape) for part in parts if not part.field.endswith("_scale"))
    unused = 0
    if experts := config.experts:
        idle = experts.count - experts.per_token
        unused = len(config.sparse_layers) * idle * 3 * d * experts.intermediate_size
    return PlannedModel(
        name,
        total,
        total - looked_up - unused,
        config.q_size,
        2 * config.kv_size,
        config.layer_windows,
        tuple(config.layer_windows[layer] for layer in config.kv_layers),
    )


def _dense(name: str, parameters: float, looked_up: float, layers: int, query_size: int, kv_size: int) -> PlannedModel:
    full = (0,) * layers
    return PlannedModel(name, parameters, parameters - looked_up, query_size, 2 * kv_size, full, full)


MODELS: Final = {
    model.name: model
    for model in (
        _dense("7B", 6.738e9, 0.131e9, 32, 4096, 4096),  # LLaMA-7B: multi-head attention
        _dense("70B", 70.554e9, 1.051e9, 80, 8192, 1024),  # Llama 3 70B: 8 KV heads
        # Mixtral 8x7B: two of eight experts
        PlannedModel("8x7B MoE", 46.703e9, 12.748e9, 4096, 2048, (0,) * 32, (0,) * 32),
    )
}


@dataclass(frozen=True)
class HardwarePlan:
    """The largest batch of a model on GPUs of one kind; a batch of 0 if it does not fit at all."""

    gpu: str
    gpus: int
    model: str
    batch: int
    compute_ms: float
    memory_ms: float
    tokens_per_s: float

    @property
    def step_ms(self) -> float:
        return max(self.compute_ms, self.memory_ms)


def plan(gpu: GpuSheet, model: PlannedModel, tokens: int, weights: NumberFormat, kv: NumberFormat) -> HardwarePlan:
    """Return the plan for sequences of `tokens`, on as many GPUs, a power of two, as the weights need."""
    weight_bytes = model.parameters * weights.value_bytes
    gpus = 1
    while gpus < MOST_GPUS and weight_bytes > gpus * gpu.memory_bytes * MOST_WEIGHTS:
        gpus *= 2
    sequence_bytes = model.cached_values(tokens) * kv.value_bytes
    batch = max(0, int((gpus * gpu.memory_bytes - weight_bytes) / sequence_bytes))
    rate = gpu.int8_per_s if weights.in_int8 else gpu.flops_per_s
    compute_s = batch * model.flops(tokens) / (gpus * rate * COMPUTE_SHARE)
    memory_s = (weight_bytes + batch * sequence_bytes) / (gpus * gpu.bytes_per_s * MEMORY_SHARE)
    rate_s = batch / max(compute_s, memory_s)
    return HardwarePlan(gpu.name, gpus, model.name, batch, compute_s * 1e3, memory_s * 1e3, rate_s)


def plans(models: Sequence[PlannedModel], tokens: int, weights: NumberFormat, kv: NumberFormat) -> list[HardwarePlan]:
    """Return the plans of each model on each GPU."""
    return [plan(gpu, model, tokens, weights, kv) for model in models for gpu in GPUS.values()]

"""The decoder's layers on the CPU in float32: compiled kernels around large matrix products.

A step of few rows runs wholly in one compiled call; a larger one takes its matrix products, and the attention of its
longer chunks, from torch. Rows that decode never gather keys or values: kernels read the slots in place.
"""

from collections.abc import Callable

import numpy as np
import torch

from engine import kernels
from engine.batch import StepPlan
from engine.cache import PagedCache
from engine.chunk_attention import ChunkAttention
from engine.config import ModelConfig
from engine.kernels import Shape, Step, Weights, Work
from engine.rope import RopeTable
from engine.weights import DecoderWeights

FEW_ROWS = 16  # up to here one compiled call beats separate matrix products


class CpuBackend:
    """Runs planned steps; keeps work buffers as large as the largest step so far.

    `batch_invariant` takes every step through the compiled kernels, whose rows do not depend on what else is in the
    batch: equal tokens then give equal bits for any chunking and any company, at a lower prefill speed.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, rope: RopeTable, *, batch_invariant: bool = False
    ) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope
        self._few_rows = config.max_model_len * 1024 if batch_invariant else FEW_ROWS
        self._shape = Shape(config.num_heads, config.num_kv_heads, config.head_dim, np.float32(config.rms_norm_eps))
        self._arrays = Weights(*(getattr(weights, name).numpy() for name in Weights._fields))
        self._buffers: dict[str, kernels.Floats] = {}

    def run(self, plan: StepPlan, cache: PagedCache, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        """Writes the KV of all rows, returns logits float32 [len(plan.logits_rows), vocab]."""
        self._rope.reach(plan.max_context)
        count = len(plan.token_ids)
        work = self._work(count, plan.max_context)
        np.take(self._weights.embedding.numpy(), plan.token_ids, axis=0, out=work.x)
        step = self._step(plan, cache)
        if count <= self._few_rows:
            self._run_compiled(step, work, on_layer)
        else:
            self._run_composed(plan, cache, step, work, on_layer)
        return self._logits(plan, work.x, compiled=count <= self._few_rows)

    def _run_compiled(self, step: Step, work: Work, on_layer: Callable[[int], None] | None) -> None:
        layers, rows = self._config.num_layers, np.arange(len(work.x), dtype=np.int32)
        if on_layer is None:
            kernels.run_layers(0, layers, self._shape, self._arrays, step, work, rows)
            return
        for layer in range(layers):
            kernels.run_layers(layer, layer + 1, self._shape, self._arrays, step, work, rows)
            on_layer(layer)

    def _run_composed(
        self, plan: StepPlan, cache: PagedCache, step: Step, work: Work, on_layer: Callable[[int], None] | None
    ) -> None:
        w, shape, arrays = self._weights, self._shape, self._arrays
        x, hidden, qkv, mixed, gate_up, gated, _ = (torch.from_numpy(buffer) for buffer in work)
        attention = ChunkAttention(plan, cache, self._config, step)
        for layer in range(self._config.num_layers):
            kernels.rms_norm(work.x, arrays.attention_norm[layer], shape.eps, work.hidden)
            _multiply(hidden, w.qkv[layer], w.qkv_bias[layer], qkv)
            kernels.place_rows(layer, shape, arrays, step, work.qkv)
            if on_layer is not None:
                on_layer(layer)
            kernels.attend_rows(layer, attention.short_rows, shape, step, work.qkv, work.scores, work.mixed)
            attention.run(layer, work.qkv, work.mixed)
            _accumulate(mixed, w.out[layer], w.out_bias[layer], x)
            kernels.rms_norm(work.x, arrays.mlp_norm[layer], shape.eps, work.hidden)
            _multiply(hidden, w.gate_up[layer], w.gate_up_bias[layer], gate_up)
            kernels.gate(work.gate_up, work.gated)
            _accumulate(gated, w.down[layer], w.down_bias[layer], x)

    def _logits(self, plan: StepPlan, x: kernels.Floats, *, compiled: bool) -> torch.Tensor:
        last = x[plan.logits_rows]
        normed = np.empty_like(last)
        kernels.rms_norm(last, self._weights.final_norm.numpy(), self._shape.eps, normed)
        if not compiled:
            return torch.from_numpy(normed) @ self._weights.head.t()
        logits = torch.empty(len(last), self._config.vocab_size)
        kernels.multiply_head(normed, self._weights.head.numpy(), logits.numpy())
        return logits

    def _work(self, rows: int, positions: int) -> Work:
        c = self._config
        qkv, f = c.q_size + 2 * c.kv_size, c.intermediate_size

        def buffer(name: str, width: int) -> kernels.Floats:
            return self._buffer(name, rows * width).reshape(rows, width)

        return Work(
            x=buffer("x", c.hidden_size),
            hidden=buffer("hidden", c.hidden_size),
            qkv=buffer("qkv", qkv),
            mixed=buffer("mixed", c.q_size),
            gate_up=buffer("gate_up", 2 * f),
            gated=buffer("gated", f),
            scores=self._buffer("scores", positions),
        )

    def _buffer(self, name: str, size: int) -> kernels.Floats:
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, np.float32)
        return self._buffers[name][:size]

    def _step(self, plan: StepPlan, cache: PagedCache) -> Step:
        return Step(
            positions=plan.positions,
            row_tables=plan.table_begin[:, plan.row_chunk],
            tables=plan.tables,
            cos=self._rope.cos.numpy(),
            sin=self._rope.sin.numpy(),
            memory=cache.flat.numpy(),
            block_tokens=cache.block_tokens,
            windows=cache.windows,
            slot_sizes=cache.slot_sizes,
            layer_groups=cache.layer_group,
            layer_bases=cache.layer_base,
        )


def _multiply(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """out = a @ weight + bias [M | 0]."""
    if bias.numel():
        torch.addmm(bias, a, weight, out=out)
    else:
        torch.mm(a, weight, out=out)


def _accumulate(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """out += a @ weight + bias [M | 0]."""
    if bias.numel():
        out += bias
    out.addmm_(a, weight)

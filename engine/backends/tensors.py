"""The decoder's layers in plain torch operations, on any device and in any dtype, around one kind of attention and
of linear layers.
"""

import numpy as np
import torch

from engine.backends.device_arrays import on_device
from engine.backends.interface import Linears, PagedAttention, Rows
from engine.backends.torch_linear import rms_norm
from engine.batch import FlatBatch, LayerHook
from engine.cache import PagedCache
from engine.config import ModelConfig
from engine.int8_rows import stored_rows
from engine.rope import RopeTable, rotated
from engine.weights import DecoderWeights


class TensorBackend:
    """Backend that runs planned steps; its only state between steps is the rotary table."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        rope: RopeTable,
        attention: PagedAttention,
        linears: Linears,
    ) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope
        self._attention = attention
        self._linears = linears
        self._device = weights.embedding.device

    def run(self, plan: FlatBatch, cache: PagedCache, on_layer: LayerHook, before_layer: LayerHook) -> torch.Tensor:
        """Write the KV of all rows and return logits, float32 [len(plan.logits_rows), vocab]."""
        config, w = self._config, self._weights
        cos, sin, rows = self._rope.rows(plan.rotations, plan.rotations != plan.positions)
        blocks, offsets = np.divmod(plan.positions, cache.block_tokens)
        index = on_device(
            {
                "angles": rows,
                "tokens": plan.token_ids,
                "logits": plan.logits_rows,
                "offsets": offsets,
                "slots": plan.tables[plan.table_begin[:, plan.row_chunk] + blocks],  # [G, N]
            },
            self._device,
            torch.int64,
        )
        cos, sin = cos[:, index["angles"], None, :], sin[:, index["angles"], None, :]
        attention = self._attention.begin(plan, cache)
        tokens = index["tokens"] if plan.device_ids is None else plan.device_ids
        x, kv_layers = self._entering(plan, tokens), config.used_kv_layers
        for layer in range(plan.span.first, plan.span.last + 1):
            kv_layer = kv_layers[layer]
            if plan.layer_inputs is not None and layer in plan.layer_inputs.layers:
                plan.layer_inputs.take(layer, x)
            rope = config.layer_ropes[layer]
            q, k, v = self._project(layer, self._linears.normed(x, w.attention_norm[layer]), cos[rope], sin[rope])
            if k.numel():
                if before_layer is not None:
                    before_layer(kv_layer)
                group, view = cache.layer_view(kv_layer)
                slots = index["slots"][group]
                view[slots, :, 0, index["offsets"]] = stored_rows(k, config.kv_scale_group)
                view[slots, :, 1, index["offsets"]] = stored_rows(v, config.kv_scale_group)
                if on_layer is not None:
                    on_layer(kv_layer)
            if plan.only_kv and layer == plan.span.last:
                break
            h = self._linears.linear("out", layer, attention.run(layer, q).reshape(len(x), -1))
            x = x + (self._norm(h, w.attention_post_norm[layer]) if config.post_norms else h)
            place = config.mlp_places[layer]
            if layer in config.sparse_layers:
                h = self._linears.mix_experts(place, self._norm(x, w.mlp_norm[layer]))
            else:
                gate_up = self._linears.linear("gate_up", place, self._linears.normed(x, w.mlp_norm[layer]))
                h = self._linears.linear("down", place, self._linears.gated(gate_up))
            x = x + (self._norm(h, w.mlp_post_norm[layer]) if config.post_norms else h)
        x = x[index["logits"]]
        logits = (self._norm(x, w.final_norm) @ w.head.t()).float()
        cap = config.logits_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _entering(self, plan: FlatBatch, tokens: torch.Tensor) -> torch.Tensor:
        """Return what enters the first layer that the step computes, [N, d]."""
        if plan.inputs is not None:
            return plan.inputs.to(self._weights.embedding)
        x = self._weights.embedding[tokens]
        scale = self._config.embedding_scale
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype)

    def _project(
        self, layer: int, rows: Rows, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [N, heads, head_dim], keys and values [N, kv_heads, head_dim], normalised and rotated.

        Keys and values are empty if the layer uses those of another one.
        """
        config, w = self._config, self._weights
        width = None if config.kv_owners[layer] == layer else config.q_size
        qkv = self._linears.linear("qkv", layer, rows, width)
        qkv = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = qkv.tensor_split([config.num_heads, config.num_heads + config.num_kv_heads], dim=1)
        if config.qk_norm:
            q, k = self._norm(q, w.q_norm[layer]), self._norm(k, w.k_norm[layer])
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self._config.rms_norm_eps)

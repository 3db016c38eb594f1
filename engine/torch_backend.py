"""The decoder's layers in plain torch operations, on any device and in any dtype.

Attention is split within a step: all decode rows in one padded call, each longer chunk in its own call. Keys and values
are gathered from the slots through the cache's strided views.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import FlatBatch, LayerHook, first_visible
from engine.cache import PagedCache
from engine.config import ModelConfig
from engine.rope import RopeTable
from engine.weights import DecoderWeights


@dataclass(frozen=True)
class _GroupIndex:
    """Locations in a group's slots that this step writes and reads."""

    slots: torch.Tensor  # int64 [N]: slot of each row's position
    offsets: torch.Tensor  # int64 [N]: token within that slot
    prefills: list[tuple[int, int, torch.Tensor, torch.Tensor]]  # first row, last row + 1, slots, mask [n, T]
    decode_rows: torch.Tensor  # int64 [D]
    decode_slots: torch.Tensor  # int64 [D, blocks], padded with the row's own slot
    decode_mask: torch.Tensor  # bool [D, 1, 1, T]


class TorchBackend:
    """Backend that runs planned steps; its only state between steps is the rotary table."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, rope: RopeTable) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope
        self._device = weights.embedding.device

    def run(self, plan: FlatBatch, cache: PagedCache, on_layer: LayerHook, before_layer: LayerHook) -> torch.Tensor:
        """Write the KV of all rows and return logits, float32 [len(plan.logits_rows), vocab]."""
        config, w = self._config, self._weights
        self._rope.reach(plan.max_context)
        positions = self._index(plan.positions)
        cos, sin = self._rope.cos[positions, None, :], self._rope.sin[positions, None, :]
        groups = [_index_group(plan, cache, g, self._device) for g in range(len(cache.groups))]
        place = {layer: (g, i) for g, shape in enumerate(cache.groups) for i, layer in enumerate(shape.layers)}
        x = w.embedding[self._index(plan.token_ids)]
        for layer in range(config.num_layers):
            group, depth = place[layer]
            h = F.rms_norm(x, (config.hidden_size,), w.attention_norm[layer], config.rms_norm_eps)
            q, k, v = self._project(layer, h, cos, sin)
            if before_layer is not None:
                before_layer(layer)
            view = cache.views[group][:, depth]  # [slots, kv_heads, 2, block_tokens, head_dim]
            index = groups[group]
            view[index.slots, :, 0, index.offsets] = k
            view[index.slots, :, 1, index.offsets] = v
            if on_layer is not None:
                on_layer(layer)
            mixed = _attend(q, view, index)
            x = x + _linear(mixed.reshape(len(x), -1), w.out[layer], w.out_bias[layer])
            h = F.rms_norm(x, (config.hidden_size,), w.mlp_norm[layer], config.rms_norm_eps)
            gate, up = _linear(h, w.gate_up[layer], w.gate_up_bias[layer]).chunk(2, dim=-1)
            x = x + _linear(F.silu(gate) * up, w.down[layer], w.down_bias[layer])
        x = x[self._index(plan.logits_rows)]
        return (F.rms_norm(x, (config.hidden_size,), w.final_norm, config.rms_norm_eps) @ w.head.t()).float()

    def _project(
        self, layer: int, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [N, heads, head_dim], keys and values [N, kv_heads, head_dim], normalised and rotated."""
        config, w = self._config, self._weights
        qkv = _linear(h, w.qkv[layer], w.qkv_bias[layer]).view(len(h), -1, config.head_dim)
        q, k, v = torch.split(qkv, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if config.qk_norm:
            q = F.rms_norm(q, (config.head_dim,), w.q_norm[layer], config.rms_norm_eps)
            k = F.rms_norm(k, (config.head_dim,), w.k_norm[layer], config.rms_norm_eps)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


def _index_group(plan: FlatBatch, cache: PagedCache, group: int, device: torch.device) -> _GroupIndex:
    block_tokens, window = cache.block_tokens, cache.groups[group].window
    begin = plan.table_begin[group].astype(np.int64)
    slots = plan.tables[begin[plan.row_chunk] + plan.positions // block_tokens]
    sizes = np.diff(plan.chunk_rows)
    prefills = []
    for chunk in np.nonzero(sizes > 1)[0]:
        start, size = int(plan.starts[chunk]), int(sizes[chunk])
        skipped = first_visible(start, window) // block_tokens
        table = plan.tables[begin[chunk] + skipped : begin[chunk] - (-(start + size) // block_tokens)]
        keys = np.arange(skipped * block_tokens, (skipped + len(table)) * block_tokens)
        distance = np.arange(start, start + size)[:, None] - keys[None, :]
        visible = (distance >= 0) & (distance < (window or plan.max_context + 1))
        row = int(plan.chunk_rows[chunk])
        prefills.append((row, row + size, _to(table, device), torch.from_numpy(visible).to(device)))
    decodes = np.nonzero(sizes == 1)[0]
    rows = plan.chunk_rows[:-1][decodes]
    now = plan.starts[decodes]
    first = np.maximum(now - window + 1, 0) // block_tokens if window else np.zeros_like(now)
    last = now // block_tokens
    columns = np.arange((last - first).max(initial=-1) + 1)
    blocks = np.minimum(first[:, None] + columns, last[:, None])
    decode_slots = plan.tables[begin[decodes][:, None] + blocks]
    keys = first[:, None] * block_tokens + np.arange(len(columns) * block_tokens)
    distance = now[:, None] - keys
    visible = (distance >= 0) & (distance < (window or plan.max_context + 1))
    return _GroupIndex(
        slots=_to(slots, device),
        offsets=_to(plan.positions % block_tokens, device),
        prefills=prefills,
        decode_rows=_to(rows, device),
        decode_slots=_to(decode_slots, device),
        decode_mask=torch.from_numpy(visible).to(device)[:, None, None, :],
    )


def _attend(q: torch.Tensor, view: torch.Tensor, index: _GroupIndex) -> torch.Tensor:
    """Return the attention output [N, heads, head_dim] of queries [N, heads, head_dim] over one layer's slots."""
    kv_heads, head_dim = view.shape[1], view.shape[-1]
    mixed = torch.empty_like(q, memory_format=torch.contiguous_format)
    if len(index.decode_rows):
        queries = q[index.decode_rows]
        count = len(queries)
        form_group = view[index.decode_slots].permute(
            3, 0, 2, 1, 4, 5
        )  # [2, D, kv_heads, blocks, block_tokens, head_dim]
        seen = index.decode_mask.transpose(-1, -2)  # the unused rest of a slot may hold anything, NaN included
        k, v = form_group.reshape(2, count, kv_heads, -1, head_dim).where(seen, 0)
        grouped = queries.view(count, kv_heads, -1, head_dim)
        result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=index.decode_mask)
        mixed[index.decode_rows] = result.view(count, -1, head_dim)
    for first, last, slots, mask in index.prefills:
        seen = mask.any(dim=0)[:, None]
        k, v = view[slots].permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, head_dim).where(seen, 0)
        queries = q[first:last].transpose(0, 1).unsqueeze(0)
        k, v = (t.repeat_interleave(q.shape[1] // kv_heads, dim=0).unsqueeze(0) for t in (k, v))
        mixed[first:last] = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)[0].transpose(0, 1)
    return mixed


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, weight) if bias.numel() else x @ weight


def _to(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

"""The decoder's layers in plain torch operations, on any device and in any dtype.

Attention is split within a step: all decode rows in one padded call, each longer chunk in its own call. Keys and values
are gathered from the slots through the cache's strided views.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import FlatBatch, LayerHook, first_visible
from engine.cache import PagedCache
from engine.config import SILU, ModelConfig
from engine.int8_linear import linear as int8_linear
from engine.int8_rows import read_rows, stored_rows
from engine.rope import RopeTable, rotated
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
        cos, sin, rows = self._rope.rows(plan.rotations, plan.rotations != plan.positions)
        places = self._index(rows)
        cos, sin = cos[:, places, None, :], sin[:, places, None, :]
        groups = [_index_group(plan, cache, g, self._device) for g in range(len(cache.groups))]
        place = {layer: (g, i) for g, shape in enumerate(cache.groups) for i, layer in enumerate(shape.layers)}
        x, kv_layers = self._entering(plan), config.used_kv_layers
        for layer in range(plan.span.first, plan.span.last + 1):
            kv_layer = kv_layers[layer]
            group, depth = place[kv_layer]
            if plan.layer_inputs is not None and layer in plan.layer_inputs.layers:
                plan.layer_inputs.take(layer, x)
            h = self._norm(x, w.attention_norm[layer])
            rope = config.layer_ropes[layer]
            q, k, v = self._project(layer, h, cos[rope], sin[rope])
            view = cache.views[group][:, depth]  # [slots, kv_heads, 2, block_tokens, head_dim]
            index = groups[group]
            if k.numel():
                if before_layer is not None:
                    before_layer(kv_layer)
                view[index.slots, :, 0, index.offsets] = self._rows(k)
                view[index.slots, :, 1, index.offsets] = self._rows(v)
                if on_layer is not None:
                    on_layer(kv_layer)
            if plan.only_kv and layer == plan.span.last:
                break
            scoring = _Scoring(config.attention_scale, config.attention_softcap, w.sinks[layer])
            mixed = _attend(q, view, index, scoring, self._values)
            h = self._linear("out", layer, mixed.reshape(len(x), -1))
            x = x + (self._norm(h, w.attention_post_norm[layer]) if config.post_norms else h)
            h = self._norm(x, w.mlp_norm[layer])
            gate, up = self._linear("gate_up", layer, h).chunk(2, dim=-1)
            active = F.silu(gate) if config.activation == SILU else F.gelu(gate, approximate="tanh")
            h = self._linear("down", layer, active * up)
            x = x + (self._norm(h, w.mlp_post_norm[layer]) if config.post_norms else h)
        x = x[self._index(plan.logits_rows)]
        return _capped((self._norm(x, w.final_norm) @ w.head.t()).float(), config.logits_softcap)

    def _entering(self, plan: FlatBatch) -> torch.Tensor:
        """Return what enters the first layer that the step computes, [N, d]."""
        if plan.inputs is not None:
            return plan.inputs.to(self._weights.embedding)
        x = self._weights.embedding[self._index(plan.token_ids)]
        scale = self._config.embedding_scale
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype)

    def _project(
        self, layer: int, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [N, heads, head_dim], keys and values [N, kv_heads, head_dim], normalised and rotated.

        Keys and values are empty if the layer uses those of another one.
        """
        config, w = self._config, self._weights
        width = None if config.kv_owners[layer] == layer else config.q_size
        qkv = self._linear("qkv", layer, h, width).view(len(h), -1, config.head_dim)
        q, k, v = qkv.tensor_split([config.num_heads, config.num_heads + config.num_kv_heads], dim=1)
        if config.qk_norm:
            q, k = self._norm(q, w.q_norm[layer]), self._norm(k, w.k_norm[layer])
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def _linear(self, name: str, layer: int, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """Return the first `width` outputs of a linear layer."""
        weight, scale, bias = self._weights.linear(name, layer, width)
        if scale.numel():
            return int8_linear(x, weight, scale, bias)
        return torch.addmm(bias, x, weight) if bias.numel() else x @ weight

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return keys or values [..., head_dim] as the cache keeps them."""
        return stored_rows(values, self._config.kv_scale_group)

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what the cache keeps as keys or values [..., head_dim]."""
        config = self._config
        return read_rows(rows, config.head_dim, config.kv_scale_group).to(self._weights.embedding.dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self._config.rms_norm_eps
        if weight.dtype == x.dtype:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


def _index_group(plan: FlatBatch, cache: PagedCache, group: int, device: torch.device) -> _GroupIndex:
    block_tokens, window, firsts = cache.block_tokens, cache.groups[group].window, plan.firsts[group]
    begin = plan.table_begin[group].astype(np.int64)
    slots = plan.tables[begin[plan.row_chunk] + plan.positions // block_tokens]
    sizes = np.diff(plan.chunk_rows)
    prefills = []
    for chunk in np.nonzero(sizes > 1)[0]:
        start, size, first = int(plan.starts[chunk]), int(sizes[chunk]), int(firsts[chunk])
        skipped = first_visible(start, window, first) // block_tokens
        table = plan.tables[begin[chunk] + skipped : begin[chunk] - (-(start + size) // block_tokens)]
        keys = np.arange(skipped * block_tokens, (skipped + len(table)) * block_tokens)
        distance = np.arange(start, start + size)[:, None] - keys[None, :]
        visible = (distance >= 0) & (distance < (window or plan.max_context + 1)) & (keys >= first)
        row = int(plan.chunk_rows[chunk])
        prefills.append((row, row + size, _to(table, device), torch.from_numpy(visible).to(device)))
    decodes = np.nonzero(sizes == 1)[0]
    rows = plan.chunk_rows[:-1][decodes]
    now = plan.starts[decodes]
    seen_from = firsts[decodes]
    first = (np.maximum(now - window + 1, seen_from) if window else seen_from) // block_tokens
    last = now // block_tokens
    columns = np.arange((last - first).max(initial=-1) + 1)
    blocks = np.minimum(first[:, None] + columns, last[:, None])
    decode_slots = plan.tables[begin[decodes][:, None] + blocks]
    keys = first[:, None] * block_tokens + np.arange(len(columns) * block_tokens)
    distance = now[:, None] - keys
    visible = (distance >= 0) & (distance < (window or plan.max_context + 1)) & (keys >= seen_from[:, None])
    return _GroupIndex(
        slots=_to(slots, device),
        offsets=_to(plan.positions % block_tokens, device),
        prefills=prefills,
        decode_rows=_to(rows, device),
        decode_slots=_to(decode_slots, device),
        decode_mask=torch.from_numpy(visible).to(device)[:, None, None, :],
    )


@dataclass(frozen=True)
class _Scoring:
    """How products of queries and keys become shares: `sinks` [heads | 0] are scores that take a share of their own."""

    scale: float
    softcap: float
    sinks: torch.Tensor

    def by_kv_head(self, kv_heads: int) -> torch.Tensor:
        """Return the sinks as [1, kv_heads, queries of a KV head | 0]."""
        return self.sinks.view(1, kv_heads, -1)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention output; `sinks` broadcasts to the queries' shape without its last dimension."""
        if not self.sinks.numel() and not self.softcap:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale)
        scores = _capped(q.float() @ k.float().transpose(-1, -2) * self.scale, self.softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks.numel():
            scores = torch.cat([scores, sinks.float().expand(scores.shape[:-1]).unsqueeze(-1)], dim=-1)
        return scores.softmax(dim=-1)[..., : k.shape[-2]].to(v.dtype) @ v


def _capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores


def _attend(
    q: torch.Tensor,
    view: torch.Tensor,
    index: _GroupIndex,
    scoring: _Scoring,
    values: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the attention output [N, heads, head_dim] of queries [N, heads, head_dim] over one layer's slots.

    `values` returns the keys and values of the slots' rows.
    """
    kv_heads, head_dim = view.shape[1], q.shape[-1]
    mixed = torch.empty_like(q, memory_format=torch.contiguous_format)
    if len(index.decode_rows):
        queries = q[index.decode_rows]
        count = len(queries)
        # [2, D, kv_heads, blocks, block_tokens, head_dim]
        form_group = values(view[index.decode_slots]).permute(3, 0, 2, 1, 4, 5)
        seen = index.decode_mask.transpose(-1, -2)  # the unused rest of a slot may hold anything, NaN included
        k, v = form_group.reshape(2, count, kv_heads, -1, head_dim).where(seen, 0)
        grouped = queries.view(count, kv_heads, -1, head_dim)
        result = scoring.attend(grouped, k, v, index.decode_mask, scoring.by_kv_head(kv_heads))
        mixed[index.decode_rows] = result.view(count, -1, head_dim)
    for first, last, slots, mask in index.prefills:
        seen = mask.any(dim=0)[:, None]
        k, v = values(view[slots]).permute(2, 1, 0, 3, 4).reshape(2, kv_heads, -1, head_dim).where(seen, 0)
        queries = q[first:last].transpose(0, 1).unsqueeze(0)
        k, v = (t.repeat_interleave(q.shape[1] // kv_heads, dim=0).unsqueeze(0) for t in (k, v))
        mixed[first:last] = scoring.attend(queries, k, v, mask, scoring.sinks[None, :, None])[0].transpose(0, 1)
    return mixed


def _to(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

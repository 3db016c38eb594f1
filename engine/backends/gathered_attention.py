"""Attention in plain torch operations: keys and values are gathered from the slots, once per layer.

All decode rows of a step are one padded call, each longer chunk is a call of its own. Masks are computed on the device.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.backends.device_arrays import on_device
from engine.batch import FlatBatch, first_visible
from engine.cache import PagedCache
from engine.config import ModelConfig
from engine.int8_rows import read_rows
from engine.weights import DecoderWeights


@dataclass(frozen=True)
class _Reading:
    """Sequences that attend together: S sequences with Q rows each, over T positions of slots.

    The query heads of a KV head are further queries of a row.
    """

    rows: torch.Tensor | slice  # S * Q rows of the step
    slots: torch.Tensor  # int64 [1, S, 1, blocks]: slots of the sequences, padded with any
    visible: torch.Tensor  # bool [S, 1, Q * heads per KV head, T]
    unseen: torch.Tensor  # bool [S, 1, T, 1]: positions that no query sees may hold anything, NaN included


class GatheredAttention:
    """Attention for any device and dtype."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self._config = config
        self._sinks = weights.sinks
        self._dtype = weights.embedding.dtype
        self._device = weights.embedding.device

    def begin(self, plan: FlatBatch, cache: PagedCache) -> "_GatheredStep":
        """Prepare a step."""
        readings = [self._readings(plan, cache, group) for group in range(len(cache.groups))]
        return _GatheredStep(self._config, self._sinks, self._dtype, cache, readings)

    def _readings(self, plan: FlatBatch, cache: PagedCache, group: int) -> list[_Reading]:
        """Return the decode rows as one reading, and one for each longer chunk."""
        shared = self._config.num_heads // self._config.num_kv_heads
        decodes, longer = np.flatnonzero(plan.sizes == 1), np.flatnonzero(plan.sizes > 1)
        found = [_decodes(plan, cache, group, decodes, self._device)] if len(decodes) else []
        found += [_prefill(plan, cache, group, int(chunk), self._device) for chunk in longer]
        return [replace(each, visible=each.visible.repeat_interleave(shared, dim=2)) for each in found]


class _GatheredStep:
    def __init__(
        self,
        config: ModelConfig,
        sinks: torch.Tensor,
        dtype: torch.dtype,
        cache: PagedCache,
        readings: list[list[_Reading]],
    ) -> None:
        self._config = config
        self._sinks = sinks  # [L, heads | 0]
        self._dtype = dtype
        self._cache = cache
        self._readings = readings
        self._heads = torch.arange(config.num_kv_heads, device=sinks.device)[None, None, :, None]
        self._kinds = torch.arange(2, device=sinks.device)[:, None, None, None]  # keys, values

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output [N, heads, head_dim] of rotated queries [N, heads, head_dim] of one layer."""
        config = self._config
        group, view = self._cache.layer_view(config.used_kv_layers[layer])
        shared, head_dim = config.num_heads // config.num_kv_heads, config.head_dim
        mixed = torch.empty_like(q, memory_format=torch.contiguous_format)
        for reading in self._readings[group]:
            sequences, rows = reading.visible.shape[0], reading.visible.shape[2] // shared
            kept = view[reading.slots, self._heads, self._kinds]  # [2, S, kv_heads, blocks, block_tokens, row]
            form_group = read_rows(kept, head_dim, config.kv_scale_group).to(self._dtype).flatten(3, 4)
            k, v = form_group.masked_fill_(reading.unseen, 0)
            asked = q[reading.rows].view(sequences, rows, config.num_kv_heads, shared, head_dim)
            asked = asked.transpose(1, 2).reshape(sequences, config.num_kv_heads, -1, head_dim)
            out = self._attend(layer, asked, k, v, reading.visible)
            out = out.view(sequences, config.num_kv_heads, rows, shared, head_dim).transpose(1, 2)
            mixed[reading.rows] = out.reshape(-1, config.num_heads, head_dim)
        return mixed

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        config, sinks = self._config, self._sinks[layer]
        if not sinks.numel() and not config.attention_softcap:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=config.attention_scale)
        scores = q.float() @ k.float().transpose(-1, -2) * config.attention_scale
        if cap := config.attention_softcap:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks.numel():
            by_kv_head = sinks.float().view(config.num_kv_heads, -1)
            by_query = by_kv_head.repeat(1, q.shape[2] // by_kv_head.shape[1])
            scores = torch.cat([scores, by_query.expand(len(q), -1, -1).unsqueeze(-1)], dim=-1)
        return scores.softmax(dim=-1)[..., : k.shape[-2]].to(v.dtype) @ v


def _decodes(
    plan: FlatBatch, cache: PagedCache, group: int, chunks: npt.NDArray[np.signedinteger], device: torch.device
) -> _Reading:
    """Return the chunks of one row."""
    block_tokens, window = cache.block_tokens, cache.groups[group].window
    now = plan.starts[chunks]
    low = np.maximum(plan.firsts[group][chunks], now - window + 1 if window else 0)
    first, last = low // block_tokens, now // block_tokens
    slots = plan.padded_tables(group, chunks, first, last)
    arrays = on_device(
        {
            "rows": plan.chunk_rows[:-1][chunks],
            "slots": slots,
            "begin": first * block_tokens,
            "low": low,
            "now": now,
        },
        device,
    )
    keys = arrays["begin"][:, None] + torch.arange(slots.shape[1] * block_tokens, device=device)
    seen = (keys >= arrays["low"][:, None]) & (keys <= arrays["now"][:, None])
    return _Reading(
        arrays["rows"].long(), arrays["slots"].long()[None, :, None], seen[:, None, None], ~seen[:, None, :, None]
    )


def _prefill(plan: FlatBatch, cache: PagedCache, group: int, chunk: int, device: torch.device) -> _Reading:
    """Return a chunk of several rows."""
    block_tokens, window = cache.block_tokens, cache.groups[group].window
    start, first = int(plan.starts[chunk]), int(plan.firsts[group, chunk])
    row, end_row = int(plan.chunk_rows[chunk]), int(plan.chunk_rows[chunk + 1])
    skipped = first_visible(start, window, first) // block_tokens
    begin, end = int(plan.table_begin[group, chunk]), start + end_row - row
    table = plan.tables[begin + skipped : begin - (-end // block_tokens)]
    slots = on_device({"slots": table}, device)["slots"].long()
    keys = torch.arange(skipped * block_tokens, (skipped + len(table)) * block_tokens, device=device)
    distance = torch.arange(start, end, device=device)[:, None] - keys
    visible = (distance >= 0) & (keys >= first)
    if window:
        visible &= distance < window
    return _Reading(
        slice(row, end_row), slots[None, None, None], visible[None, None], ~visible.any(dim=0)[None, None, :, None]
    )

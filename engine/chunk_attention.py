"""Attention of a step's prefill chunks on the CPU, by torch's fused kernel.

A chunk that begins its sequence attends to keys and values straight from the projection buffer. Any other gathers its
context from the slots and goes by tiles of queries, so that keys no query of a tile sees are never multiplied.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine import kernels
from engine.batch import StepPlan, first_visible
from engine.cache import PagedCache
from engine.config import ModelConfig

_SHORT_CHUNK = 8  # tokens up to which a chunk attends row by row, like a decode row
_QUERY_TILE = 256


@dataclass(frozen=True)
class _Tile:
    """Queries `rows` of the step see keys `keys` of the gathered context, but where `mask` is -inf."""

    rows: slice
    keys: slice
    mask: torch.Tensor  # float32 [queries, keys]


@dataclass(frozen=True)
class _Context:
    """The gathered part of a chunk's sequence in one group."""

    table: kernels.Ints
    tokens: int  # that the table's slots hold
    tiles: tuple[_Tile, ...]


class ChunkAttention:
    """Splits a step's rows into `short_rows`, left to the row kernel, and long chunks, which `run` computes."""

    def __init__(self, plan: StepPlan, cache: PagedCache, config: ModelConfig, step: kernels.Step) -> None:
        self._config = config
        self._step = step
        self._layer_group = cache.layer_group
        sizes = np.diff(plan.chunk_rows)
        self.short_rows = np.flatnonzero(sizes[plan.row_chunk] <= _SHORT_CHUNK).astype(np.int32)
        self._fresh: list[list[slice]] = [[] for _ in cache.groups]
        self._contexts: list[list[_Context]] = [[] for _ in cache.groups]
        for chunk, group in itertools.product(np.flatnonzero(sizes > _SHORT_CHUNK), range(len(cache.groups))):
            start, size, row = int(plan.starts[chunk]), int(sizes[chunk]), int(plan.chunk_rows[chunk])
            window = cache.groups[group].window
            if start == 0 and (not window or size <= window):
                self._fresh[group].append(slice(row, row + size))
                continue
            skipped = first_visible(start, window) // cache.block_tokens
            begin, end = (
                int(plan.table_begin[group, chunk]) + b for b in (skipped, -(-(start + size) // cache.block_tokens))
            )
            tiles = _tiles(row, start, size, window, skipped * cache.block_tokens)
            table = plan.tables[begin:end]
            self._contexts[group].append(_Context(table, len(table) * cache.block_tokens, tiles))
        tokens = max((context.tokens for contexts in self._contexts for context in contexts), default=0)
        self._gathered = torch.empty(2, config.num_kv_heads, tokens, config.head_dim)

    def run(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of the long chunks' rows of qkv [N, Q + 2K], whose KV is in the cache already, into out [N, Q]."""
        config = self._config
        group = self._layer_group[layer]
        heads = qkv.view(len(qkv), -1, config.head_dim).transpose(0, 1)  # [heads + 2 * kv_heads, N, head_dim]
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads])
        mixed = out.view(len(out), -1, config.head_dim)
        for rows in self._fresh[group]:
            mixed[rows] = _attend(q[:, rows], k[:, rows], v[:, rows], None)
        for context in self._contexts[group]:
            keys, values = self._gathered[:, :, : context.tokens]
            kernels.gather(layer, self._step, context.table, keys.numpy(), values.numpy())
            for tile in context.tiles:
                mixed[tile.rows] = _attend(q[:, tile.rows], keys[:, tile.keys], values[:, tile.keys], tile.mask)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[heads, n, head_dim] over [kv_heads, T, head_dim], causal if no mask is given; to [n, heads, head_dim]."""
    result = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, is_causal=mask is None, enable_gqa=True)
    return result[0].transpose(0, 1)


def _tiles(row: int, start: int, size: int, window: int, context_start: int) -> tuple[_Tile, ...]:
    """Tiles of a chunk at rows row.. and positions start..; the context begins at position `context_start`."""
    tiles = []
    for offset in range(0, size, _QUERY_TILE):
        count = min(_QUERY_TILE, size - offset)
        queries = torch.arange(start + offset, start + offset + count)
        keys = torch.arange(first_visible(start + offset, window), start + offset + count)
        distance = queries[:, None] - keys[None, :]
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        span = slice(int(keys[0]) - context_start, int(keys[-1]) + 1 - context_start)
        tiles.append(_Tile(slice(row + offset, row + offset + count), span, mask))
    return tuple(tiles)

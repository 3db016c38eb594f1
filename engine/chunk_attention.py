"""Attention of a step's prefill chunks on the CPU.

A chunk's context is gathered from the slots and its queries go by tiles, so that keys which no query of a tile sees are
never multiplied. With one or two threads a tile is two batched matrix products around a compiled softmax; with more it
is torch's fused kernel, which spreads over threads better.
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
_QUERY_TILE = 64
_FEW_THREADS = 2


@dataclass(frozen=True)
class _Tile:
    """Queries at rows `first_row`.. of the step see some of `keys` of the gathered context."""

    first_row: int
    queries: int
    keys: slice
    offset: int  # position of the first query less that of the first key


@dataclass(frozen=True)
class _Context:
    """The part of a chunk's sequence that it sees in one group."""

    table: kernels.Ints
    tokens: int  # that the table's slots hold
    window: int
    tiles: tuple[_Tile, ...]


class ChunkAttention:
    """Splits a step's rows into `short_rows`, left to the row kernel, and long chunks, which `run` computes."""

    def __init__(self, plan: StepPlan, cache: PagedCache, config: ModelConfig, step: kernels.Step) -> None:
        self._config = config
        self._step = step
        self._layer_group = cache.layer_group
        self._contexts: list[list[_Context]] = [[] for _ in cache.groups]
        sizes = np.diff(plan.chunk_rows)
        self.short_rows = np.flatnonzero(sizes[plan.row_chunk] <= _SHORT_CHUNK).astype(np.int32)
        for chunk, group in itertools.product(np.flatnonzero(sizes > _SHORT_CHUNK), range(len(cache.groups))):
            self._contexts[group].append(_context(plan, cache, int(chunk), group))
        contexts = [context for contexts in self._contexts for context in contexts]
        tokens = max((context.tokens for context in contexts), default=0)
        self._token_shape = (config.num_kv_heads, config.head_dim)
        self._gathered = torch.empty(2 * config.num_kv_heads * tokens * config.head_dim)
        tiles = [tile for context in contexts for tile in context.tiles]
        rows = config.num_heads * max((tile.queries for tile in tiles), default=0)
        self._scores = torch.empty(rows * max((tile.keys.stop - tile.keys.start for tile in tiles), default=0))
        self._queries, self._mixed = torch.empty(2, rows * config.head_dim)
        self._norms = np.empty(rows, np.float32)

    def run(self, layer: int, qkv: kernels.Floats, out: kernels.Floats) -> None:
        """Attention of the long chunks' rows of qkv [N, Q + 2K], whose KV is in the cache already, into out [N, Q]."""
        tile_by = self._by_products if torch.get_num_threads() <= _FEW_THREADS else self._by_fused_kernel
        for context in self._contexts[self._layer_group[layer]]:
            heads, head_dim = self._token_shape
            # Contiguous whatever the chunk's length: another memory layout would have the kernel compiled again.
            gathered = self._gathered[: 2 * heads * context.tokens * head_dim]
            keys, values = gathered.view(2, heads, context.tokens, head_dim)
            kernels.gather(layer, self._step, context.table, keys.numpy(), values.numpy())
            for tile in context.tiles:
                tile_by(tile, context.window, keys[:, tile.keys], values[:, tile.keys], qkv, out)

    def _by_products(
        self,
        tile: _Tile,
        window: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        qkv: kernels.Floats,
        out: kernels.Floats,
    ) -> None:
        kv_heads, count, head_dim = keys.shape
        shared = self._config.num_heads // kv_heads
        rows = tile.queries * shared
        queries = self._queries[: kv_heads * rows * head_dim].view(kv_heads, rows, head_dim)
        mixed = self._mixed[: kv_heads * rows * head_dim].view(kv_heads, rows, head_dim)
        scores = self._scores[: kv_heads * rows * count].view(kv_heads, rows, count)
        norms = self._norms[: kv_heads * rows].reshape(kv_heads, rows)
        scale = np.float32(head_dim**-0.5)
        kernels.take_queries(qkv, tile.first_row, queries.numpy())
        torch.bmm(queries, keys.transpose(1, 2), out=scores)
        kernels.soften(scores.numpy(), shared, tile.offset, window, scale, norms)
        torch.bmm(scores, values, out=mixed)
        kernels.put_mixed(mixed.numpy(), norms, tile.first_row, out)

    def _by_fused_kernel(
        self,
        tile: _Tile,
        window: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        qkv: kernels.Floats,
        out: kernels.Floats,
    ) -> None:
        rows = slice(tile.first_row, tile.first_row + tile.queries)
        queries = (
            torch.from_numpy(qkv[rows, : self._config.q_size]).view(tile.queries, -1, keys.shape[2]).transpose(0, 1)
        )
        ahead = torch.arange(keys.shape[1])[None, :] - torch.arange(tile.offset, tile.offset + tile.queries)[:, None]
        hidden = (ahead > 0) | (ahead <= -window) if window else ahead > 0
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        mixed = F.scaled_dot_product_attention(queries[None], keys[None], values[None], mask, enable_gqa=True)
        out[rows] = mixed[0].transpose(0, 1).reshape(tile.queries, -1).numpy()


def _context(plan: StepPlan, cache: PagedCache, chunk: int, group: int) -> _Context:
    block_tokens, window = cache.block_tokens, cache.groups[group].window
    start, row = int(plan.starts[chunk]), int(plan.chunk_rows[chunk])
    size = int(plan.chunk_rows[chunk + 1]) - row
    skipped = first_visible(start, window) // block_tokens
    begin = int(plan.table_begin[group, chunk])
    table = plan.tables[begin + skipped : begin - (-(start + size) // block_tokens)]
    tiles = []
    for offset in range(0, size, _QUERY_TILE):
        count = min(_QUERY_TILE, size - offset)
        first_query = start + offset
        first_key = first_visible(first_query, window)
        keys = slice(first_key - skipped * block_tokens, first_query + count - skipped * block_tokens)
        tiles.append(_Tile(row + offset, count, keys, first_query - first_key))
    return _Context(table, len(table) * block_tokens, window, tuple(tiles))

"""Attention by the Triton kernels: decode rows in tiles of one row, longer chunks in tiles of several."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.backends import triton_kernels as kernels
from engine.backends.device_arrays import on_device
from engine.backends.interface import AttentionPlan
from engine.batch import FlatBatch
from engine.cache import PagedCache
from engine.config import ModelConfig
from engine.weights import DecoderWeights

_LEAST_QUERIES = 16  # of a matrix product on tensor cores
_PREFILL_QUERIES = 64
_KEYS = 64
_LEAST_SPLIT_KEYS = 256  # fewer keys per split cost more in the merge than they save
_MOST_SPLITS = 32
_PROGRAMS_PER_CORE = 2


@dataclass(frozen=True)
class _Tiles:
    """Tiles of one kind in one KV group."""

    tiles: torch.Tensor  # int32 [T, TILE_FIELDS]
    queries: int  # rows * query heads per KV head of a tile at most, as a power of two
    splits: int


class TritonAttention:
    """Attention in Triton, on CUDA or in Triton's interpreter."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self._config = config
        self._sinks = weights.sinks.float()
        self._device = weights.embedding.device
        self._shared = config.num_heads // config.num_kv_heads
        on_cuda = self._device.type == "cuda"
        self._cores = torch.cuda.get_device_properties(self._device).multi_processor_count if on_cuda else 1

    def begin(self, plan: FlatBatch, cache: PagedCache) -> "_TritonStep":
        """Prepare a step."""
        planned = self._plan(plan, cache, 0)
        return self.start(planned.form, on_device(planned.arrays, self._device), cache)

    def plan(self, plan: FlatBatch, cache: PagedCache, padded_rows: int) -> AttentionPlan:
        """Return the indices of a step of single tokens as if it had `padded_rows` rows, the last of which see nothing.

        Only the array "tables" depends in its length on anything but the number of rows.
        """
        return self._plan(plan, cache, padded_rows - len(plan.token_ids))

    def start(
        self, form: tuple[tuple[int, ...], ...], arrays: Mapping[str, torch.Tensor], cache: PagedCache
    ) -> "_TritonStep":
        """Return the attention of a step whose indices are on the device; they are read when layers are computed."""
        of_group: list[list[_Tiles]] = [[] for _ in cache.groups]
        for number, (group, rows, splits) in enumerate(form):
            queries = max(_LEAST_QUERIES, _power_of_two(rows * self._shared))
            of_group[group].append(_Tiles(arrays[f"tiles {number}"], queries, splits))
        return _TritonStep(self._config, self._sinks, cache, arrays["tables"], of_group)

    def _plan(self, plan: FlatBatch, cache: PagedCache, padding: int) -> AttentionPlan:
        arrays, form = {"tables": plan.tables}, list[tuple[int, ...]]()  # group, rows per tile, splits
        per_tile = max(1, _PREFILL_QUERIES // self._shared)
        for group, shape in enumerate(cache.groups):
            for rows, chunks in ((1, np.flatnonzero(plan.sizes == 1)), (per_tile, np.flatnonzero(plan.sizes > 1))):
                if len(chunks):
                    tiles = _tiles(plan, group, chunks, rows)
                    if padding:
                        tiles = np.concatenate([tiles, _tiles_of_padding(len(plan.token_ids), padding)])
                    splits = self._splits(tiles, shape.window) if rows == 1 else 1
                    arrays[f"tiles {len(form)}"] = tiles
                    form.append((group, rows, splits))
        return AttentionPlan(arrays, tuple(form))

    def _splits(self, tiles: npt.NDArray[np.int32], window: int) -> int:
        """Return into how many parts the keys of each tile are cut, so that all cores have work: a power of two, since
        there is a kernel, and a graph, for each.
        """
        keys = int((tiles[:, 2] - tiles[:, 3]).max()) + 1
        keys = min(keys, window) if window else keys
        wanted = self._cores * _PROGRAMS_PER_CORE // (len(tiles) * self._config.num_kv_heads)
        most = max(1, min(wanted, keys // _LEAST_SPLIT_KEYS, _MOST_SPLITS))
        return 1 << most.bit_length() - 1


class _TritonStep:
    def __init__(
        self,
        config: ModelConfig,
        sinks: torch.Tensor,
        cache: PagedCache,
        tables: torch.Tensor,
        of_group: list[list[_Tiles]],
    ) -> None:
        self._config = config
        self._sinks = sinks
        self._cache = cache
        self._tables = tables
        self._of_group = of_group

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output [N, heads, head_dim] of rotated queries [N, heads, head_dim] of one layer."""
        q = q.contiguous()
        group, view = self._cache.layer_view(self._config.used_kv_layers[layer])
        out = torch.empty_like(q)
        for tiles in self._of_group[group]:
            self._launch(layer, tiles, self._cache.groups[group].window, q, view, out)
        return out

    def _launch(
        self, layer: int, tiles: _Tiles, window: int, q: torch.Tensor, view: torch.Tensor, out: torch.Tensor
    ) -> None:
        config, (rows, heads, head_dim) = self._config, q.shape
        sinks, width = self._sinks[layer], _power_of_two(head_dim)
        parts, tops, sums = out, self._sinks, self._sinks  # not used without splits
        if tiles.splits > 1:
            parts = q.new_empty((tiles.splits, rows, heads, head_dim), dtype=torch.float32)
            tops, sums = q.new_empty((2, tiles.splits, rows, heads), dtype=torch.float32)
        kernels.attend_tiles[len(tiles.tiles), config.num_kv_heads, tiles.splits](
            q,
            view,
            self._tables,
            tiles.tiles,
            sinks,
            parts,
            tops,
            sums,
            rows,
            view.stride(0),
            config.attention_scale,
            WINDOW=window,
            KV_HEADS=config.num_kv_heads,
            SHARED=heads // config.num_kv_heads,
            HEAD_DIM=head_dim,
            WIDTH=width,
            BLOCK_TOKENS=view.shape[3],
            ROW=view.shape[4],
            SCALE_GROUP=config.kv_scale_group,
            QUERIES=tiles.queries,
            KEYS=_KEYS,
            SPLITS=tiles.splits,
            HAS_SINKS=bool(sinks.numel()),
            SOFTCAP=config.attention_softcap,
            WIDEN=q.device.type == "cpu",
        )
        if tiles.splits > 1:
            kernels.merge_splits[len(tiles.tiles), heads](
                parts,
                tops,
                sums,
                tiles.tiles,
                out,
                rows,
                HEADS=heads,
                HEAD_DIM=head_dim,
                WIDTH=width,
                SPLITS=tiles.splits,
                SPLITS_WIDTH=_power_of_two(tiles.splits),
            )


def _tiles(
    plan: FlatBatch, group: int, chunks: npt.NDArray[np.signedinteger], rows_per_tile: int
) -> npt.NDArray[np.int32]:
    """Return the tiles of the chunks, int32 [T, TILE_FIELDS]."""
    sizes = np.diff(plan.chunk_rows)[chunks]
    counts = -(-sizes // rows_per_tile)
    chunk = np.repeat(chunks, counts)
    begin = (np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows_per_tile
    return np.stack(
        [
            plan.chunk_rows[chunk] + begin,
            np.minimum(rows_per_tile, np.repeat(sizes, counts) - begin),
            plan.starts[chunk] + begin,
            plan.firsts[group][chunk],
            plan.table_begin[group][chunk],
        ],
        axis=1,
    ).astype(np.int32)


def _tiles_of_padding(first_row: int, rows: int) -> npt.NDArray[np.int32]:
    """Return tiles without rows, whose outputs are 0 in the row that they name, int32 [rows, TILE_FIELDS]."""
    tiles = np.zeros((rows, kernels.TILE_FIELDS.value), np.int32)
    tiles[:, 0] = first_row + np.arange(rows)
    return tiles


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()

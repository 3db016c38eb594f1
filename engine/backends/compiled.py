"""The decoder's layers on the CPU in float32, in compiled kernels.

A step of few rows runs in one compiled call. The rows of a larger step are divided among torch's number of threads, and
each part's layers are two calls, between which the step's KV is complete. Kernels read the slots in place, or for the
queries of a longer chunk gather one head at a time and process the queries in tiles, so that keys that are visible to
no query of a tile are not multiplied. The result of a row does not depend on how rows are divided.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from engine import kernels
from engine.batch import FlatBatch, LayerHook, first_visible
from engine.cache import PagedCache
from engine.config import SILU, ModelConfig
from engine.kernels import DecoderDims, KernelWeights, StepArrays, TileBuffers, WorkBuffers
from engine.rope import RopeTable
from engine.weights import DecoderWeights

_SHORT_CHUNK = 8  # longest chunk, in tokens, that attends row by row like a decode row
QUERY_TILE = 64  # queries of a chunk whose scores are held at once


@dataclass(frozen=True)
class _Context:
    """The tiles of one chunk and the slots that they read in one KV group."""

    table: kernels.Ints
    tiles: kernels.Ints  # [T, 5], as `kernels.attend_tiles`


@dataclass(frozen=True)
class _Part:
    """Consecutive rows of a step, which one thread computes."""

    step: StepArrays
    work: WorkBuffers
    short_rows: kernels.Ints  # rows that attend one by one
    contexts: list[list[_Context]]  # per KV group, of longer chunks
    buffers: TileBuffers


def _part_contexts(
    plan: FlatBatch, cache: PagedCache, tables: kernels.Ints, long_chunks: Sequence[int], begin: int, end: int
) -> list[list[_Context]]:
    """Return what rows begin..end-1 of the long chunks read, per KV group."""
    contexts: list[list[_Context]] = [[] for _ in cache.groups]
    for chunk, group in itertools.product(long_chunks, range(len(cache.groups))):
        first_row = int(plan.chunk_rows[chunk])
        rows = range(max(begin, first_row), min(end, int(plan.chunk_rows[chunk + 1])))
        if rows:
            contexts[group].append(_context(plan, cache, tables, chunk, group, rows, begin))
    return contexts


def _context(
    plan: FlatBatch, cache: PagedCache, tables: kernels.Ints, chunk: int, group: int, rows: range, part_begin: int
) -> _Context:
    block_tokens, window = cache.block_tokens, cache.groups[group].window
    first = int(plan.firsts[group, chunk])
    start = int(plan.starts[chunk]) + rows.start - int(plan.chunk_rows[chunk])  # position of the first of the rows
    skipped = first_visible(start, window, first) // block_tokens
    begin = int(plan.table_begin[group, chunk])
    table = tables[begin + skipped : begin - (-(start + len(rows)) // block_tokens)]
    tiles = []
    for offset in range(0, len(rows), QUERY_TILE):
        count, query = min(QUERY_TILE, len(rows) - offset), start + offset
        key = first_visible(query, window, first)
        row = rows.start + offset - part_begin
        tiles.append((row, count, key - skipped * block_tokens, query + count - key, query - key))
    return _Context(table, np.array(tiles, np.int32))


def _hand_out(plan: FlatBatch, layer: int, work: WorkBuffers) -> None:
    """Hand out what enters `layer`, if the step was asked for it."""
    if plan.layer_inputs is not None and layer in plan.layer_inputs.layers:
        plan.layer_inputs.take(layer, torch.from_numpy(work.x))


def _as_stored(tensor: torch.Tensor) -> kernels.Stored:
    """Return weights as the kernels read them."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return (tensor.view(torch.int16) if tensor.dtype == torch.float16 else tensor).numpy()


FEW_ROWS = 16  # largest step that is one compiled call
_LEAST_PART = 32  # rows that are worth a thread


def num_parts(rows: int, threads: int) -> int:
    """Return into how many parts a step's rows are divided.

    Later rows of a prompt see more keys: with two parts per thread, a thread that ends early helps the others.
    """
    return max(1, min(2 * threads, rows // _LEAST_PART)) if threads > 1 else 1


class CompiledBackend:
    """Backend that runs planned steps with compiled kernels; its work buffers grow to the largest step so far.

    Rows of a step do not depend on each other, but queries of longer chunks sum in another order than single ones. With
    `batch_invariant`, and for models in int8, all queries attend one by one: equal tokens give equal bits for any
    chunking, at a lower prefill speed. In int8, a sum in another order could round an activation to the next integer.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, rope: RopeTable, *, batch_invariant: bool = False
    ) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope
        self._few_rows = config.max_positions * 1024 if batch_invariant else FEW_ROWS
        self._by_row = config.int8_linears
        self._shape = DecoderDims(
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=np.float32(config.rms_norm_eps),
            scale=np.float32(config.attention_scale),
            softcap=np.float32(config.attention_softcap),
            gelu=config.activation != SILU,
            expert_size=config.experts.intermediate_size if config.experts else 0,
            experts_scaled=config.experts is not None and config.experts.scaled,
        )
        self._kv_layers = np.array(config.used_kv_layers, np.intp)
        self._owns = np.array(config.kv_owners) == np.arange(config.num_layers)
        self._ropes = np.array(config.layer_ropes, np.int32)
        self._sparse = np.isin(np.arange(config.num_layers), config.sparse_layers)
        self._mlp_places = np.array(config.mlp_places, np.int32)
        stored: dict[str, Any] = {name: _as_stored(getattr(weights, name)) for name in KernelWeights._fields}
        self._arrays = KernelWeights(**stored)
        self._head = _as_stored(weights.head)
        self._buffers: dict[str, kernels.Floats] = {}
        self._works: dict[int, WorkBuffers] = {}  # of small steps, by their rows
        self._threads: ThreadPoolExecutor | None = None
        self._num_threads = 0

    def run(self, plan: FlatBatch, cache: PagedCache, on_layer: LayerHook, before_layer: LayerHook) -> torch.Tensor:
        """Write the KV of all rows and return logits, float32 [len(plan.logits_rows), vocab]."""
        count = len(plan.token_ids)
        work = self._works.get(count) or self._work(count)
        self._enter(plan, work.x)
        step = self._step(plan, cache, at_once=count > self._few_rows)
        if count <= self._few_rows:
            self._run_at_once(plan, step, work, on_layer, before_layer)
        else:
            self._run_by_layer(plan, self._parts(plan, cache, step, work), step, work, on_layer, before_layer)
        return self._logits(plan, work.x)

    def _enter(self, plan: FlatBatch, x: kernels.Floats) -> None:
        """Write what enters the first layer that the step computes to `x` [N, d]."""
        if plan.inputs is not None:
            x[:] = plan.inputs.numpy()
            return
        ids = torch.from_numpy(plan.token_ids) if plan.device_ids is None else plan.device_ids
        torch.from_numpy(x).copy_(self._weights.embedding[ids])
        if self._config.embedding_scale != 1:
            x *= np.float32(self._config.embedding_scale)

    def _run_at_once(
        self, plan: FlatBatch, step: StepArrays, work: WorkBuffers, on_layer: LayerHook, before_layer: LayerHook
    ) -> None:
        rows, first, end = np.arange(len(work.x), dtype=np.int32), plan.span.first, plan.span.last + 1
        if on_layer is not None or before_layer is not None:
            starts = set(range(first, end))
        else:
            starts = {first} | ({end - 1} if plan.only_kv else set())
            if plan.layer_inputs is not None:
                starts |= plan.layer_inputs.layers.intersection(range(first, end))
        for layer, stop in itertools.pairwise([*sorted(starts), end]):
            own, kv_layer = self._owns[layer], int(self._kv_layers[layer])
            _hand_out(plan, layer, work)
            if own and before_layer is not None:
                before_layer(kv_layer)
            if plan.only_kv and stop == end:
                kernels.begin_layer(layer, self._shape, self._arrays, step, work)
            else:
                kernels.run_layers(layer, stop, self._shape, self._arrays, step, work, rows)
            if own and on_layer is not None:
                on_layer(kv_layer)

    def _run_by_layer(
        self,
        plan: FlatBatch,
        parts: Sequence[_Part],
        step: StepArrays,
        work: WorkBuffers,
        on_layer: LayerHook,
        before_layer: LayerHook,
    ) -> None:
        for layer in range(plan.span.first, plan.span.last + 1):
            own, kv_layer = self._owns[layer], int(self._kv_layers[layer])
            _hand_out(plan, layer, work)
            if own and before_layer is not None:
                before_layer(kv_layer)
            self._each(parts, partial(self._begin, layer))
            if own and on_layer is not None:
                on_layer(kv_layer)
            if plan.only_kv and layer == plan.span.last:
                return
            if step.coded.size:
                kernels.decode_slots(layer, self._shape, step)
            self._each(parts, partial(self._finish, layer))

    def _begin(self, layer: int, part: _Part) -> None:
        kernels.begin_layer(layer, self._shape, self._arrays, part.step, part.work)

    def _finish(self, layer: int, part: _Part) -> None:
        """Compute a part's attention, and what follows in the layer."""
        shape, arrays, step, work = self._shape, self._arrays, part.step, part.work
        sinks = arrays.sinks[layer]
        kernels.attend_rows(layer, part.short_rows, shape, sinks, step, work.qkv, work.scores, work.mixed)
        for context in part.contexts[step.layer_groups[layer]]:
            kernels.attend_tiles(layer, context.table, context.tiles, shape, sinks, step, work, part.buffers)
        kernels.finish_layer(layer, shape, arrays, step, work)

    def _each(self, parts: Sequence[_Part], function: Callable[[_Part], None]) -> None:
        """Call the function for each part, on threads if there are several."""
        if len(parts) == 1:
            function(parts[0])
            return
        threads = torch.get_num_threads()
        if self._threads is None or self._num_threads != threads:
            self._num_threads, self._threads = threads, ThreadPoolExecutor(threads, "engine")
        for _ in self._threads.map(function, parts):
            pass

    def _logits(self, plan: FlatBatch, x: kernels.Floats) -> torch.Tensor:
        last = x[plan.logits_rows]
        normed = np.empty_like(last)
        kernels.rms_norm(last, self._weights.final_norm.numpy(), self._shape.eps, normed)
        logits = torch.empty(len(last), self._config.vocab_size)
        kernels.multiply_head(normed, self._head, logits.numpy())
        cap = self._config.logits_softcap
        return torch.tanh_(logits.div_(cap)).mul_(cap) if cap else logits

    def _parts(self, plan: FlatBatch, cache: PagedCache, step: StepArrays, work: WorkBuffers) -> list[_Part]:
        rows = len(work.x)
        count = num_parts(rows, torch.get_num_threads())
        are_long = (plan.sizes > _SHORT_CHUNK) & (not self._by_row)
        long_chunks, short = np.flatnonzero(are_long).tolist(), ~are_long[plan.row_chunk]
        parts = []
        for n in range(count):
            begin, end = rows * n // count, rows * (n + 1) // count
            contexts = _part_contexts(plan, cache, step.read_tables, long_chunks, begin, end)
            short_rows = np.flatnonzero(short[begin:end]).astype(np.int32)
            part_step, part_work = (step, work) if count == 1 else self._part(step, work, n, begin, end)
            parts.append(_Part(part_step, part_work, short_rows, contexts, self._tile_buffers(n, cache, contexts)))
        return parts

    def _part(
        self, step: StepArrays, work: WorkBuffers, number: int, begin: int, end: int
    ) -> tuple[StepArrays, WorkBuffers]:
        """Return the arrays and the buffers of rows begin..end-1."""
        here = slice(begin, end)
        part_step = step._replace(
            positions=step.positions[here],
            row_tables=np.ascontiguousarray(step.row_tables[:, here]),
            row_firsts=np.ascontiguousarray(step.row_firsts[:, here]),
            angles=step.angles[here],
        )
        own: dict[str, Any] = {
            name: self._buffer(f"{name} {number}", getattr(work, name).size) for name in ("scores", "packed")
        }
        rows = len(work.x)
        for name, buffer in work._asdict().items():
            if name not in own:
                each = len(buffer) // rows
                own[name] = buffer[begin * each : end * each]
        return part_step, WorkBuffers(**own)

    def _tile_buffers(self, number: int, cache: PagedCache, contexts: list[list[_Context]]) -> TileBuffers:
        """Return buffers for the largest tile and table of the contexts."""
        every = [context for of_group in contexts for context in of_group]
        head_dim, shared = self._shape.head_dim, self._shape.heads // self._shape.kv_heads
        positions = max((len(c.table) * cache.block_tokens + kernels.LANES for c in every), default=0)
        rows = shared * max((int(c.tiles[:, 1].max()) for c in every), default=0)
        keys = max((int(c.tiles[:, 3].max()) + kernels.LANES for c in every), default=0)
        width = head_dim + -head_dim % kernels.LANES
        return TileBuffers(
            keys=self._buffer(f"keys {number}", positions * head_dim),
            values=self._buffer(f"values {number}", positions * width),
            queries=self._buffer(f"queries {number}", rows * head_dim),
            scores=self._buffer(f"tile scores {number}", rows * keys),
            mixed=self._buffer(f"tile mixed {number}", rows * width),
            norms=self._buffer(f"norms {number}", rows),
        )

    def _work(self, rows: int) -> WorkBuffers:
        c = self._config
        qkv, f, size = c.q_size + 2 * c.kv_size, c.intermediate_size, self._shape.expert_size
        experts, per_token = (c.experts.count, c.experts.per_token) if c.experts else (0, 0)
        expert_width = c.hidden_size * bool(experts)

        def buffer(name: str, width: int) -> kernels.Floats:
            return self._buffer(name, rows * width).reshape(rows, width)

        work = WorkBuffers(
            x=buffer("x", c.hidden_size),
            hidden=buffer("hidden", c.hidden_size),
            qkv=buffer("qkv", qkv),
            mixed=buffer("mixed", c.q_size),
            gate_up=buffer("gate_up", 2 * f),
            gated=buffer("gated", f),
            scores=self._buffer(
                "scores", kernels.CHAINS * c.head_dim + c.num_heads * (c.max_positions + kernels.LANES)
            ),
            steps=self._buffer("steps", c.int8_linears * rows * max(c.hidden_size, c.q_size, f, size)),
            products=self._buffer("products", c.int8_linears * rows * max(c.hidden_size, qkv, 2 * f, 2 * size)),
            token_scales=self._buffer("token_scales", c.int8_linears * rows),
            packed=self._buffer("packed", kernels.PACKED),
            router=buffer("router", experts),
            chosen=np.empty((rows, per_token), np.int32),
            shares=buffer("shares", per_token),
            taken=np.empty(rows, np.int32),
            expert_in=buffer("expert_in", expert_width),
            expert_gate_up=buffer("expert_gate_up", 2 * size),
            expert_gated=buffer("expert_gated", size),
            expert_out=buffer("expert_out", expert_width),
            made=self._buffer("made", rows * per_token * expert_width).reshape(rows * per_token, expert_width),
        )
        if rows <= FEW_ROWS:
            self._works[rows] = work
        return work

    def _buffer(self, name: str, size: int) -> kernels.Floats:
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, np.float32)
        return self._buffers[name][:size]

    def _step(self, plan: FlatBatch, cache: PagedCache, *, at_once: bool) -> StepArrays:
        """Return the step's arrays. `at_once`: slots of an int8 cache are decoded for all chunks, not for each."""
        layer_bases, none = cache.layer_base[self._kv_layers], np.zeros(0, np.int32)
        cos, sin, angles = self._rope.rows(plan.rotations, plan.rotations != plan.positions)
        step = StepArrays(
            positions=plan.positions,
            row_tables=plan.table_begin[:, plan.row_chunk],
            tables=plan.tables,
            row_firsts=plan.firsts[:, plan.row_chunk],
            angles=angles,
            cos=cos.numpy(),
            sin=sin.numpy(),
            layer_ropes=self._ropes,
            layer_owns=self._owns,
            layer_sparse=self._sparse,
            mlp_places=self._mlp_places,
            memory=none.view(np.float32) if cache.scale_group else cache.flat.numpy(),
            coded=cache.flat.numpy() if cache.scale_group else none.view(np.uint8),
            scale_group=cache.scale_group,
            read_tables=plan.tables,
            read_sizes=cache.slot_sizes,
            read_bases=layer_bases,
            decoded=none,
            decoded_ends=none.reshape(0, 1),
            chunk_rows=plan.chunk_rows,
            block_tokens=cache.block_tokens,
            windows=cache.windows,
            slot_sizes=cache.slot_sizes,
            layer_groups=cache.layer_group[self._kv_layers],
            layer_bases=layer_bases,
        )
        return self._reading_decoded(step, plan, cache, at_once) if cache.scale_group else step

    def _reading_decoded(self, step: StepArrays, plan: FlatBatch, cache: PagedCache, at_once: bool) -> StepArrays:
        """Return the step with the visible slots of an int8 cache read where they are decoded, in their order.

        If they are not decoded `at_once`, those of each chunk begin at the same place.
        """
        block_tokens = cache.block_tokens
        ends = plan.starts + plan.sizes
        tables, decoded, counts, most = np.zeros_like(plan.tables), list[kernels.Ints](), [0], 0
        for g, group in enumerate(cache.groups):
            first = 0
            for begin, start, end, seen_from in zip(
                plan.table_begin[g].tolist(),
                plan.starts.tolist(),
                ends.tolist(),
                plan.firsts[g].tolist(),
                strict=True,
            ):
                seen = first_visible(start, group.window, seen_from) // block_tokens
                entries = np.arange(begin + seen, begin - (-end // block_tokens), dtype=np.int32)
                tables[entries] = np.arange(first, first + len(entries), dtype=np.int32)
                most = max(most, first + len(entries))
                first += at_once * len(entries)
                decoded.append(entries)
                counts.append(counts[-1] + len(entries))
        size, chunks = 2 * self._shape.kv_heads * block_tokens * self._shape.head_dim, len(ends)
        bounds = np.arange(len(cache.groups))[:, None] * chunks + np.arange(chunks + 1)
        return step._replace(
            memory=self._buffer("decoded", most * size),
            read_tables=tables,
            read_sizes=np.full(len(cache.groups), size, np.int64),
            read_bases=np.zeros(len(self._kv_layers), np.int64),
            decoded=np.concatenate(decoded),
            decoded_ends=np.array(counts, np.int32)[bounds],
        )

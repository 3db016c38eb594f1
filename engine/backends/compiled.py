"""The decoder's layers on the CPU in float32: compiled kernels around large matrix products.

A step of few rows runs in one compiled call. A larger step uses torch for its matrix products and for the attention of
its longer chunks. Decode rows never gather keys or values: the kernels read the slots in place.

For a longer chunk the context is gathered from the slots and the queries are processed in tiles, so that keys that are
visible to no query of a tile are not multiplied. With one or two threads a tile is two batched matrix products around a
compiled softmax; with more threads it is torch's fused kernel, which parallelises better.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine import kernels
from engine.batch import FlatBatch, LayerHook, first_visible
from engine.cache import PagedCache
from engine.config import SILU, ModelConfig
from engine.kernels import DecoderDims, KernelWeights, StepArrays, WorkBuffers
from engine.rope import RopeTable
from engine.weights import DecoderWeights

_SHORT_CHUNK = 8  # longest chunk, in tokens, that attends row by row like a decode row
_QUERY_TILE = 64
_FEW_THREADS = 2


@dataclass(frozen=True)
class _Tile:
    """Rows of the step that attend to the same range of `keys` of the gathered context; rows begin at `first_row`."""

    first_row: int
    queries: int
    keys: slice
    offset: int  # position of the first query minus position of the first key


@dataclass(frozen=True)
class _Context:
    """The part of a chunk's sequence that is visible to the chunk in one KV group."""

    table: kernels.Ints
    tokens: int  # capacity of the table's slots, in tokens
    window: int
    tiles: tuple[_Tile, ...]


class ChunkAttention:
    """Attention of one step: `run` computes long chunks, and the row kernel `short_rows`, or all rows if `by_row`."""

    def __init__(
        self,
        plan: FlatBatch,
        cache: PagedCache,
        shape: DecoderDims,
        sinks: kernels.Floats,
        step: kernels.StepArrays,
        *,
        by_row: bool,
    ) -> None:
        self._shape = shape
        self._sinks = sinks  # [L, heads | 0]
        self._step = step
        self._fused = not sinks.size and not shape.softcap and torch.get_num_threads() > _FEW_THREADS
        self._contexts: list[list[_Context]] = [[] for _ in cache.groups]
        are_long = (plan.sizes > _SHORT_CHUNK) & (not by_row)
        self.short_rows = np.flatnonzero(~are_long[plan.row_chunk]).astype(np.int32)
        for chunk, group in itertools.product(np.flatnonzero(are_long), range(len(cache.groups))):
            self._contexts[group].append(_context(plan, cache, int(chunk), group, step.read_tables))
        contexts = [context for contexts in self._contexts for context in contexts]
        tokens = max((context.tokens for context in contexts), default=0)
        self._gathered = torch.empty(2 * shape.kv_heads * tokens * shape.head_dim)
        tiles = [tile for context in contexts for tile in context.tiles]
        rows = shape.heads * max((tile.queries for tile in tiles), default=0)
        self._scores = torch.empty(rows * max((tile.keys.stop - tile.keys.start for tile in tiles), default=0))
        self._queries, self._mixed = torch.empty(2, rows * shape.head_dim)
        self._norms = np.empty(rows, np.float32)

    def run(self, layer: int, qkv: kernels.Floats, out: kernels.Floats) -> None:
        """Compute attention of the long chunks' rows of qkv [N, Q + 2K] into out [N, Q]. Their KV is already in the
        cache.
        """
        heads, head_dim = self._shape.kv_heads, self._shape.head_dim
        for context in self._contexts[self._step.layer_groups[layer]]:
            # Contiguous for any chunk length: a different memory layout would trigger another compilation of the
            # kernel.
            form_group = self._gathered[: 2 * heads * context.tokens * head_dim]
            keys, values = form_group.view(2, heads, context.tokens, head_dim)
            kernels.gather(layer, self._step, context.table, keys.numpy(), values.numpy())
            for tile in context.tiles:
                k, v = keys[:, tile.keys], values[:, tile.keys]
                if self._fused:
                    self._by_fused_kernel(tile, context.window, k, v, qkv, out)
                else:
                    self._by_products(tile, context.window, self._sinks[layer], k, v, qkv, out)

    def _by_products(
        self,
        tile: _Tile,
        window: int,
        sinks: kernels.Floats,
        keys: torch.Tensor,
        values: torch.Tensor,
        qkv: kernels.Floats,
        out: kernels.Floats,
    ) -> None:
        kv_heads, count, head_dim = keys.shape
        shared = self._shape.heads // kv_heads
        rows = tile.queries * shared
        queries = self._queries[: kv_heads * rows * head_dim].view(kv_heads, rows, head_dim)
        mixed = self._mixed[: kv_heads * rows * head_dim].view(kv_heads, rows, head_dim)
        scores = self._scores[: kv_heads * rows * count].view(kv_heads, rows, count)
        norms = self._norms[: kv_heads * rows].reshape(kv_heads, rows)
        kernels.take_queries(qkv, tile.first_row, queries.numpy())
        torch.bmm(queries, keys.transpose(1, 2), out=scores)
        kernels.soften(scores.numpy(), shared, tile.offset, window, self._shape, sinks, norms)
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
        rows, width = slice(tile.first_row, tile.first_row + tile.queries), self._shape.heads * keys.shape[2]
        queries = torch.from_numpy(qkv[rows, :width]).view(tile.queries, -1, keys.shape[2]).transpose(0, 1)
        ahead = torch.arange(keys.shape[1])[None, :] - torch.arange(tile.offset, tile.offset + tile.queries)[:, None]
        hidden = (ahead > 0) | (ahead <= -window) if window else ahead > 0
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        mixed = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], mask, scale=float(self._shape.scale), enable_gqa=True
        )
        out[rows] = mixed[0].transpose(0, 1).reshape(tile.queries, -1).numpy()


def _context(plan: FlatBatch, cache: PagedCache, chunk: int, group: int, tables: kernels.Ints) -> _Context:
    block_tokens, window = cache.block_tokens, cache.groups[group].window
    start, row, first = int(plan.starts[chunk]), int(plan.chunk_rows[chunk]), int(plan.firsts[group, chunk])
    size = int(plan.chunk_rows[chunk + 1]) - row
    skipped = first_visible(start, window, first) // block_tokens
    begin = int(plan.table_begin[group, chunk])
    table = tables[begin + skipped : begin - (-(start + size) // block_tokens)]
    tiles = []
    for offset in range(0, size, _QUERY_TILE):
        count = min(_QUERY_TILE, size - offset)
        first_query = start + offset
        first_key = first_visible(first_query, window, first)
        keys = slice(first_key - skipped * block_tokens, first_query + count - skipped * block_tokens)
        tiles.append(_Tile(row + offset, count, keys, first_query - first_key))
    return _Context(table, len(table) * block_tokens, window, tuple(tiles))


def _hand_out(plan: FlatBatch, layer: int, work: WorkBuffers) -> None:
    """Hand out what enters `layer`, if the step was asked for it."""
    if plan.layer_inputs is not None and layer in plan.layer_inputs.layers:
        plan.layer_inputs.take(layer, torch.from_numpy(work.x))


FEW_ROWS = 16  # largest step for which one compiled call beats separate matrix products


class CompiledBackend:
    """Backend that runs planned steps with compiled kernels; its work buffers grow to the largest step so far.

    With `batch_invariant` every step runs through the compiled kernels, whose rows do not depend on the rest of the
    batch: equal tokens give equal bits for any chunking and any other rows, at a lower prefill speed. A model in int8
    gives equal bits always: its matrix products are exact, and row kernels compute all of its attention and routers.
    Otherwise a sum in another order could round an activation to the next integer.
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
        self._arrays = KernelWeights(*(getattr(weights, name).numpy() for name in KernelWeights._fields))
        self._buffers: dict[str, kernels.Floats] = {}

    def run(self, plan: FlatBatch, cache: PagedCache, on_layer: LayerHook, before_layer: LayerHook) -> torch.Tensor:
        """Write the KV of all rows and return logits, float32 [len(plan.logits_rows), vocab]."""
        count = len(plan.token_ids)
        work = self._work(count, plan.max_context)
        self._enter(plan, work.x)
        step = self._step(plan, cache, at_once=count > self._few_rows)
        if count <= self._few_rows:
            self._run_compiled(plan, step, work, on_layer, before_layer)
        else:
            attention = ChunkAttention(plan, cache, self._shape, self._arrays.sinks, step, by_row=self._by_row)
            self._run_composed(plan, attention, step, work, on_layer, before_layer)
        return self._logits(plan, work.x, compiled=count <= self._few_rows or self._by_row)

    def _enter(self, plan: FlatBatch, x: kernels.Floats) -> None:
        """Write what enters the first layer that the step computes to `x` [N, d]."""
        if plan.inputs is not None:
            x[:] = plan.inputs.numpy()
            return
        np.take(self._weights.embedding.numpy(), plan.token_ids, axis=0, out=x)
        if self._config.embedding_scale != 1:
            x *= np.float32(self._config.embedding_scale)

    def _run_compiled(
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
                self._write_kv(layer, step, work)
            else:
                kernels.run_layers(layer, stop, self._shape, self._arrays, step, work, rows)
            if own and on_layer is not None:
                on_layer(kv_layer)

    def _write_kv(self, layer: int, step: StepArrays, work: WorkBuffers) -> None:
        """Write a layer's KV by the same kernels as `run_layers`."""
        arrays, width = self._arrays, work.qkv.shape[1]
        kernels.rms_norm(work.x, arrays.attention_norm[layer], self._shape.eps, work.hidden)
        scale, bias = arrays.qkv_scale[layer], arrays.qkv_bias[layer]
        kernels.project(work.hidden, arrays.qkv[layer], scale, bias, work.qkv, False, width, work)
        kernels.place_rows(layer, self._shape, arrays, step, work.qkv)

    def _run_composed(
        self,
        plan: FlatBatch,
        attention: ChunkAttention,
        step: StepArrays,
        work: WorkBuffers,
        on_layer: LayerHook,
        before_layer: LayerHook,
    ) -> None:
        shape, arrays = self._shape, self._arrays
        hidden, qkv, mixed, gate_up, gated = (
            torch.from_numpy(buffer) for buffer in (work.hidden, work.qkv, work.mixed, work.gate_up, work.gated)
        )
        queries = self._config.q_size
        for layer in range(plan.span.first, plan.span.last + 1):
            own, kv_layer = self._owns[layer], int(self._kv_layers[layer])
            _hand_out(plan, layer, work)
            kernels.rms_norm(work.x, arrays.attention_norm[layer], shape.eps, work.hidden)
            width = None if own else queries
            self._project("qkv", layer, hidden, qkv, work, width=width)
            if own and before_layer is not None:
                before_layer(kv_layer)
            kernels.place_rows(layer, shape, arrays, step, work.qkv)
            if own and on_layer is not None:
                on_layer(kv_layer)
            if plan.only_kv and layer == plan.span.last:
                return
            if step.coded.size:
                kernels.decode_slots(layer, shape, step)
            sinks, rows = arrays.sinks[layer], attention.short_rows
            kernels.attend_rows(layer, rows, shape, sinks, step, work.qkv, work.scores, work.mixed)
            attention.run(layer, work.qkv, work.mixed)
            self._add("out", layer, mixed, arrays.attention_post_norm[layer], work)
            kernels.rms_norm(work.x, arrays.mlp_norm[layer], shape.eps, work.hidden)
            place = int(self._mlp_places[layer])
            if self._sparse[layer]:
                self._add_experts(place, hidden, work)
                continue
            self._project("gate_up", place, hidden, gate_up, work)
            kernels.gate(work.gate_up, shape.gelu, work.gated)
            self._add("down", place, gated, arrays.mlp_post_norm[layer], work)

    def _add_experts(self, place: int, hidden: torch.Tensor, work: WorkBuffers) -> None:
        """Add what the experts of a layer make of hidden [N, d] to work.x."""
        router = self._weights.router[place]
        if self._by_row:
            kernels.multiply(work.hidden, router.numpy(), work.scores[:0], work.router, False, router.shape[1])
        else:
            torch.mm(hidden, router, out=torch.from_numpy(work.router))
        kernels.choose_experts(work.router, self._shape.experts_scaled, work.chosen, work.shares)
        for expert in np.unique(work.chosen).tolist():
            count = kernels.take_rows(expert, work.hidden, work)
            rows, gate_up, gated, out = (
                torch.from_numpy(buffer[:count])
                for buffer in (work.expert_in, work.expert_gate_up, work.expert_gated, work.expert_out)
            )
            self._project("experts_gate_up", (place, expert), rows, gate_up, work)
            kernels.gate(gate_up.numpy(), self._shape.gelu, gated.numpy())
            self._project("experts_down", (place, expert), gated, out, work)
            kernels.put_made(count, work)
        kernels.add_made(work, work.x)

    def _add(self, name: str, layer: int, a: torch.Tensor, post_norm: kernels.Floats, work: WorkBuffers) -> None:
        """Add a linear layer's output to work.x, normalised if `post_norm` [d | 0] is not empty; overwrites
        work.hidden.
        """
        if post_norm.size:
            self._project(name, layer, a, torch.from_numpy(work.hidden), work)
            kernels.add_normed(work.hidden, post_norm, self._shape.eps, work.x)
        else:
            self._project(name, layer, a, torch.from_numpy(work.x), work, accumulate=True)

    def _project(
        self,
        name: str,
        place: int | tuple[int, int],
        a: torch.Tensor,
        out: torch.Tensor,
        work: WorkBuffers,
        *,
        accumulate: bool = False,
        width: int | None = None,
    ) -> None:
        """Compute out (+)= a @ weight + bias of a linear layer, of it the first `width` columns."""
        weight, scale, bias = self._weights.linear(name, place, width)
        if scale.numel():
            rows, depth = a.shape
            steps = work.steps[: rows * depth].reshape(rows, depth)
            products = work.products[: rows * weight.shape[1]].reshape(rows, -1)
            kernels.quantise_tokens(a.numpy(), steps, work.token_scales)
            torch.mm(torch.from_numpy(steps), weight, out=torch.from_numpy(products))
            kernels.scale_products(products, work.token_scales, scale.numpy(), bias.numpy(), out.numpy(), accumulate)
            return
        out = out[:, :width]
        if accumulate:
            if bias.numel():
                out += bias
            out.addmm_(a, weight)
        elif bias.numel():
            torch.addmm(bias, a, weight, out=out)
        else:
            torch.mm(a, weight, out=out)

    def _logits(self, plan: FlatBatch, x: kernels.Floats, *, compiled: bool) -> torch.Tensor:
        cap, logits = self._config.logits_softcap, self._plain_logits(plan, x, compiled=compiled)
        return torch.tanh_(logits.div_(cap)).mul_(cap) if cap else logits

    def _plain_logits(self, plan: FlatBatch, x: kernels.Floats, *, compiled: bool) -> torch.Tensor:
        last = x[plan.logits_rows]
        normed = np.empty_like(last)
        kernels.rms_norm(last, self._weights.final_norm.numpy(), self._shape.eps, normed)
        if not compiled:
            return torch.from_numpy(normed) @ self._weights.head.t()
        logits = torch.empty(len(last), self._config.vocab_size)
        kernels.multiply_head(normed, self._weights.head.numpy(), logits.numpy())
        return logits

    def _work(self, rows: int, positions: int) -> WorkBuffers:
        c = self._config
        qkv, f, size = c.q_size + 2 * c.kv_size, c.intermediate_size, self._shape.expert_size
        experts, per_token = (c.experts.count, c.experts.per_token) if c.experts else (0, 0)
        expert_width = c.hidden_size * bool(experts)

        def buffer(name: str, width: int) -> kernels.Floats:
            return self._buffer(name, rows * width).reshape(rows, width)

        return WorkBuffers(
            x=buffer("x", c.hidden_size),
            hidden=buffer("hidden", c.hidden_size),
            qkv=buffer("qkv", qkv),
            mixed=buffer("mixed", c.q_size),
            gate_up=buffer("gate_up", 2 * f),
            gated=buffer("gated", f),
            scores=self._buffer("scores", positions + kernels.LANES),
            steps=self._buffer("steps", c.int8_linears * rows * max(c.hidden_size, c.q_size, f, size)),
            products=self._buffer("products", c.int8_linears * rows * max(c.hidden_size, qkv, 2 * f, 2 * size)),
            token_scales=self._buffer("token_scales", c.int8_linears * rows),
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

"""The decoder's layers on any device and in any dtype, around one kind each of attention, of linear layers and of
operations on rows.
"""

from dataclasses import dataclass

import torch

from engine.backends.decode_graphs import DecodeGraphs, DecodeInputs
from engine.backends.device_arrays import on_device, row_arrays
from engine.backends.graph_recorder import GraphRecorder
from engine.backends.interface import (
    Linears,
    PagedAttention,
    RecordableAttention,
    RowOperations,
    RowPlaces,
    Rows,
    StepAttention,
)
from engine.batch import FlatBatch, LayerHook
from engine.cache import PagedCache
from engine.config import ModelConfig
from engine.layer_reuse import LayerInputs, LayerSpan
from engine.rope import RopeTable
from engine.weights import DecoderWeights


@dataclass(frozen=True)
class _Layers:
    """Layers that a step computes, and what takes part in them."""

    span: LayerSpan
    only_kv: bool = False
    inputs: LayerInputs | None = None
    on_layer: LayerHook = None
    before_layer: LayerHook = None


class TensorBackend:
    """Backend that runs planned steps; its only state between steps are the rotary table and recorded graphs."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        rope: RopeTable,
        attention: PagedAttention,
        linears: Linears,
        rows: RowOperations,
    ) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope
        self._attention = attention
        self._linears = linears
        self._rows = rows
        self._device = weights.embedding.device
        self._graphs: DecodeGraphs | None = None

    def record_steps(self, recorder: GraphRecorder) -> bool:
        """Record decode steps as graphs from now on. Return False if the host takes part in the model's steps."""
        attention = self._attention
        can_record = self._rows.masks_padding and not self._linears.host_chooses
        if isinstance(attention, RecordableAttention) and can_record:
            self._graphs = DecodeGraphs(recorder, attention, self._rope, self._decode, self._device)
        return self._graphs is not None

    def run(self, plan: FlatBatch, cache: PagedCache, on_layer: LayerHook, before_layer: LayerHook) -> torch.Tensor:
        """Write the KV of all rows and return logits, float32 [len(plan.logits_rows), vocab]."""
        # Triton launches kernels on the current device.
        with torch.cuda.device_of(self._weights.embedding):  # type: ignore[no-untyped-call]
            if self._graphs is not None and on_layer is None and before_layer is None:
                x = self._graphs.run(plan, cache)
                if x is not None:
                    return self._logits(x)
            layers = _Layers(plan.span, plan.only_kv, plan.layer_inputs, on_layer, before_layer)
            return self._logits(self._prepared(plan, cache, layers))

    def _prepared(self, plan: FlatBatch, cache: PagedCache, layers: _Layers) -> torch.Tensor:
        """Prepare and run a step; return the last layer's output in the rows whose logits are wanted, [rows, d]."""
        cos, sin, angles = self._rope.rows(plan.rotations, plan.rotations != plan.positions)
        arrays = row_arrays(plan, angles, cache.block_tokens)
        index = on_device({**arrays, "logits": plan.logits_rows}, self._device)
        at = index["angles"]
        places = RowPlaces(cos.index_select(1, at), sin.index_select(1, at), index["slots"], index["offsets"])
        attention = self._attention.begin(plan, cache)
        tokens = index["tokens"] if plan.device_ids is None else plan.device_ids
        x = plan.inputs.to(self._weights.embedding) if plan.inputs is not None else self._embedded(tokens)
        return self._compute(x, places, attention, cache, layers)[index["logits"]]

    def _decode(self, inputs: DecodeInputs, attention: StepAttention, cache: PagedCache) -> torch.Tensor:
        """Return the last layer's output of a step that computes all layers, [N, d]. The host takes no part in it."""
        layers = _Layers(LayerSpan(0, self._config.num_layers - 1))
        return self._compute(self._embedded(inputs.tokens), inputs.places, attention, cache, layers)

    def _compute(
        self, x: torch.Tensor, places: RowPlaces, attention: StepAttention, cache: PagedCache, layers: _Layers
    ) -> torch.Tensor:
        """Return the last layer's output [N, d] of what enters the first one, [N, d]."""
        config, w, linear = self._config, self._weights, self._linears.linear
        h = self._normed(x, w.attention_norm[layers.span.first])
        for layer in range(layers.span.first, layers.span.last + 1):
            kv_layer, owns_kv = config.used_kv_layers[layer], config.kv_owners[layer] == layer
            if layers.inputs is not None and layer in layers.inputs.layers:
                layers.inputs.take(layer, x)
            qkv = linear("qkv", layer, h, None if owns_kv else config.q_size)
            if owns_kv and layers.before_layer is not None:
                layers.before_layer(kv_layer)
            q = self._rows.place_heads(layer, qkv, places, cache)
            if owns_kv and layers.on_layer is not None:
                layers.on_layer(kv_layer)
            if layers.only_kv and layer == layers.span.last:
                break
            mixed = linear("out", layer, attention.run(layer, q).reshape(len(x), -1))
            place, post_norm = config.mlp_places[layer], w.attention_post_norm[layer]
            if layer in config.sparse_layers:
                x, hidden = self._rows.add_and_norm(x, mixed, post_norm, w.mlp_norm[layer])
                made = self._linears.mix_experts(place, hidden)
            else:
                x, h = self._added(x, mixed, post_norm, w.mlp_norm[layer])
                made = linear("down", place, self._linears.gated(linear("gate_up", place, h)))
            if layer < layers.span.last:
                x, h = self._added(x, made, w.mlp_post_norm[layer], w.attention_norm[layer + 1])
            else:
                x = x + (self._rows.norm(made, w.mlp_post_norm[layer]) if config.post_norms else made)
        return x

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> Rows:
        """Return the RMS norms of x [N, d] times weight [d], as linear layers take them."""
        quantised = self._linears.quantised_norm
        return self._rows.norm(x, weight) if quantised is None else quantised(x, weight)

    def _added(
        self, x: torch.Tensor, h: torch.Tensor, post_weight: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, Rows]:
        """Return what `RowOperations.add_and_norm` does, the norms as linear layers take them."""
        if self._linears.quantised_norm is None:
            return self._rows.add_and_norm(x, h, post_weight, weight)
        x = x + (self._rows.norm(h, post_weight) if post_weight.numel() else h)
        return x, self._linears.quantised_norm(x, weight)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [rows, vocab], of the last layer's output [rows, d]."""
        logits = (self._rows.norm(x, self._weights.final_norm) @ self._weights.head.t()).float()
        cap = self._config.logits_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [N, d] of tokens, int32 [N]."""
        x = self._weights.embedding.index_select(0, tokens)
        scale = self._config.embedding_scale
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype)

"""The decoder's layers in torch operations, on any device and in any dtype, around one kind of attention and one of
operations on rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.backends.decode_graphs import DecodeGraphs, DecodeInputs
from engine.backends.device_arrays import on_device
from engine.backends.graph_recorder import GraphRecorder
from engine.backends.interface import PagedAttention, RecordableAttention, RowOperations, RowPlaces, StepAttention
from engine.batch import FlatBatch, LayerHook
from engine.cache import PagedCache
from engine.config import SILU, ModelConfig
from engine.int8_linear import linear as int8_linear
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
        rows: RowOperations,
    ) -> None:
        self._config = config
        self._weights = weights
        self._rope = rope
        self._attention = attention
        self._rows = rows
        self._device = weights.embedding.device
        self._graphs: DecodeGraphs | None = None

    def record_steps(self, recorder: GraphRecorder) -> bool:
        """Record decode steps as graphs from now on. Return False if the host takes part in the model's steps."""
        attention = self._attention
        # The numbers of rows of each expert are read by the host.
        if isinstance(attention, RecordableAttention) and self._rows.masks_padding and self._config.experts is None:
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
        blocks, offsets = np.divmod(plan.positions, cache.block_tokens)
        index = on_device(
            {
                "angles": angles,
                "tokens": plan.token_ids,
                "logits": plan.logits_rows,
                "offsets": offsets,
                "slots": plan.tables[plan.table_begin[:, plan.row_chunk] + blocks],  # [G, N]
            },
            self._device,
        )
        at = index["angles"]
        places = RowPlaces(cos.index_select(1, at), sin.index_select(1, at), index["slots"], index["offsets"])
        attention = self._attention.begin(plan, cache)
        x = plan.inputs.to(self._weights.embedding) if plan.inputs is not None else self._embedded(index["tokens"])
        return self._compute(x, places, attention, cache, layers)[index["logits"]]

    def _decode(self, inputs: DecodeInputs, attention: StepAttention, cache: PagedCache) -> torch.Tensor:
        """Return the last layer's output of a step that computes all layers, [N, d]. The host takes no part in it."""
        layers = _Layers(LayerSpan(0, self._config.num_layers - 1))
        return self._compute(self._embedded(inputs.tokens), inputs.places, attention, cache, layers)

    def _compute(
        self, x: torch.Tensor, places: RowPlaces, attention: StepAttention, cache: PagedCache, layers: _Layers
    ) -> torch.Tensor:
        """Return the last layer's output [N, d] of what enters the first one, [N, d]."""
        config, w, rows = self._config, self._weights, self._rows
        h = rows.norm(x, w.attention_norm[layers.span.first])
        for layer in range(layers.span.first, layers.span.last + 1):
            kv_layer, owns_kv = config.used_kv_layers[layer], config.kv_owners[layer] == layer
            if layers.inputs is not None and layer in layers.inputs.layers:
                layers.inputs.take(layer, x)
            qkv = self._linear("qkv", layer, h, None if owns_kv else config.q_size)
            if owns_kv and layers.before_layer is not None:
                layers.before_layer(kv_layer)
            q = rows.place_heads(layer, qkv, places, cache)
            if owns_kv and layers.on_layer is not None:
                layers.on_layer(kv_layer)
            if layers.only_kv and layer == layers.span.last:
                break
            h = self._linear("out", layer, attention.run(layer, q).reshape(len(x), -1))
            x, h = rows.add_and_norm(x, h, w.attention_post_norm[layer], w.mlp_norm[layer])
            place = config.mlp_places[layer]
            if layer in config.sparse_layers:
                h = self._mix_experts(place, h)
            else:
                h = self._linear("down", place, self._gated(self._linear("gate_up", place, h)))
            if layer < layers.span.last:
                x, h = rows.add_and_norm(x, h, w.mlp_post_norm[layer], w.attention_norm[layer + 1])
            else:
                x = x + (rows.norm(h, w.mlp_post_norm[layer]) if config.post_norms else h)
        return x

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [rows, vocab], of the last layer's output [rows, d]."""
        logits = (self._rows.norm(x, self._weights.final_norm) @ self._weights.head.t()).float()
        cap = self._config.logits_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * (F.silu(gate) if self._config.activation == SILU else F.gelu(gate, approximate="tanh"))

    def _mix_experts(self, place: int, h: torch.Tensor) -> torch.Tensor:
        """Return what a layer's experts make of h [N, d]: the sum, by share, over each row's experts.

        The rows of each expert are multiplied together, so that on a device the step waits once for their numbers.
        """
        experts, w = self._config.experts, self._weights
        assert experts is not None
        shares, chosen = (h @ w.router[place]).float().softmax(dim=-1).topk(experts.per_token, dim=-1)
        if experts.scaled:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=experts.count).tolist()
        rows, made, begin = h[order // experts.per_token], h.new_empty(len(order), h.shape[1]), 0
        for expert, count in enumerate(counts):
            if count:
                gated = self._gated(rows[begin : begin + count] @ w.experts_gate_up[place, expert])
                made[begin : begin + count] = gated @ w.experts_down[place, expert]
                begin += count
        unsorted = torch.empty_like(made)
        unsorted[order] = made
        return (unsorted.view(len(h), experts.per_token, -1) * shares.unsqueeze(-1)).sum(dim=1).to(h.dtype)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [N, d] of tokens, int32 [N]."""
        x = self._weights.embedding.index_select(0, tokens)
        scale = self._config.embedding_scale
        return x if scale == 1 else x * torch.tensor(scale, dtype=x.dtype)

    def _linear(self, name: str, layer: int, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """Return the first `width` outputs of a linear layer."""
        weight, scale, bias = self._weights.linear(name, layer, width)
        if scale.numel():
            return int8_linear(x, weight, scale, bias)
        return torch.addmm(bias, x, weight) if bias.numel() else x @ weight

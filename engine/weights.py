"""The decoder's weights: names and shapes in the checkpoint, and how they are stacked and fused in memory.

All layers of one kind of weight form one tensor [layer, in, out], so that a kernel can walk over layers by index; q, k
and v are one matrix, gate and up are one matrix. Matrices are stored [in, out]: row vectors multiply from the left.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.checkpoint import Checkpoint
from engine.config import ModelConfig


@dataclass(frozen=True)
class DecoderWeights:
    """L layers, d hidden, Q = heads * head_dim, K = kv_heads * head_dim, F intermediate, V vocabulary.

    Biases and QK-norms that the family lacks have a last dimension of 0.
    """

    embedding: torch.Tensor  # [V, d]
    attention_norm: torch.Tensor  # [L, d]
    qkv: torch.Tensor  # [L, d, Q + 2K]
    qkv_bias: torch.Tensor  # [L, Q + 2K | 0]
    q_norm: torch.Tensor  # [L, head_dim | 0]
    k_norm: torch.Tensor  # [L, head_dim | 0]
    out: torch.Tensor  # [L, Q, d]
    out_bias: torch.Tensor  # [L, d | 0]
    mlp_norm: torch.Tensor  # [L, d]
    gate_up: torch.Tensor  # [L, d, 2F]
    gate_up_bias: torch.Tensor  # [L, 2F | 0]
    down: torch.Tensor  # [L, F, d]
    down_bias: torch.Tensor  # [L, d | 0]
    final_norm: torch.Tensor  # [d]
    head: torch.Tensor  # [V, d]; `embedding` itself where they are tied


@dataclass(frozen=True)
class _Part:
    """One checkpoint tensor per layer: where its (transposed) content goes in the stacked tensor `field`."""

    field: str
    name: str
    shape: tuple[int, ...]  # in the checkpoint
    first_column: int = 0


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint of this configuration holds."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    for layer in range(config.num_layers):
        shapes |= {_name(layer, part): part.shape for part in _parts(config)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def load_weights(
    config: ModelConfig, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype
) -> DecoderWeights:
    """Reads, converts and fuses; raises `TensorMismatch` before anything is read if the checkpoint does not fit."""
    checkpoint.check(
        tensor_shapes(config), frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset()
    )

    def place(name: str) -> torch.Tensor:
        return checkpoint.read(name).to(device=device, dtype=dtype)

    stacked = {
        field: torch.empty((config.num_layers, *shape), device=device, dtype=dtype)
        for field, shape in _stacked_shapes(config).items()
    }
    for layer in range(config.num_layers):
        for part in _parts(config):
            tensor = place(_name(layer, part)).t()  # t() leaves vectors as they are
            stacked[part.field][layer, ..., part.first_column : part.first_column + tensor.shape[-1]] = tensor
    embedding = place("model.embed_tokens.weight")
    return DecoderWeights(
        embedding=embedding,
        final_norm=place("model.norm.weight"),
        head=embedding if config.tie_word_embeddings else place("lm_head.weight"),
        **stacked,
    )


def _name(layer: int, part: _Part) -> str:
    return f"model.layers.{layer}.{part.name}"


def _stacked_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, f = config.hidden_size, config.intermediate_size
    qkv = config.q_size + 2 * config.kv_size
    return {
        "attention_norm": (d,),
        "qkv": (d, qkv),
        "qkv_bias": (qkv * config.qkv_bias,),
        "q_norm": (config.head_dim * config.qk_norm,),
        "k_norm": (config.head_dim * config.qk_norm,),
        "out": (config.q_size, d),
        "out_bias": (d * config.attention_out_bias,),
        "mlp_norm": (d,),
        "gate_up": (d, 2 * f),
        "gate_up_bias": (2 * f * config.mlp_bias,),
        "down": (f, d),
        "down_bias": (d * config.mlp_bias,),
    }


def _parts(config: ModelConfig) -> Iterator[_Part]:
    d, f, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    yield _Part("attention_norm", "input_layernorm.weight", (d,))
    yield _Part("mlp_norm", "post_attention_layernorm.weight", (d,))
    for projection, size, column in (("q", q, 0), ("k", kv, q), ("v", kv, q + kv)):
        yield _Part("qkv", f"self_attn.{projection}_proj.weight", (size, d), column)
        if config.qkv_bias:
            yield _Part("qkv_bias", f"self_attn.{projection}_proj.bias", (size,), column)
        if config.qk_norm and projection in "qk":
            yield _Part(f"{projection}_norm", f"self_attn.{projection}_norm.weight", (config.head_dim,))
    yield _Part("out", "self_attn.o_proj.weight", (d, q))
    if config.attention_out_bias:
        yield _Part("out_bias", "self_attn.o_proj.bias", (d,))
    for projection, column in (("gate", 0), ("up", f)):
        yield _Part("gate_up", f"mlp.{projection}_proj.weight", (f, d), column)
        if config.mlp_bias:
            yield _Part("gate_up_bias", f"mlp.{projection}_proj.bias", (f,), column)
    yield _Part("down", "mlp.down_proj.weight", (d, f))
    if config.mlp_bias:
        yield _Part("down_bias", "mlp.down_proj.bias", (d,))

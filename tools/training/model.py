"""Llama model for training; its parameters have the names of Hugging Face's LlamaForCausalLM."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

EMBEDDING_DEVIATION = 0.1


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model; embeddings are tied."""

    layers: int = 8
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 384
    vocabulary: int = 2048
    positions: int = 2048
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-5


PRESETS = {
    "base": ModelShape(layers=12, hidden=160, intermediate=448, positions=4096),
    "nano": ModelShape(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128),
}
"""``base``: the next bundled model; ``nano``: the smallest with the lookup circuit, for tests."""


class Attention(nn.Module):
    """Causal grouped-query attention with rotary position embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return the attention output. x: [windows, tokens, hidden]; cos, sin: [tokens, head_dim].

        ``visible``: bool, [tokens, tokens], the keys that each query may attend to; all before it if None.
        """
        size = self.shape.head_dim
        query = rotate(self.q_proj(x).unflatten(-1, (-1, size)).transpose(1, 2), cos, sin)
        key = rotate(self.k_proj(x).unflatten(-1, (-1, size)).transpose(1, 2), cos, sin)
        value = self.v_proj(x).unflatten(-1, (-1, size)).transpose(1, 2)
        groups = self.shape.heads // self.shape.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, visible, is_causal=visible is None)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class Mlp(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """Map [windows, tokens, hidden] to the same shape; ``visible`` is `Attention`'s."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, visible)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)


class Llama(nn.Module):
    """Llama with tied embeddings; its state_dict() has the names of LlamaForCausalLM, without ``lm_head.weight``."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialise(self, seed: int) -> None:
        """Initialise weights from a normal distribution.

        The standard deviation is 0.02, scaled down by depth for residual outputs and larger for embeddings.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = 0.02 / (2 * self.shape.layers) ** 0.5 if residual else 0.02
                if name.endswith("embed_tokens.weight"):
                    deviation = EMBEDDING_DEVIATION
                nn.init.normal_(parameter, std=deviation, generator=generator)

    def attention_of(self, layer: int) -> Attention:
        found = self.model.layers[layer].get_submodule("self_attn")
        assert isinstance(found, Attention)
        return found

    def forward(self, ids: Tensor, visible: Tensor | None = None) -> Tensor:
        """Map ids [windows, tokens] to logits [windows, tokens, vocabulary]; ``visible`` is `Attention`'s."""
        return self.logits(self.entering(ids, visible)[-1])

    def logits(self, leaving: Tensor) -> Tensor:
        """Map the residual stream after the last layer to logits."""
        return functional.linear(self.model.norm(leaving), self.model.embed_tokens.weight)

    def entering(self, ids: Tensor, visible: Tensor | None = None) -> list[Tensor]:
        """Return the residual stream, [windows, tokens, hidden], that enters each layer, and that after the last."""
        stream = [self.model.embed_tokens(ids)]
        cos, sin = self.get_buffer("cos")[: ids.shape[1]], self.get_buffer("sin")[: ids.shape[1]]
        for layer in self.model.layers:
            stream.append(layer(stream[-1], cos, sin, visible))
        return stream


def rotary_tables(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [positions, head_dim], with repeated halves as in Hugging Face's rotate_half."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.positions, dtype=torch.float32), shape.rope_theta**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding to [..., tokens, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin

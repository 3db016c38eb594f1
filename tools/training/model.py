"""Llama model for training, whose parameters have the names of Hugging Face's LlamaForCausalLM, and its small-KV form.

The small-KV form (docs/small-kv.md) has windows, layers that use the KV of others, learned sinks, and int8.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.training.int8 import Int8Linear, fake_kept

EMBEDDING_DEVIATION = 0.1


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model; embeddings are tied.

    ``windows`` and ``owners`` are per layer: the tokens that a query sees (0: all), and the layer whose keys and values
    it attends to. Empty: full attention, and every layer its own. ``int8``: linear layers and KV are in int8.
    """

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
    windows: tuple[int, ...] = ()
    owners: tuple[int, ...] = ()
    sinks: bool = False
    int8: bool = False

    def window_of(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def owner_of(self, layer: int) -> int:
        return self.owners[layer] if self.owners else layer

    @property
    def kv_scale_group(self) -> int:
        """Values of a row of int8 KV that share a scale."""
        return self.head_dim // 2

    def linear(self, inputs: int, outputs: int) -> nn.Linear:
        """Return a linear layer without bias."""
        return Int8Linear(inputs, outputs) if self.int8 else nn.Linear(inputs, outputs, bias=False)


Kept = dict[int, tuple[Tensor, Tensor]]
"""Keys and values, [windows, kv_heads, tokens, head_dim], by the layer that owns them."""

PRESETS = {
    "base": ModelShape(layers=12, hidden=160, intermediate=448, positions=4096),
    "nano": ModelShape(layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128),
}
PRESETS["small"] = replace(
    PRESETS["base"],
    kv_heads=1,
    windows=tuple(0 if layer % 6 == 2 else 1024 for layer in range(12)),
    owners=(0, 1, 2, 3, 3, 5, 5, 7, 2, 7, 10, 10),
    sinks=True,
    int8=True,
)
PRESETS["reports"] = PRESETS["base"]
"""``base``: the bundled model; ``small``: its sibling with small KV, of which layers 2 and 8 see all tokens;
``reports``: its sibling that reads `reports`; ``nano``: the smallest with the lookup circuit, for tests."""


class Attention(nn.Module):
    """Causal grouped-query attention with rotary position embedding."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.layer = layer
        self.q_proj = shape.linear(shape.hidden, shape.heads * shape.head_dim)
        if shape.owner_of(layer) == layer:
            self.k_proj = shape.linear(shape.hidden, shape.kv_heads * shape.head_dim)
            self.v_proj = shape.linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.o_proj = shape.linear(shape.heads * shape.head_dim, shape.hidden)
        if shape.sinks:
            self.sinks = nn.Parameter(torch.zeros(shape.heads))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kept: Kept, visible: Tensor | None = None) -> Tensor:
        """Return the attention output. x: [windows, tokens, hidden]; cos, sin: [tokens, head_dim].

        ``visible``: bool, [tokens, tokens], the keys that each query may attend to; all before it if None. Keys and
        values are added to ``kept``, or taken from it.
        """
        shape, size = self.shape, self.shape.head_dim
        query = rotate(self.q_proj(x).unflatten(-1, (-1, size)).transpose(1, 2), cos, sin)
        owner = shape.owner_of(self.layer)
        if owner == self.layer:
            key = rotate(self.k_proj(x).unflatten(-1, (-1, size)).transpose(1, 2), cos, sin)
            value = self.v_proj(x).unflatten(-1, (-1, size)).transpose(1, 2)
            if shape.int8:
                key, value = fake_kept(key, shape.kv_scale_group), fake_kept(value, shape.kv_scale_group)
            kept[owner] = key, value
        key, value = (each.repeat_interleave(shape.heads // shape.kv_heads, 1) for each in kept[owner])
        if shape.sinks:
            mixed = _attend_with_sinks(query, key, value, self.sinks, visible)
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, visible, is_causal=visible is None)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


def _attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, visible: Tensor | None) -> Tensor:
    """Return attention over keys and, for each head, a sink: a score that takes a share and adds nothing.

    The sink is one key more. Its score comes from one dimension more, which is 1 in queries and 0 in all other keys.
    """
    count, size = query.shape[-2:]
    if visible is None:
        visible = torch.ones(count, count, dtype=torch.bool).tril()
    key, value = functional.pad(key, (0, 1, 0, 1)), functional.pad(value, (0, 1, 0, 1))
    sink = torch.zeros_like(key[..., -1:, :])
    sink[..., -1] = sinks[:, None] * size**0.5
    key = torch.cat([key[..., :-1, :], sink], dim=-2)
    mixed = functional.scaled_dot_product_attention(
        functional.pad(query, (0, 1), value=1.0), key, value, functional.pad(visible, (0, 1), value=True),
        scale=size**-0.5,
    )  # fmt: skip
    return mixed[..., :size]


class Mlp(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = shape.linear(shape.hidden, shape.intermediate)
        self.up_proj = shape.linear(shape.hidden, shape.intermediate)
        self.down_proj = shape.linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, shape: ModelShape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kept: Kept, visible: Tensor | None = None) -> Tensor:
        """Map [windows, tokens, hidden] to the same shape; ``kept`` and ``visible`` are `Attention`'s."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, kept, visible)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, layer) for layer in range(shape.layers))
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
        stream, count, kept = [self.model.embed_tokens(ids)], ids.shape[1], Kept()
        cos, sin = self.get_buffer("cos")[:count], self.get_buffer("sin")[:count]
        seen = {0: visible}
        for window in {each for each in self.shape.windows if each}:
            causal = visible if visible is not None else torch.ones(count, count, dtype=torch.bool).tril()
            seen[window] = causal.triu(1 - window)
        for number, layer in enumerate(self.model.layers):
            stream.append(layer(stream[-1], cos, sin, kept, seen[self.shape.window_of(number)]))
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

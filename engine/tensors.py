"""Which tensors a checkpoint of a configuration holds, by name and shape. No torch: a folder is checked without it."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.config import ModelConfig

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor per layer: where its (transposed) content goes in the stacked tensor `field`."""

    field: str
    name: str
    shape: tuple[int, ...]  # in the checkpoint
    first_column: int = 0

    def in_layer(self, layer: int) -> str:
        """The tensor's full name."""
        return f"model.layers.{layer}.{self.name}"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint of this configuration holds."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    for layer in range(config.num_layers):
        shapes |= {part.in_layer(layer): part.shape for part in layer_parts(config)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold the tensor although nothing reads it."""
    return (name == HEAD and config.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq")


def layer_parts(config: ModelConfig) -> Iterator[Part]:
    """The tensors of one layer."""
    d, f, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    yield Part("attention_norm", "input_layernorm.weight", (d,))
    yield Part("mlp_norm", "post_attention_layernorm.weight", (d,))
    for projection, size, column in (("q", q, 0), ("k", kv, q), ("v", kv, q + kv)):
        yield Part("qkv", f"self_attn.{projection}_proj.weight", (size, d), column)
        if config.qkv_bias:
            yield Part("qkv_bias", f"self_attn.{projection}_proj.bias", (size,), column)
        if config.qk_norm and projection in "qk":
            yield Part(f"{projection}_norm", f"self_attn.{projection}_norm.weight", (config.head_dim,))
    yield Part("out", "self_attn.o_proj.weight", (d, q))
    if config.attention_out_bias:
        yield Part("out_bias", "self_attn.o_proj.bias", (d,))
    for projection, column in (("gate", 0), ("up", f)):
        yield Part("gate_up", f"mlp.{projection}_proj.weight", (f, d), column)
        if config.mlp_bias:
            yield Part("gate_up_bias", f"mlp.{projection}_proj.bias", (f,), column)
    yield Part("down", "mlp.down_proj.weight", (d, f))
    if config.mlp_bias:
        yield Part("down_bias", "mlp.down_proj.bias", (d,))

"""The model families that the engine computes: names, and the defaults that `transformers` has for absent keys."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family of models: all whose config.json names `architecture`, or without one `name` as its model_type."""

    name: str
    architecture: str
    examples: str  # models of the hub, for the table in the docs
    features: str  # what the family has beyond a decoder of the Llama kind, for the same table
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    max_positions: int = 2048
    attention_bias: bool = True  # whether config.json may set attention_bias
    mlp_bias: bool = False  # the same of mlp_bias
    is_gemma: bool = False
    qk_norm: bool = False


FAMILIES: Final = {
    family.name: family
    for family in (
        ModelFamily("llama", "LlamaForCausalLM", "Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; Yi", "biases", mlp_bias=True),
        ModelFamily(
            "mistral",
            "MistralForCausalLM",
            "Mistral 7B, Nemo, Small",
            "windows in all layers",
            kv_heads=8,
            attention_bias=False,
        ),
        ModelFamily(
            "mixtral",
            "MixtralForCausalLM",
            "Mixtral 8x7B, 8x22B",
            "mixture of experts",
            kv_heads=8,
            max_positions=131072,
            attention_bias=False,
        ),
        ModelFamily(
            "qwen2",
            "Qwen2ForCausalLM",
            "Qwen 2 and 2.5; DeepSeek-R1-Distill-Qwen",
            "windows in the last layers",
            kv_heads=32,
            attention_bias=False,
        ),
        ModelFamily(
            "qwen3",
            "Qwen3ForCausalLM",
            "Qwen 3, dense",
            "norms of queries and keys, windows",
            kv_heads=32,
            head_dim=128,
            qk_norm=True,
        ),
        ModelFamily(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "Qwen 3 30B-A3B, 235B-A22B, Coder",
            "mixture of experts, also in some layers only; norms of queries and keys",
            kv_heads=4,
            max_positions=32768,
            qk_norm=True,
        ),
        ModelFamily(
            "gemma2",
            "Gemma2ForCausalLM",
            "Gemma 2",
            "windows in every second layer, soft caps, four norms",
            kv_heads=4,
            head_dim=256,
            max_positions=8192,
            is_gemma=True,
        ),
        ModelFamily(
            "gemma3_text",
            "Gemma3ForCausalLM",
            "Gemma 3, text only",
            "windows with a rotary embedding of their own, norms of queries and keys",
            kv_heads=4,
            head_dim=256,
            max_positions=131072,
            is_gemma=True,
            qk_norm=True,
        ),
        ModelFamily(
            "moonpool",
            "MoonpoolForCausalLM",
            "trained with `tools/training`",
            "small KV: windows in any layers, layers that share KV, learned sinks, KV in int8",
            mlp_bias=True,
        ),
    )
}
"""All families by name."""

OF_ARCHITECTURE: Final = {family.architecture: family for family in FAMILIES.values()}

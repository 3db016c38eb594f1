"""The models with random weights that clusters of tests serve."""

from typing import Any

from engine.random_model import RandomModelSpec
from tools.training.export import config_of
from tools.training.model import PRESETS


def _small_kv(**extra: Any) -> RandomModelSpec:
    """Windows in every other layer, one KV head, KV shared across blocks, and learned sinks."""
    return RandomModelSpec(
        family="moonpool",
        layers=6,
        hidden=64,
        heads=4,
        kv_heads=1,
        vocab=2048,
        max_len=2048,
        window=48,
        scale=3.0,
        seed=8,
        extra={
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "kv_owners": [0, 1, 2, 3, 0, 1],
            "attention_sinks": True,
            **extra,
        },
    )


# Weights of enlarged scale: clear margins, so that any wrong KV shows in the tokens.
PLAIN = RandomModelSpec(layers=3, hidden=64, heads=4, kv_heads=2, vocab=2048, max_len=2048, scale=3.0, seed=7)
TWO_GROUPS = _small_kv()  # in floats
# KV, weights and activations in int8: answers depend neither on chunks nor on reuse.
SMALL_KV = _small_kv(
    **{key: config_of(PRESETS["small"])[key] for key in ("kv_dtype", "kv_scale_group", "quantization_config")}
)
WINDOWS_ONLY = RandomModelSpec(family="mistral", layers=3, vocab=2048, max_len=2048, window=48, scale=3.0, seed=9)

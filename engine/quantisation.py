"""Quantised weights that config.json describes, in the formats of compressed-tensors. Needs no torch."""

import json

from engine.config_values import ConfigReader, shortened
from engine.errors import UnsupportedModel

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8_WEIGHTS: dict[str, object] = {**_INT8, "strategy": "channel"}
INT8_ACTIVATIONS: dict[str, object] = {**_INT8, "strategy": "token", "dynamic": True}
"""Schemes in compressed-tensors' `quantization_config` for linear layers in int8."""


def has_int8_linears(read: ConfigReader) -> bool:
    """Return whether `quantization_config` says that all linear layers but the head are in int8; False if absent."""
    given = read.typed("quantization_config", dict, {})
    if not given:
        return False

    def require(key: str, value: object, wanted: object) -> None:
        if value != wanted:
            found = shortened(json.dumps(value))
            raise UnsupportedModel(
                f"{read.where}: quantization_config.{key} must be {json.dumps(wanted)}, got {found}: of "
                "quantized weights, only compressed-tensors in int8 is supported, per channel, with activations in "
                "int8, per token and dynamic"
            )

    require("quant_method", given.get("quant_method"), "compressed-tensors")
    require("format", given.get("format"), "int-quantized")
    require("kv_cache_scheme", given.get("kv_cache_scheme"), None)
    groups = ConfigReader(given, f"{read.where}: quantization_config").typed("config_groups", dict, {})
    require("config_groups", len(groups), 1)
    (name, group), *_ = groups.items()
    group = group if isinstance(group, dict) else {}
    require(f"config_groups.{name}.targets", group.get("targets"), ["Linear"])
    for part, wanted in (("weights", INT8_WEIGHTS), ("input_activations", INT8_ACTIVATIONS)):
        scheme = group.get(part)
        for key, value in wanted.items():
            found = scheme.get(key) if isinstance(scheme, dict) else None
            require(f"config_groups.{name}.{part}.{key}", found, value)
    require(f"config_groups.{name}.output_activations", group.get("output_activations"), None)
    ignored = given.get("ignore") or []
    if ignored or not read.typed("tie_word_embeddings", bool, False):
        require("ignore", ignored, ["lm_head"])
    return True

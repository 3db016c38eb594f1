"""Quantised weights that config.json describes, in the formats of compressed-tensors. Needs no torch."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from engine.config_values import ConfigReader, shortened
from engine.errors import UnsupportedModel

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8_WEIGHTS: dict[str, object] = {**_INT8, "strategy": "channel"}
INT8_ACTIVATIONS: dict[str, object] = {**_INT8, "strategy": "token", "dynamic": True}
"""Schemes in compressed-tensors' `quantization_config` for linear layers in int8."""
# As compressed-tensors' recipes for these models name the layers that choose experts; checkpoints mostly list them.
_ALL_ROUTERS = [[f"re:.*{name}"] for name in ("gate$", "mlp.gate$", "block_sparse_moe.gate", "block_sparse_moe.gate$")]
_SUPPORTED = (
    "of quantized weights, compressed-tensors in int8 (int-quantized: per channel, with activations in int8, per token "
    "and dynamic) and as packed integers (pack-quantized: 4 or 8 bits, symmetric, per group or channel, without "
    "activations) are supported"
)


@dataclass(frozen=True)
class PackedIntegers:
    """Weights as packed integers of 4 or 8 bits, of which `group` along the inputs share a scale; 0: all of them."""

    bits: int
    group: int

    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that hold a matrix, by what follows its name."""
        groups = inputs // self.group if self.group else 1
        return {"_packed": (outputs, -(-inputs * self.bits // 32)), "_scale": (outputs, groups), "_shape": (2,)}


def quantization_config(
    weights: Mapping[str, object], activations: Mapping[str, object] | None = None, ignore: Collection[str] = ()
) -> dict[str, Any]:
    """Return `quantization_config` for linear layers with these schemes; without one for activations, packed.

    `ignore`: layers beside the head that are not quantised.
    """
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if activations else "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations}
        },
        "ignore": ["lm_head", *ignore],
    }


def read_quantisation(read: ConfigReader, routers: Collection[str] = ()) -> tuple[bool, PackedIntegers | None]:
    """Return whether all linear layers but the head are in int8, and how they are packed, by `quantization_config`.

    `routers` are the names of layers that must not be quantised, either: those that choose experts.
    """
    given = read.typed("quantization_config", dict, {})
    if not given:
        return False, None

    def require(key: str, value: object, *wanted: object) -> None:
        if value not in wanted:
            found, known = shortened(json.dumps(value)), " or ".join(map(json.dumps, wanted))
            raise UnsupportedModel(
                f"{read.where}: quantization_config.{key} must be {known}, got {found}: {_SUPPORTED}"
            )

    require("quant_method", given.get("quant_method"), "compressed-tensors")
    require("format", given.get("format"), "int-quantized", "pack-quantized")
    require("kv_cache_scheme", given.get("kv_cache_scheme"), None)
    groups = ConfigReader(given, f"{read.where}: quantization_config").typed("config_groups", dict, {})
    require("config_groups", len(groups), 1)
    (name, group), *_ = groups.items()
    group = group if isinstance(group, dict) else {}
    where = f"config_groups.{name}"
    require(f"{where}.targets", group.get("targets"), ["Linear"])
    weights, packed = _scheme(group, "weights"), None
    if given["format"] == "pack-quantized":
        require(f"{where}.weights.num_bits", weights.get("num_bits"), 4, 8)
        require(f"{where}.weights.strategy", weights.get("strategy"), "group", "channel")
        for key, wanted in (("type", "int"), ("symmetric", True)):
            require(f"{where}.weights.{key}", weights.get(key), wanted)
        require(f"{where}.weights.actorder", weights.get("actorder"), None)
        require(f"{where}.input_activations", group.get("input_activations"), None)
        by_group = weights["strategy"] == "group"
        size = ConfigReader(weights, f"{read.where}: quantization_config.{where}.weights").count("group_size", 128)
        packed = PackedIntegers(int(weights["num_bits"]), size if by_group else 0)
    else:
        for part, scheme in (("weights", INT8_WEIGHTS), ("input_activations", INT8_ACTIVATIONS)):
            found = _scheme(group, part)
            for key, value in scheme.items():
                require(f"{where}.{part}.{key}", found.get(key), value)
    require(f"{where}.output_activations", group.get("output_activations"), None)
    ignored = ConfigReader(given, f"{read.where}: quantization_config").typed("ignore", list, [])
    tied = read.typed("tie_word_embeddings", bool, False)
    if routers:
        rest = [name for name in ignored if name != "lm_head"]
        if not (tied or "lm_head" in ignored) or (
            sorted(map(str, rest)) != sorted(routers) and rest not in _ALL_ROUTERS
        ):
            raise UnsupportedModel(
                f"{read.where}: quantization_config.ignore must name lm_head and all routers ({min(routers)}, ...), "
                f"got {shortened(json.dumps(ignored))}: {_SUPPORTED}"
            )
    elif ignored or not tied:
        require("ignore", ignored, ["lm_head"])
    return packed is None, packed


def _scheme(group: Mapping[str, Any], part: str) -> dict[str, Any]:
    scheme = group.get(part)
    return scheme if isinstance(scheme, dict) else {}

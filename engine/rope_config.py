"""Parameters of rotary position embeddings, read from config.json. Needs no torch."""

import sys
from dataclasses import dataclass
from typing import Any

from engine.config_values import ConfigReader, positive
from engine.errors import UnsupportedModel

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Types of layers in config.json."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `scaling` holds the parameters of its `rope_type` under their names in config.json."""

    rope_type: str
    theta: float
    scaling: tuple[tuple[str, float], ...] = ()


def read_ropes(read: ConfigReader, *, by_layer_type: bool) -> tuple[RopeConfig, ...]:
    """Return the rotary parameters: of full attention first, then of windows if they are different ones.

    With `by_layer_type`, windows have their own (Gemma 3). They are read from `rope_parameters` (transformers 5) or
    `rope_theta` and `rope_scaling` (earlier).
    """
    given = read.typed("rope_scaling", dict, {}) | read.typed("rope_parameters", dict, {})
    if not by_layer_type:
        return (_rope(read, given, read.raw.get("rope_theta")),)
    of_type = [ConfigReader(given, f"{read.where}: rope_parameters").typed(key, dict, {}) for key in LAYER_TYPES]
    if not any(of_type):
        of_type[0] = given
    thetas = read.raw.get("rope_theta") or 1e6, read.raw.get("rope_local_base_freq") or 1e4
    return tuple(_rope(read, dict(each), theta) for each, theta in zip(of_type, thetas, strict=True))


def _rope(read: ConfigReader, given: dict[str, Any], theta: Any) -> RopeConfig:
    """Return the rotary parameters in `given`, whose base is `theta` unless it has one."""
    raw, where = read.raw, read.where
    rope_type = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedModel(f"{where}: rotary parameters per layer type are not supported")
    theta = positive(given.pop("rope_theta", None) or theta or 10000.0, f"{where}: rope_theta")
    partial = given.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"{where}: partial_rotary_factor must be 1.0, got {partial}")
    if rope_type not in _ROPE_TYPES:
        raise UnsupportedModel(f"{where}: rope_type must be one of {', '.join(_ROPE_TYPES)}, got {rope_type!r}")
    if rope_type == "default":
        return RopeConfig("default", theta)
    if given.get("original_max_position_embeddings") is None:
        given["original_max_position_embeddings"] = raw.get("max_position_embeddings", 2048)
    needed = {"linear": ["factor"], "yarn": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    for key in needed[rope_type]:
        positive(given.get(key), f"{where}: {key} of rope_type {rope_type!r}")
    numbers = {
        key: float(value)
        for key, value in given.items()
        if isinstance(value, int | float) and abs(value) <= sys.float_info.max
    }
    return RopeConfig(rope_type, theta, tuple(sorted(numbers.items())))

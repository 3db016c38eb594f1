"""Rotary position embedding: inverse frequencies of each rope_type and the table of cosines and sines.

Frequencies and angles are computed in float32, in the same order as in `transformers`, so that results for long
contexts agree with it. Llama 3's scaling: "The Llama 3 Herd of Models", §3.4.2; YaRN: Peng et al. 2023, §3.
"""

import math
from collections.abc import Sequence

import torch

from engine.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies, float32 [head_dim // 2], and the factor of every cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    scaling = dict(rope.scaling)
    if rope.rope_type == "linear":
        return plain / scaling["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope.theta, exponents, scaling, head_dim)
    return plain, 1.0


class RopeTable:
    """Cosines and sines of each of a model's embeddings, float32 [ropes, positions, head_dim // 2] each.

    The table doubles when more positions are needed.
    """

    def __init__(self, ropes: Sequence[RopeConfig], head_dim: int, max_positions: int, device: torch.device) -> None:
        self._frequencies = [inverse_frequencies(rope, head_dim) for rope in ropes]
        self._max_positions = max_positions
        self._device = device
        self.cos = torch.empty(len(ropes), 0, head_dim // 2)
        self.sin = torch.empty(len(ropes), 0, head_dim // 2)
        self.reach(min(1024, max_positions))

    def reach(self, positions: int) -> None:
        """Extend the table to at least `positions` rows."""
        if positions <= self.cos.shape[1]:
            return
        rows = torch.arange(max(positions, min(2 * self.cos.shape[1], self._max_positions)), dtype=torch.float32)
        tables = [(torch.outer(rows, frequencies), factor) for frequencies, factor in self._frequencies]
        self.cos = torch.stack([angles.cos() * factor for angles, factor in tables]).to(self._device)
        self.sin = torch.stack([angles.sin() * factor for angles, factor in tables]).to(self._device)


def _llama3(plain: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, smoothed, scaled)


def _yarn(
    theta: float, exponents: torch.Tensor, scaling: dict[str, float], head_dim: int
) -> tuple[torch.Tensor, float]:
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    powers = theta**exponents
    frequencies = 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep
    return frequencies, _yarn_magnitude(factor, scaling)


def _yarn_magnitude(factor: float, scaling: dict[str, float]) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)

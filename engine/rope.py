"""Rotary position embedding: inverse frequencies of each rope_type and the table of cosines and sines.

Frequencies and angles are computed in float32, in the same order as in `transformers`, so that results for long
contexts agree with it. Llama 3's scaling: "The Llama 3 Herd of Models", §3.4.2; YaRN: Peng et al. 2023, §3.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.rope_config import RopeConfig


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
    """Cosines and sines of each of a model's embeddings; the table doubles when more positions are needed."""

    def __init__(self, ropes: Sequence[RopeConfig], head_dim: int, max_positions: int, device: torch.device) -> None:
        self._frequencies = [inverse_frequencies(rope, head_dim) for rope in ropes]
        self._exact = torch.stack([frequencies.double() for frequencies, _ in self._frequencies])
        self._factors = torch.tensor([factor for _, factor in self._frequencies])[:, None, None]
        self._max_positions = max_positions
        self._device = device
        self._cos = torch.empty(len(ropes), 0, head_dim // 2)
        self._sin = torch.empty(len(ropes), 0, head_dim // 2)
        self._reach(min(1024, max_positions))

    def rows(
        self, positions: npt.NDArray[np.int32], slid: npt.NDArray[np.bool_]
    ) -> tuple[torch.Tensor, torch.Tensor, npt.NDArray[np.int32]]:
        """Return cosines and sines, float32 [ropes, rows, head_dim // 2] each, and each position's row, int32 [n].

        Positions that have `slid`, bool [n], have no bound, so their angles are computed in float64 and not kept.
        """
        if not slid.any():
            self._reach(int(positions.max(initial=0)) + 1)
            return self._cos, self._sin, positions
        near = np.where(slid, 0, positions)
        self._reach(int(near.max()) + 1)
        index = torch.from_numpy(near).to(self._device)
        cos, sin = self._cos[:, index], self._sin[:, index]
        far = np.flatnonzero(slid)
        rows = torch.from_numpy(far).to(self._device)
        angles = torch.from_numpy(positions[far]).double()[:, None] * self._exact[:, None, :]
        cos[:, rows] = (angles.cos().float() * self._factors).to(self._device)
        sin[:, rows] = (angles.sin().float() * self._factors).to(self._device)
        return cos, sin, np.arange(len(positions), dtype=np.int32)

    def turn(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, float32 [ropes, head_dim // 2] each, that rotate keys by `positions` further."""
        angles = positions * self._exact
        return angles.cos().float().to(self._device), angles.sin().float().to(self._device)

    def _reach(self, positions: int) -> None:
        """Extend the table to at least `positions` rows."""
        if positions <= self._cos.shape[1]:
            return
        rows = torch.arange(max(positions, min(2 * self._cos.shape[1], self._max_positions)), dtype=torch.float32)
        tables = [(torch.outer(rows, frequencies), factor) for frequencies, factor in self._frequencies]
        self._cos = torch.stack([angles.cos() * factor for angles, factor in tables]).to(self._device)
        self._sin = torch.stack([angles.sin() * factor for angles, factor in tables]).to(self._device)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return queries or keys [..., head_dim] rotated by cosines and sines that broadcast to [..., head_dim // 2]."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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

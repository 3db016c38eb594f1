"""Weights of linear layers as packed integers of 4 or 8 bits, which are weights only: activations stay floats (W4A16).

Checkpoints are in compressed-tensors' `pack-quantized` format: an integer is stored as itself plus 2^(bits - 1), and
those of one int32 are consecutive inputs, the first one in the lowest bits. Values along the inputs share a scale, by
groups or all of an output's. The triton backend keeps the words and unpacks them while it multiplies
(`PackedMatrices`). The others multiply in the type of their computation, so the weights are unpacked when they are
loaded; on CPUs this gives the exact result in float32.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from engine.quantisation import PackedIntegers

_WORD = 32


@dataclass(frozen=True)
class PackedMatrices:
    """Matrices of one kind as the words of their checkpoint, the last of which may be padded.

    Consecutive inputs are contiguous in memory, as in the checkpoint.
    """

    words: torch.Tensor  # int32 [..., words, outputs]
    scales: torch.Tensor  # float32, float16 or bfloat16 [..., groups, outputs]
    integers: PackedIntegers
    inputs: int

    def at(self, place: int | tuple[int, int], width: int | None = None) -> "PackedMatrices":
        """Return the matrix at a place of the leading dimensions, of it the first `width` outputs."""
        words, scales = (tensor[place][..., :width] for tensor in (self.words, self.scales))
        return PackedMatrices(words, scales, self.integers, self.inputs)

    def floats(self) -> torch.Tensor:
        """Return one matrix unpacked, float32 [inputs, outputs]."""
        return unpacked(self.words.t(), self.scales.t(), self.integers, self.inputs).t()


def unpacked(packed: torch.Tensor, scales: torch.Tensor, of: PackedIntegers, inputs: int) -> torch.Tensor:
    """Return weights, float32 [outputs, inputs], of int32 [outputs, words] and their scales [outputs, groups]."""
    shifts = torch.arange(0, _WORD, of.bits, dtype=torch.int32, device=packed.device)
    steps = (packed.unsqueeze(-1) >> shifts).bitwise_and_((1 << of.bits) - 1)
    wide = steps.flatten(1)[:, :inputs].float().sub_(1 << (of.bits - 1))
    return wide.reshape(*scales.shape, -1).mul_(scales.float().unsqueeze(-1)).flatten(1)


def pack_checkpoint(
    tensors: Mapping[str, torch.Tensor], names: Collection[str], of: PackedIntegers
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with those in `names` packed, each as the three that hold it."""
    found = dict(tensors)
    for name in names:
        weights = found.pop(name)
        found[f"{name}_shape"] = torch.tensor(weights.shape)
        found[f"{name}_packed"], found[f"{name}_scale"] = pack(weights, of)
    return found


def pack(weights: torch.Tensor, of: PackedIntegers) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (packed, scales in float16) of weights [outputs, inputs], rounded to the nearest integers."""
    least, most = -(1 << (of.bits - 1)), (1 << (of.bits - 1)) - 1
    outputs, inputs = weights.shape
    grouped = weights.float().reshape(outputs, -1, of.group or inputs)
    scales = (grouped.abs().amax(dim=-1) / most).half()
    steps = (grouped / scales.float().clamp(min=1e-8).unsqueeze(-1)).round().clamp(least, most).flatten(1)
    per_word = _WORD // of.bits
    codes = torch.nn.functional.pad((steps - least).to(torch.int64), (0, -inputs % per_word))
    codes = codes.reshape(outputs, -1, per_word)
    words = (codes << torch.arange(0, _WORD, of.bits)).sum(dim=-1)
    return (words - ((words >> (_WORD - 1)) << _WORD)).to(torch.int32), scales

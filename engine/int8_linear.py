"""Linear layers in int8 (W8A8): weights have a scale per output channel, activations one per token, both symmetric.

x is rounded to round(x / s) with s = max|x| / 127. Products of integers are summed exactly, then multiplied by both
scales. Checkpoints are in compressed-tensors' `int-quantized` format: `weight` in int8 and `weight_scale` per channel.

On CPUs the integers are multiplied in float32, which is exact while sums stay below 2^24: always for up to 1,040
inputs. The weights stay in int8 in memory and are widened as they are read.
"""

from collections.abc import Collection, Mapping

import torch

from engine.folder import SCALE_SUFFIX

LARGEST = 127
_LEAST_ROWS = 17  # of torch._int_mm on CUDA
_ROW_UNIT = 8


def quantised(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (integers as float32 [..., n], scales [..., 1]) of values [..., n]. A row that has a value that is not
    finite has a scale that is not.
    """
    wide = values.float()
    scales = wide.abs().amax(dim=-1, keepdim=True) / LARGEST
    # A scale of 0 represents values that underflow.
    return (wide / torch.where(scales == 0, 1.0, scales)).round().clamp(-LARGEST, LARGEST), scales


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return x @ weight + bias in x's dtype, for x [N, K], integers `weight` [K, M] in int8, their `scale` [M], and
    `bias` [M | 0].
    """
    steps, token_scales = quantised(x)
    products = _int_product(steps, weight) if weight.device.type == "cuda" else steps @ weight.float()
    out = products * token_scales * scale
    return (out + bias if bias.numel() else out).to(x.dtype)


def _int_product(steps: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product of integers, float32 [N, M], summed in int32."""
    rows = len(steps)
    padded = max(_LEAST_ROWS, rows) + -max(_LEAST_ROWS, rows) % _ROW_UNIT
    whole = torch.zeros((padded, steps.shape[1]), dtype=torch.int8, device=steps.device)
    whole[:rows] = steps
    return torch._int_mm(whole, weight)[:rows].float()


def quantise_checkpoint(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with those in `names` in int8, each with its scales beside it."""
    found = dict(tensors)
    for name in names:
        steps, found[name + SCALE_SUFFIX] = quantised(tensors[name])
        found[name] = steps.to(torch.int8)
    return found

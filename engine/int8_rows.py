"""KV rows in int8: a row is one token's K, or V, in one head, cut into groups that share a float16 scale.

A group is stored as round(x / s) in int8 with s = max|x| / 127 in float16, after the row's values (PPL.LLM's group-wise
int8 KV). The error of a value is at most s / 2. Values that are not finite, or too large for the scale, are read back
as values that are not finite. `engine.kernels` computes the same bytes.
"""

import torch

LARGEST = 127
SCALE_NBYTES = 2


def row_nbytes(head_dim: int, scale_group: int) -> int:
    """Return the bytes of one row: a byte per value, then the scales."""
    return head_dim + head_dim // scale_group * SCALE_NBYTES


def encode_rows(values: torch.Tensor, scale_group: int) -> torch.Tensor:
    """Return rows as uint8 [..., row_nbytes] for values [..., head_dim]."""
    grouped = _grouped(values.float(), scale_group)
    scales = (grouped.abs().amax(dim=-1, keepdim=True) / LARGEST).half()
    # A scale of 0 represents values that underflow to 0 in float16.
    steps = (grouped / torch.where(scales == 0, 1.0, scales.float())).round().clamp(-LARGEST, LARGEST)
    steps = torch.where(scales == 0, 0.0, steps).nan_to_num(0.0)
    bytes_of_scales = scales.squeeze(-1).contiguous().view(torch.uint8)
    return torch.cat([steps.to(torch.int8).flatten(-2).view(torch.uint8), bytes_of_scales], dim=-1)


def decode_rows(rows: torch.Tensor, head_dim: int, scale_group: int) -> torch.Tensor:
    """Return the values, float32 [..., head_dim], of rows uint8 [..., row_nbytes]."""
    steps = _grouped(rows[..., :head_dim].contiguous().view(torch.int8).float(), scale_group)
    scales = rows[..., head_dim:].contiguous().view(torch.float16).float().unsqueeze(-1)
    return (steps * scales).flatten(-2)


def stored_rows(values: torch.Tensor, scale_group: int) -> torch.Tensor:
    """Return keys or values [..., head_dim] as a cache keeps them; unchanged if `scale_group` is 0."""
    return encode_rows(values, scale_group) if scale_group else values


def read_rows(rows: torch.Tensor, head_dim: int, scale_group: int) -> torch.Tensor:
    """Return the keys or values that `stored_rows` keeps, of int8 in float32."""
    return decode_rows(rows, head_dim, scale_group) if scale_group else rows


def rounded(values: torch.Tensor, scale_group: int) -> torch.Tensor:
    """Return the values as they are read back, in their dtype."""
    rows = encode_rows(values, scale_group)
    return decode_rows(rows, values.shape[-1], scale_group).to(values.dtype)


def _grouped(values: torch.Tensor, size: int) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)

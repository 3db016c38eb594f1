"""Linear layers by the Triton kernels: W8A8 without separate steps of quantisation, packed weights as they are stored,
and mixtures of experts for which the host does not wait. Products of floats are torch's.
"""

from dataclasses import dataclass

import torch

from engine.backends import triton_expert_kernels as expert_kernels
from engine.backends import triton_linear_kernels as kernels
from engine.backends.interface import QuantisedRows, Rows
from engine.backends.torch_linear import chosen_experts, rms_norm
from engine.config import SILU, ModelConfig
from engine.packed_weights import PackedMatrices
from engine.weights import DecoderWeights

_LEAST_ROWS = 16  # of a matrix product on tensor cores
_WHOLE_GROUP = 64  # groups of a multiple of this are multiplied as integers, then scaled
_LARGEST_ROW = 2048  # of a row that 4 warps quantise


@dataclass(frozen=True)
class _ProductTile:
    """Size of the tiles of a product."""

    rows: int
    outputs: int
    depth: int  # inputs that are multiplied at a time
    warps: int
    stages: int  # loads that are under way at a time


def _tile(rows: int, itemsize: int) -> _ProductTile:
    """Return the tiles for so many rows of values of so many bytes: few rows are bound by the reading of the weights,
    for which many programs with many loads under way are the best.
    """
    depth = 128 // itemsize
    if rows <= _LEAST_ROWS:
        return _ProductTile(_LEAST_ROWS, 32, 2 * depth, 4, 4)
    if rows <= 4 * _LEAST_ROWS:
        return _ProductTile(1 << (rows - 1).bit_length(), 64, depth, 4, 4)
    return _ProductTile(128, 128, depth, 8, 3)


class TritonLinears:
    """The interface `Linears` in Triton, on CUDA or in Triton's interpreter."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self._config = config
        self._weights = weights
        self._widen = weights.embedding.device.type == "cpu"

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> Rows:
        """Return the RMS norms of x [N, d] times weight [d], quantised if the linear layers are in int8."""
        eps = self._config.rms_norm_eps
        if not self._config.int8_linears:
            return rms_norm(x, weight, eps)
        steps, scales = _empty_steps(x, x.shape[1])
        kernels.quantise_norms[(len(x),)](x.contiguous(), weight, steps, scales, eps, **_of_row(x.shape[1]))
        return QuantisedRows(steps, scales, x.dtype)

    def gated(self, gate_up: torch.Tensor) -> Rows:
        """Return activation(gate) * up [N, F] of gate_up [N, 2F], quantised if the linear layers are in int8."""
        size, gelu, int8 = gate_up.shape[1] // 2, self._config.activation != SILU, self._config.int8_linears
        steps, scales = _empty_steps(gate_up, size) if int8 else (gate_up.new_empty(len(gate_up), size), gate_up)
        launch = kernels.gate_rows[(len(gate_up),)]
        launch(gate_up.contiguous(), steps, scales, GELU=gelu, QUANTISE=int8, **_of_row(size))
        return QuantisedRows(steps, scales, gate_up.dtype) if int8 else steps

    def linear(self, name: str, layer: int, rows: Rows, width: int | None = None) -> torch.Tensor:
        """Return the first `width` outputs of the rows in a linear layer, [N, width]."""
        weight, scale, bias = self._weights.stored(name, layer, width)
        if isinstance(weight, PackedMatrices):
            assert isinstance(rows, torch.Tensor)
            return multiply_packed(rows, weight, bias)
        if scale.numel():
            return multiply_int8(rows if isinstance(rows, QuantisedRows) else quantise(rows), weight, scale, bias)
        assert isinstance(rows, torch.Tensor)
        return torch.addmm(bias, rows, weight) if bias.numel() else rows @ weight

    def mix_experts(self, place: int, h: torch.Tensor) -> torch.Tensor:
        """Return what a layer's experts make of h [N, d]: the sum, by share, over each row's experts.

        The host does not wait for the choice of experts.
        """
        config, w = self._config, self._weights
        experts, h = config.experts, h.contiguous()
        assert experts is not None
        count, size, per_token, (rows, hidden) = experts.count, experts.intermediate_size, experts.per_token, h.shape
        shares, chosen = chosen_experts(h, w.router[place], experts)
        ordered, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(count, device=h.device)
        ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
        tile = _tile(-(-rows * per_token // count), h.element_size())
        tiles = expert_kernels.most_tiles(rows * per_token, count, tile.rows)
        shape = {
            "SIZE": size,
            "EXPERTS": count,
            "WIDTH": _power_of_two(count),
            "ROWS": tile.rows,
            "OUTPUTS": min(tile.outputs, 64),  # the first kernel has two products
            "DEPTH": tile.depth,
            "WIDEN": self._widen,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        gated, made = h.new_empty(len(order), size), h.new_empty(len(order), hidden, dtype=torch.float32)
        expert_kernels.gate_by_experts[tiles, -(-size // shape["OUTPUTS"])](
            h,
            order,
            ends,
            w.experts_gate_up[place],
            gated,
            INPUTS=hidden,
            PER_TOKEN=per_token,
            GELU=config.activation != SILU,
            **shape,
        )
        expert_kernels.weigh_by_experts[tiles, -(-hidden // shape["OUTPUTS"])](
            gated, order, ends, shares.contiguous(), w.experts_down[place], made, OUT=hidden, **shape
        )
        return made.view(rows, per_token, hidden).sum(dim=1).to(h.dtype)


def quantise(x: torch.Tensor) -> QuantisedRows:
    """Return x [N, K] rounded to int8 as `engine.int8_linear.quantised` rounds it."""
    steps, scales = _empty_steps(x, x.shape[1])
    kernels.quantise_rows[(len(x),)](x.contiguous(), steps, scales, **_of_row(x.shape[1]))
    return QuantisedRows(steps, scales, x.dtype)


def multiply_int8(rows: QuantisedRows, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return rows @ weight + bias in the dtype of the values that were rounded, for rows [N, K], integers `weight`
    int8 [K, M], their `scale` float32 [M], and `bias` [M | 0].
    """
    (inputs, outputs), count = weight.shape, len(rows.steps)
    out = torch.empty((count, outputs), dtype=rows.dtype, device=weight.device)
    tile = _tile(count, weight.element_size())
    kernels.multiply_int8[-(-count // tile.rows), -(-outputs // tile.outputs)](
        rows.steps,
        rows.scales,
        weight,
        scale,
        bias,
        out,
        count,
        outputs,
        *weight.stride(),
        INPUTS=inputs,
        HAS_BIAS=bool(bias.numel()),
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def multiply_packed(x: torch.Tensor, packed: PackedMatrices, bias: torch.Tensor) -> torch.Tensor:
    """Return x @ weight + bias in x's dtype, for x [N, K], a packed matrix [K, M] and `bias` [M | 0].

    Sums are in float32. Weights whose groups are a multiple of 64 inputs are multiplied as integers; others are rounded
    to x's dtype first.
    """
    count, outputs, group = len(x), packed.words.shape[-1], packed.integers.group
    out = x.new_empty(count, outputs)
    tile = _tile(count, x.element_size())
    divisor = group & -group  # the largest power of two that divides it; 0 if all inputs share a scale
    depth = min(tile.depth, divisor) if divisor >= _WHOLE_GROUP else tile.depth
    kernels.multiply_packed[-(-count // tile.rows), -(-outputs // tile.outputs)](
        x.contiguous(),
        packed.words,
        packed.scales,
        bias,
        out,
        count,
        outputs,
        *packed.words.stride(),
        *packed.scales.stride(),
        INPUTS=packed.inputs,
        BITS=packed.integers.bits,
        GROUP=group,
        HAS_BIAS=bool(bias.numel()),
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=depth,
        WIDEN=x.device.type == "cpu",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _empty_steps(x: torch.Tensor, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return room for the integers [N, inputs] and scales [N] of quantised rows, as many as x has."""
    return x.new_empty(len(x), inputs, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)


def _of_row(inputs: int) -> dict[str, int]:
    """Return the launch parameters of a kernel that computes a whole row."""
    width = _power_of_two(inputs)
    return {"INPUTS": inputs, "WIDTH": width, "num_warps": min(16, 4 * -(-width // _LARGEST_ROW))}


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()

"""Linear layers by the Triton kernels: W8A8 without separate steps of quantisation, packed weights as they are stored,
and mixtures of experts for which the host does not wait. Products of floats are torch's.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.backends import triton_expert_kernels as expert_kernels
from engine.backends import triton_linear_kernels as kernels
from engine.backends.interface import QuantisedRows, Rows
from engine.backends.torch_linear import chosen_experts
from engine.config import SILU, ModelConfig
from engine.packed_weights import PackedMatrices
from engine.quantisation import PackedIntegers
from engine.weights import DecoderWeights

_LEAST_ROWS = 16  # of a matrix product on tensor cores
_WHOLE_GROUP = 64  # groups of a multiple of this are multiplied as integers, then scaled
_LEAST_RUN = 32  # consecutive outputs of a tile: fewer than a cache line of the weights is read in vain
_NOT_PACKED = PackedIntegers(bits=8, group=0)
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
        self.quantised_norm = self._quantised_norm if config.int8_linears else None
        self.host_chooses = False

    def _quantised_norm(self, x: torch.Tensor, weight: torch.Tensor) -> QuantisedRows:
        """Return the RMS norms of x [N, d] times weight [d], in int8."""
        steps, scales = _empty_steps(x, x.shape[1])
        launch = kernels.quantise_norms[(len(x),)]
        launch(x.contiguous(), weight, steps, scales, self._config.rms_norm_eps, **_of_row(x.shape[1]))
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
        if isinstance(weight, PackedMatrices) or scale.numel():
            return multiply(rows, weight, scale, bias)
        assert isinstance(rows, torch.Tensor)
        return torch.addmm(bias, rows, weight) if bias.numel() else rows @ weight

    def mix_experts(self, place: int, h: torch.Tensor) -> torch.Tensor:
        """Return what a layer's experts make of h [N, d]: the sum, by share, over each row's experts.

        The host does not wait for the choice of experts.
        """
        config, w, hidden = self._config, self._weights, h.shape[1]
        experts = config.experts
        assert experts is not None
        count, size, per_token = experts.count, experts.intermediate_size, experts.per_token
        shares, chosen = chosen_experts(h, w.router[place], experts)
        ordered, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(count, device=h.device)
        ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
        rows_of_each = -(-len(order) // count)
        gate_up, down = (_Matrices.of(*w.stored(name, place)[:2]) for name in ("experts_gate_up", "experts_down"))
        shape = {"EXPERTS": count, "WIDTH": _power_of_two(count)}

        gated, operand = h.new_empty(len(order), size), gate_up.operand(h)
        launch = gate_up.launch(operand, rows_of_each)
        launch["OUTPUTS"] = max(launch["OUTPUTS"], 2 * _LEAST_RUN)
        tiles = expert_kernels.most_tiles(len(order), count, launch["ROWS"])
        expert_kernels.gate_by_experts[tiles, -(-2 * size // launch["OUTPUTS"])](
            *operand,
            order,
            ends,
            *gate_up.arguments,
            gated,
            SIZE=size,
            PER_TOKEN=per_token,
            GELU=config.activation != SILU,
            **shape,
            **launch,
        )
        made, operand = h.new_empty(len(order), hidden, dtype=torch.float32), down.operand(gated)
        launch = down.launch(operand, rows_of_each)
        expert_kernels.weigh_by_experts[tiles, -(-hidden // launch["OUTPUTS"])](
            *operand, order, ends, shares.contiguous(), *down.arguments, made, OUT=hidden, **shape, **launch
        )
        return made.view(len(h), per_token, hidden).sum(dim=1).to(h.dtype)


@dataclass(frozen=True)
class _Matrices:
    """A matrix, or one of each expert, as the kernels read it."""

    weight: torch.Tensor  # [..., inputs, outputs], or [..., words, outputs]
    scales: torch.Tensor  # [..., groups, outputs]
    inputs: int
    form: int  # of `triton_linear_kernels`
    integers: PackedIntegers

    @classmethod
    def of(cls, weight: torch.Tensor | PackedMatrices, scale: torch.Tensor) -> "_Matrices":
        """Return the matrices of `DecoderWeights.stored`."""
        if isinstance(weight, PackedMatrices):
            return cls(weight.words, weight.scales, weight.inputs, kernels.PACKED.value, weight.integers)
        form = kernels.INT8 if scale.numel() else kernels.FLOATS
        return cls(weight, scale.unsqueeze(-2), weight.shape[-2], form.value, _NOT_PACKED)

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """Return weight and scales, each before its strides."""
        return self.weight, *self.weight.stride(), self.scales, *self.scales.stride()

    def operand(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows as the kernels read them beside these matrices, and their scales."""
        if self.form == kernels.INT8.value:
            rows = rows if isinstance(rows, QuantisedRows) else quantise(rows)
            return rows.steps, rows.scales
        assert isinstance(rows, torch.Tensor)
        return rows.contiguous(), self.scales  # no scales are read

    def launch(self, operand: tuple[torch.Tensor, torch.Tensor], rows: int) -> dict[str, Any]:
        """Return the launch parameters of products with so many rows of an operand."""
        x, group = operand[0], self.integers.group
        tile = _tile(rows, x.element_size())
        divisor = group & -group  # the largest power of two that divides it; 0 if all inputs share a scale
        return {
            "INPUTS": self.inputs,
            "FORM": self.form,
            "BITS": self.integers.bits,
            "GROUP": group,
            "ROWS": tile.rows,
            "OUTPUTS": tile.outputs,
            "DEPTH": min(tile.depth, divisor) if divisor >= _WHOLE_GROUP else tile.depth,
            "WIDEN": x.device.type == "cpu",
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }


def quantise(x: torch.Tensor) -> QuantisedRows:
    """Return x [N, K] rounded to int8 as `engine.int8_linear.quantised` rounds it."""
    steps, scales = _empty_steps(x, x.shape[1])
    kernels.quantise_rows[(len(x),)](x.contiguous(), steps, scales, **_of_row(x.shape[1]))
    return QuantisedRows(steps, scales, x.dtype)


def multiply(
    rows: Rows, weight: torch.Tensor | PackedMatrices, scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return rows @ weight + bias in the rows' dtype, for rows [N, K] and `bias` [M | 0].

    `weight` [K, M] is packed, or in int8 with its `scale` float32 [M]; then the rows are rounded, too. Products of
    packed weights are summed in float32: weights whose groups are a multiple of 64 inputs are multiplied as integers,
    others are rounded to the rows' dtype first.
    """
    matrices = _Matrices.of(weight, scale)
    operand, outputs = matrices.operand(rows), matrices.weight.shape[-1]
    count = len(operand[0])
    out = torch.empty((count, outputs), dtype=rows.dtype, device=operand[0].device)
    launch = matrices.launch(operand, count)
    kernels.multiply[-(-count // launch["ROWS"]), -(-outputs // launch["OUTPUTS"])](
        *operand, *matrices.arguments, bias, out, count, outputs, HAS_BIAS=bool(bias.numel()), **launch
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

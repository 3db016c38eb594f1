"""Linear layers, MLPs and mixtures of experts in plain torch operations."""

import torch
import torch.nn.functional as F

from engine.backends.interface import Rows
from engine.config import SILU, ExpertShape, ModelConfig
from engine.int8_linear import linear as int8_linear
from engine.weights import DecoderWeights


def chosen_experts(h: torch.Tensor, router: torch.Tensor, experts: ExpertShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each row of h [N, d]: shares float32 [N, per_token], numbers int64 [N, per_token]."""
    shares, chosen = (h @ router).float().softmax(dim=-1).topk(experts.per_token, dim=-1)
    return (shares / shares.sum(dim=-1, keepdim=True) if experts.scaled else shares), chosen


class TorchLinears:
    """The interface `Linears` in torch, on any device and in any dtype."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights) -> None:
        self._config = config
        self._weights = weights
        self.quantised_norm = None
        self.host_chooses = config.experts is not None

    def gated(self, gate_up: torch.Tensor) -> Rows:
        """Return activation(gate) * up [N, F] of gate_up [N, 2F]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return up * (F.silu(gate) if self._config.activation == SILU else F.gelu(gate, approximate="tanh"))

    def linear(self, name: str, layer: int, rows: Rows, width: int | None = None) -> torch.Tensor:
        """Return the first `width` outputs of the rows in a linear layer, [N, width]."""
        return self._multiply(name, layer, rows, width)

    def _multiply(self, name: str, place: int | tuple[int, int], rows: Rows, width: int | None = None) -> torch.Tensor:
        assert isinstance(rows, torch.Tensor)
        weight, scale, bias = self._weights.linear(name, place, width)
        if scale.numel():
            return int8_linear(rows, weight, scale, bias)
        return torch.addmm(bias, rows, weight) if bias.numel() else rows @ weight

    def mix_experts(self, place: int, h: torch.Tensor) -> torch.Tensor:
        """Return what a layer's experts make of h [N, d]: the sum, by share, over each row's experts.

        The rows of each expert are multiplied together, so that on a device the step waits once for their numbers.
        """
        experts, w = self._config.experts, self._weights
        assert experts is not None
        shares, chosen = chosen_experts(h, w.router[place], experts)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=experts.count).tolist()
        rows, made, begin = h[order // experts.per_token], h.new_empty(len(order), h.shape[1]), 0
        for expert, count in enumerate(counts):
            if count:
                at = place, expert
                gated = self.gated(self._multiply("experts_gate_up", at, rows[begin : begin + count]))
                made[begin : begin + count] = self._multiply("experts_down", at, gated)
                begin += count
        unsorted = torch.empty_like(made)
        unsorted[order] = made
        return (unsorted.view(len(h), experts.per_token, -1) * shares.unsqueeze(-1)).sum(dim=1).to(h.dtype)

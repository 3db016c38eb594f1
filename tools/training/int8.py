"""Training in int8: rounding as served (`engine.int8_linear`, `engine.int8_rows`), with straight-through gradients.

The forward pass computes with rounded weights, activations and KV in float32; the backward pass takes the rounding for
the identity (Bengio et al., 2013). No value is clipped, since scales follow the largest one.
"""

from torch import Tensor, nn
from torch.nn import functional

from engine.int8_linear import quantised
from engine.int8_rows import rounded as rounded_rows


def straight_through(values: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with the gradient of `values`."""
    return values + (rounded - values).detach()


def fake_quantised(values: Tensor) -> Tensor:
    """Return values [..., n] rounded to int8 with a scale for each row."""
    steps, scales = quantised(values.detach())
    return straight_through(values, steps * scales)


def fake_kept(values: Tensor, scale_group: int) -> Tensor:
    """Return keys or values [..., head_dim] as an int8 cache returns them."""
    return straight_through(values, rounded_rows(values.detach(), scale_group))


class Int8Linear(nn.Linear):
    """Linear layer without bias whose weights and inputs are rounded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return functional.linear(fake_quantised(x), fake_quantised(self.weight))

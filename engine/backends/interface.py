"""Interfaces between a model, the backends that execute its steps, and the attention and the linear layers of the
backend in torch ops.

Backends are called by one thread at a time.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import FlatBatch, LayerHook
from engine.cache import PagedCache


class Backend(Protocol):
    """Executes planned steps."""

    def run(self, plan: FlatBatch, cache: PagedCache, on_layer: LayerHook, before_layer: LayerHook) -> torch.Tensor:
        """Write the KV of all rows and return logits, float32 [len(plan.logits_rows), vocab]."""
        ...


class StepAttention(Protocol):
    """Attention of one step. The KV of the step's rows is in the cache when a layer is computed."""

    def run(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output [N, heads, head_dim] of rotated queries [N, heads, head_dim] of one layer."""
        ...


class PagedAttention(Protocol):
    """Attention over the slots of a paged cache."""

    def begin(self, plan: FlatBatch, cache: PagedCache) -> StepAttention:
        """Prepare a step: copy the indices that all of its layers need to the device."""
        ...


@dataclass(frozen=True)
class QuantisedRows:
    """Activations in int8 (`engine.int8_linear`): N rows of K values."""

    steps: torch.Tensor  # int8 [N, K]
    scales: torch.Tensor  # float32 [N]
    dtype: torch.dtype  # of the values that were rounded


Rows = torch.Tensor | QuantisedRows
"""Rows as a linear layer takes them, [N, K]."""


class Linears(Protocol):
    """Linear layers of a model, and the operations between them. Layers are addressed as in `DecoderWeights`.

    `linear` accepts the rows that `normed` and `gated` return, and tensors.
    """

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> Rows:
        """Return the RMS norms of x [N, d] times weight [d]."""
        ...

    def gated(self, gate_up: torch.Tensor) -> Rows:
        """Return activation(gate) * up [N, F] of gate_up [N, 2F]."""
        ...

    def linear(self, name: str, layer: int, rows: Rows, width: int | None = None) -> torch.Tensor:
        """Return the first `width` outputs of the rows in a linear layer, [N, width]."""
        ...

    def mix_experts(self, place: int, h: torch.Tensor) -> torch.Tensor:
        """Return what a layer's experts make of h [N, d]: the sum, by share, over each row's experts."""
        ...

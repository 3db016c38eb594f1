"""Interfaces between a model, the backends that execute its steps, and the attention of the backend in torch ops.

Backends are called by one thread at a time.
"""

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

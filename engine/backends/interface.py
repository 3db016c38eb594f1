"""Interfaces between a model, the backends that execute its steps, and the parts of the backend in torch ops.

Backends are called by one thread at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.batch import FlatBatch, IntArray, LayerHook
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

    `linear` accepts the rows that `quantised_norm` and `gated` return, and tensors.
    """

    quantised_norm: Callable[[torch.Tensor, torch.Tensor], QuantisedRows] | None
    """Function of x [N, d] and a weight [d] that returns the RMS norms in int8; None if layers take floats."""

    host_chooses: bool
    """True if the host takes part in a mixture of experts."""

    def gated(self, gate_up: torch.Tensor) -> Rows:
        """Return activation(gate) * up [N, F] of gate_up [N, 2F]."""
        ...

    def linear(self, name: str, layer: int, rows: Rows, width: int | None = None) -> torch.Tensor:
        """Return the first `width` outputs of the rows in a linear layer, [N, width]."""
        ...

    def mix_experts(self, place: int, h: torch.Tensor) -> torch.Tensor:
        """Return what a layer's experts make of h [N, d]: the sum, by share, over each row's experts."""
        ...


@dataclass(frozen=True)
class AttentionPlan:
    """Indices of a step for its attention, on the host."""

    arrays: dict[str, IntArray]
    form: tuple[tuple[int, ...], ...]  # everything else that the kernels depend on: steps of one form may share a graph


@runtime_checkable
class RecordableAttention(PagedAttention, Protocol):
    """Attention whose steps can be recorded as graphs, since the host takes no part in them once they are prepared."""

    def plan(self, plan: FlatBatch, cache: PagedCache, padded_rows: int) -> AttentionPlan:
        """Return the indices of a step of single tokens as if it had `padded_rows` rows, the last of which see nothing.

        Only the array "tables" depends in its length on anything but the number of rows.
        """
        ...

    def start(
        self, form: tuple[tuple[int, ...], ...], arrays: Mapping[str, torch.Tensor], cache: PagedCache
    ) -> StepAttention:
        """Return the attention of a step whose indices are on the device; they are read when layers are computed."""
        ...


@dataclass(frozen=True)
class RowPlaces:
    """Rotation of a step's N rows and their places in the cache, on the device."""

    cos: torch.Tensor  # float32 [ropes, N, head_dim // 2]
    sin: torch.Tensor
    slots: torch.Tensor  # int32 [KV groups, N]; -1: a row of padding, whose keys and values are not written
    offsets: torch.Tensor  # int32 [N]: position in the slot


class RowOperations(Protocol):
    """Operations on the rows of a step between its matrix products."""

    masks_padding: bool
    """True if `place_heads` leaves out rows whose slot is -1."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMS norms of x [N, d] times weight [d]."""
        ...

    def add_and_norm(
        self, x: torch.Tensor, h: torch.Tensor, post_weight: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x + h, its RMS norms times weight [d]) for x and h [N, d].

        h is normalised with `post_weight` [d | 0] first unless that is empty.
        """
        ...

    def place_heads(self, layer: int, qkv: torch.Tensor, places: RowPlaces, cache: PagedCache) -> torch.Tensor:
        """Return the normalised and rotated queries, [N, heads, head_dim], and write keys and values into the cache.

        `qkv` is [N, queries, then keys and values unless the layer uses those of another one].
        """
        ...

"""Which layers a step computes, and which layers' inputs it hands out: reuse of KV between sibling models.

A model that was fine-tuned from the same base as another one can take that one's KV of a prompt, except for one group
of consecutive layers, which it computes itself (DroidSpeak: Liu et al. 2024, §4). The group starts from the other
model's hidden states that enter its first layer; of its last layer, only the KV is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import InvalidBatch


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The layers `first` to `last` of a model, both included. Raises `InvalidBatch`."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise InvalidBatch(f"a span of layers must be first <= last, both 0 or more, got {self.first}..{self.last}")

    @property
    def num_layers(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Recomputation:
    """The part of the decoder that a step computes: `span` alone, whose last layer is computed only as far as its KV.

    `inputs` [N, hidden_size] are the hidden states that enter the span's first layer, one row per token of the batch,
    in the weights' dtype; None if the span begins with the first layer, which reads the tokens.
    """

    span: LayerSpan
    inputs: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerInputs:
    """A request for the hidden states that enter `layers`.

    `take(layer, rows)` is called once per layer, in order, with rows [N, hidden_size] in the weights' dtype. The step
    overwrites them after the call.
    """

    layers: frozenset[int]
    take: Callable[[int, torch.Tensor], None]

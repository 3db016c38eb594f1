"""Arrival of a prompt's KV layer by layer: which layers of which blocks are present, and how reads are cut into layers.

Pure; `worker.layer_gate` shares the arrivals between threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


class LayerArrivals:
    """The layers and blocks of one prompt that are present and verified."""

    def __init__(self, num_layers: int, num_blocks: int, *, held_blocks: int = 0) -> None:
        """Blocks [0, held_blocks) of [0, num_blocks) are present in all layers."""
        self.num_layers = num_layers
        self._here = np.zeros((num_layers, num_blocks), dtype=bool)
        self._here[:, :held_blocks] = True
        self._leading = [held_blocks] * num_layers

    def mark(self, layer: int, blocks: NDArray[np.int64]) -> None:
        """Record one layer of `blocks` as present."""
        here = self._here[layer]
        here[blocks] = True
        rest = here[self._leading[layer] :]
        self._leading[layer] += len(rest) if rest.all() else int(rest.argmin())

    def leading(self, layer: int) -> int:
        """Return the number of leading blocks that are present in this layer without a gap."""
        return self._leading[layer]

    @property
    def complete(self) -> int:
        """Number of leading blocks that are present in all layers."""
        return min(self._leading)


@dataclass(frozen=True, slots=True)
class LayerBatch:
    """Consecutive model layers [first, end) that are read together."""

    first: int
    end: int
    parts: tuple[tuple[int, slice], ...]  # (group, its layers); once per KV group with layers among them, if not cut

    def without(self, groups: Sequence[Sequence[int]], layers: range) -> LayerBatch:
        """Return the batch without some consecutive layers; `groups` has the model layers of each KV group."""
        parts = list[tuple[int, slice]]()
        for group, part in self.parts:
            indices = range(part.start, part.stop)
            before = [i for i in indices if groups[group][i] < layers.start]
            after = [i for i in indices if groups[group][i] >= layers.stop]
            parts += [(group, slice(side[0], side[-1] + 1)) for side in (before, after) if side]
        return replace(self, parts=tuple(parts))


def layer_batches(
    groups: Sequence[Sequence[int]],
    layer_nbytes: Sequence[int],
    num_blocks: int,
    *,
    least_read: int,
    least_slice: int,
) -> tuple[LayerBatch, ...]:
    """Cut a read of `num_blocks` blocks into batches of consecutive layers, in order.

    `groups` has the model layers of each KV group, `layer_nbytes` the bytes of one layer of one block of each. A batch
    has at least `least_read` bytes, and at least `least_slice` contiguous bytes of each block, since every read and
    every slice has a cost of its own; the last one takes the rest. Smaller loads, and groups whose layers are not in
    order, result in one batch.
    """
    place = {layer: (group, index) for group, layers in enumerate(groups) for index, layer in enumerate(layers)}
    order = sorted(place)
    whole = LayerBatch(
        order[0], order[-1] + 1, tuple((group, slice(0, len(layers))) for group, layers in enumerate(groups))
    )
    if order != list(range(len(order))) or any(list(layers) != sorted(layers) for layers in groups):
        return (whole,)
    ends: list[int] = []
    nbytes: dict[int, int] = {}  # bytes of each block, per group of the current batch
    for layer in order:
        group = place[layer][0]
        nbytes[group] = nbytes.get(group, 0) + layer_nbytes[group]
        if sum(nbytes.values()) * num_blocks >= least_read and min(nbytes.values()) >= least_slice:
            ends.append(layer + 1)
            nbytes = {}
    if len(ends) < 2:
        return (whole,)
    ends[-1] = len(order)  # too small a rest joins the last batch
    return tuple(_batch(groups, first, end) for first, end in zip([0, *ends], ends, strict=False))


def _batch(groups: Sequence[Sequence[int]], first: int, end: int) -> LayerBatch:
    parts = []
    for group, layers in enumerate(groups):
        within = [index for index, layer in enumerate(layers) if first <= layer < end]
        if within:
            parts.append((group, slice(within[0], within[-1] + 1)))
    return LayerBatch(first, end, tuple(parts))

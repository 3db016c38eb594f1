"""vLLM's KV tensors of one rank as its backends lay them out, read and written value by value."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from vllm_worker.block_layout import SlotLayout

LAYOUT = SlotLayout(num_slots=6, num_layers=3, kv_heads=4, block_tokens=8, head_dim=4, value_nbytes=2)
HEADS = range(1, 3)
NUM_BLOCKS = 7
# Order of the axes in memory, and the pieces into which a backend divides blocks, which must be adjacent then.
ORDERS = [
    ("LBNHC", 1),
    ("LBHNC", 1),
    ("LHBNC", 1),
    ("BLHNC", 1),
    ("BLNHC", 1),
    ("BHLNC", 1),
    ("LBNHC", 2),
    ("LBHNC", 4),
]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def random_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values whose bytes are random."""
    nbytes = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(nbytes).view(dtype).view(shape)


@dataclass
class VllmBlocks:
    """Tensors [blocks * pieces, heads, tokens / pieces, 2 * head_dim] by layer."""

    layout: SlotLayout
    num_heads: int
    pieces: int
    layers: list[torch.Tensor]

    @classmethod
    def allocate(
        cls, order: str, pieces: int, *, layout: SlotLayout = LAYOUT, heads: range = HEADS, device: str = "cpu"
    ) -> VllmBlocks:
        """Return random blocks in one allocation with the axes in `order`, as vLLM's `allocate_kv_cache` makes it."""
        sizes = dict(zip("LBHNC", (layout.num_layers, NUM_BLOCKS, len(heads), layout.block_tokens, 0), strict=True))
        sizes["C"] = 2 * layout.head_dim
        if pieces > 1:
            sizes["B"] *= pieces
            sizes["N"] //= pieces
        offset = 16
        memory = random_values((offset + math.prod(sizes.values()),), INTEGERS[layout.value_nbytes], seed=1).to(device)
        strides, stride = dict.fromkeys(order, 0), 1
        for axis in reversed(order):
            strides[axis] = stride
            stride *= sizes[axis]
        every = memory.as_strided([sizes[axis] for axis in "LBHNC"], [strides[axis] for axis in "LBHNC"], offset)
        return cls(layout, len(heads), pieces, list(every))

    def _place(self, block: int, token: int) -> tuple[int, int]:
        piece = self.layout.block_tokens // self.pieces
        return block * self.pieces + token // piece, token % piece

    def read(self, layer: int, block: int) -> torch.Tensor:
        """Return a block as [heads, 2, tokens, head_dim]."""
        dim = self.layout.head_dim
        found = self.layers[layer].new_empty((self.num_heads, 2, self.layout.block_tokens, dim))
        for token in range(self.layout.block_tokens):
            at, row = self._place(block, token)
            for head in range(self.num_heads):
                content = self.layers[layer][at, head, row]
                found[head, 0, token], found[head, 1, token] = content[:dim], content[dim:]
        return found

    def write(self, layer: int, block: int, values: torch.Tensor) -> None:
        """Overwrite a block with values [heads, 2, tokens, head_dim]."""
        for token in range(self.layout.block_tokens):
            at, row = self._place(block, token)
            for head in range(self.num_heads):
                self.layers[layer][at, head, row] = values[head, :, token].flatten()


def slots_of(memory: np.ndarray, layout: SlotLayout = LAYOUT) -> torch.Tensor:
    """Return the slots in shared memory as a tensor of their shape."""
    return torch.from_numpy(memory[: layout.nbytes]).view(INTEGERS[layout.value_nbytes]).view(layout.shape)

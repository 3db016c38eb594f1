"""Copies of KV between a worker's slots and the blocks of vLLM on a CPU, on a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_worker.block_layout import LayoutMismatch, SlotLayout, require_layers
from vllm_worker.copy_thread import CopyThread
from vllm_worker.kv_jobs import BlocksToCopy, LayerToCopy, Pairs


class HostLayer:
    """vLLM's KV of one layer on a CPU: blocks in the order of slots, [heads, 2, tokens, head_dim].

    A head of a block has the order of vLLM's kernels for the processor, which is given as `positions`.
    """

    def __init__(self, layer: torch.Tensor, block: torch.Size, positions: torch.Tensor) -> None:
        """`positions` [2 * tokens * head_dim]: where vLLM keeps each value of a head of a slot, in the order of the
        slot. `block` is the shape of a slot's layer. Raises LayoutMismatch."""
        heads, _, tokens, head_dim = block
        if layer.dim() != 4 or tuple(layer.shape[1:]) != (heads, tokens, 2 * head_dim):
            raise LayoutMismatch(
                f"a layer of vLLM's KV has shape {tuple(layer.shape)}, "
                f"expected (blocks, {heads}, {tokens}, {2 * head_dim})"
            )
        if not torch.equal(positions.sort().values, torch.arange(2 * tokens * head_dim)):
            raise LayoutMismatch("vLLM's kernels do not keep every value of a block in a place of its own")
        self._block = block
        self._positions = positions
        self._blocks = layer.view(len(layer), heads, len(positions))
        self._slot_order = torch.empty_like(positions)
        self._slot_order[positions] = torch.arange(len(positions))

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the blocks as [n, heads, 2, tokens, head_dim]."""
        return self._blocks[blocks].index_select(2, self._positions).view(len(blocks), *self._block)

    def write(self, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the blocks with values [n, heads, 2, tokens, head_dim]."""
        self._blocks[blocks] = values.flatten(2).index_select(2, self._slot_order)


class HostBlockCopies:
    """`BlockCopies` of a rank on a CPU."""

    def __init__(
        self,
        slots: NDArray[np.uint8],
        layout: SlotLayout,
        layers: Sequence[torch.Tensor],
        heads: range,
        positions: torch.Tensor,
    ) -> None:
        """`slots` is the shared memory, `layers` vLLM's KV tensors by layer; this rank holds `heads` of each layer.
        `positions`: as in HostLayer.

        Raises LayoutMismatch.
        """
        require_layers(layout, len(slots), layers)
        every = torch.from_numpy(slots[: layout.nbytes]).view(layers[0].dtype).view(layout.shape)
        self._slots = every[:, :, heads.start : heads.stop]
        self._layers = [HostLayer(layer, self._slots.shape[2:], positions) for layer in layers]
        self._thread = CopyThread("kv-copies")

    def close(self) -> None:
        self._thread.close()

    def order_compute(self) -> None:
        self._thread.drain()

    def load(self, copy: BlocksToCopy, ended: Callable[[BlocksToCopy, Exception | None], None]) -> None:
        self._thread.submit(lambda: self._load(copy.pairs), partial(ended, copy))

    def save(self, copy: BlocksToCopy, ended: Callable[[BlocksToCopy, Exception | None], None]) -> None:
        self._thread.submit(lambda: self._save(range(len(self._layers)), copy.pairs), partial(ended, copy))

    def save_layer(
        self, layer: int, copies: Sequence[LayerToCopy], ended: Callable[[int, Exception | None], None]
    ) -> None:
        pairs = [pair for copy in copies for pair in copy.pairs]
        self._thread.submit(lambda: self._save([layer], pairs), partial(ended, layer))

    @torch.inference_mode()
    def _load(self, pairs: Pairs) -> None:
        if pairs:
            blocks, slots = torch.tensor(pairs, dtype=torch.long).unbind(1)
            for index, layer in enumerate(self._layers):
                layer.write(blocks, self._slots[slots, index])

    @torch.inference_mode()
    def _save(self, layers: Sequence[int], pairs: Pairs) -> None:
        if pairs:
            blocks, slots = torch.tensor(pairs, dtype=torch.long).unbind(1)
            for index in layers:
                self._slots[slots, index] = self._layers[index].read(blocks)

"""Copies of KV between a worker's slots and the blocks of one vLLM rank, on a thread of their own.

vLLM's engine thread only queues copies, and on a GPU records events: a copy from the GPU runs on a stream of its own
after the computation that it waits for. It has not been run on a GPU yet.

Slots are host memory that the worker shares with vLLM's processes. Each rank copies its own heads of every slot.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool import KvSpec
from vllm_worker.kv_jobs import BlocksToCopy, LayerToCopy, Pairs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Shape of the slots, all in one group: [num_slots, layers, kv_heads, 2, block_tokens, head_dim]."""

    num_slots: int
    num_layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int

    @classmethod
    def of(cls, spec: KvSpec, num_slots: int) -> SlotLayout:
        """Return the layout of the slots of `spec`, which has one group."""
        (group,) = spec.groups
        return cls(num_slots, len(group.layers), group.kv_heads, spec.block_tokens, group.head_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all slots."""
        return self.num_slots, self.num_layers, self.kv_heads, 2, self.block_tokens, self.head_dim


class LayoutMismatch(Exception):
    """vLLM's KV tensors do not have the shape of the worker's slots."""


class VllmLayer:
    """vLLM's KV of one layer: blocks in the order of slots, [heads, 2, tokens, head_dim], whatever vLLM's own order.

    vLLM's tensor is [blocks, heads, tokens, 2 * head_dim]: on a GPU a token's key and then its value. On a CPU a head
    of a block has the order of vLLM's kernels for that processor, which is given as `positions`.
    """

    def __init__(self, layer: torch.Tensor, block: torch.Size, positions: torch.Tensor | None) -> None:
        """`positions` [2 * tokens * head_dim]: where vLLM keeps each value of a head of a slot, in the order of the
        slot; None on a GPU. `block` is the shape of a slot's layer. Raises LayoutMismatch."""
        _require_shape(layer, block)
        heads, _, tokens, head_dim = block
        self._block = block
        self._positions = positions
        if positions is None:
            self._blocks = layer.view(len(layer), heads, tokens, 2, head_dim).transpose(2, 3)
            return
        if not torch.equal(positions.sort().values, torch.arange(2 * tokens * head_dim)):
            raise LayoutMismatch("vLLM's kernels do not keep every value of a block in a place of its own")
        self._blocks = layer.view(len(layer), heads, len(positions))
        self._slot_order = torch.empty_like(positions)
        self._slot_order[positions] = torch.arange(len(positions))

    def read(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the blocks as [n, heads, 2, tokens, head_dim] in host memory."""
        found = self._blocks[blocks.to(self._blocks.device)]
        if self._positions is not None:
            found = found.index_select(2, self._positions)
        return found.view(len(blocks), *self._block).cpu()

    def write(self, blocks: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the blocks with values [n, heads, 2, tokens, head_dim] in host memory."""
        if self._positions is not None:
            values = values.flatten(2).index_select(2, self._slot_order)
        self._blocks[blocks.to(self._blocks.device)] = values.to(self._blocks.device, non_blocking=True)


class BlockCopies:
    """The copies of one rank. All methods are called on vLLM's engine thread; callbacks run on the copying thread."""

    def __init__(
        self,
        slots: NDArray[np.uint8],
        layout: SlotLayout,
        layers: Sequence[torch.Tensor],
        heads: range,
        positions: torch.Tensor | None,
    ) -> None:
        """`slots` is the shared memory, `layers` vLLM's KV tensors by layer; this rank holds `heads` of each layer.
        `positions`: as in VllmLayer.

        Raises LayoutMismatch.
        """
        if len(layers) != layout.num_layers:
            raise LayoutMismatch(f"vLLM has KV of {len(layers)} layers, the slots have {layout.num_layers}")
        nbytes = int(np.prod(layout.shape)) * layers[0].element_size()
        if nbytes > len(slots):
            raise LayoutMismatch(f"the slots have {len(slots)} bytes, and vLLM's KV takes {nbytes}")
        every = torch.from_numpy(slots[:nbytes]).view(layers[0].dtype).view(layout.shape)
        self._slots = every[:, :, heads.start : heads.stop]
        self._layers = [VllmLayer(layer, self._slots.shape[2:], positions) for layer in layers]
        device = layers[0].device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copies")

    def close(self) -> None:
        """Wait for the queued copies."""
        self._thread.shutdown()

    def drain(self) -> None:
        """Wait for the queued copies: blocks that they read are about to be overwritten."""
        self._thread.submit(lambda: None).result()

    def load(self, copy: BlocksToCopy, ended: Callable[[BlocksToCopy, Exception | None], None]) -> None:
        """Copy slots to vLLM's blocks, which nothing uses yet; then call `ended` with the error, if there was one."""
        self._thread.submit(self._run, lambda: self._load(copy.pairs), lambda error: ended(copy, error), None)

    def save(self, copy: BlocksToCopy, ended: Callable[[BlocksToCopy, Exception | None], None]) -> None:
        """Copy vLLM's blocks to slots, after what is computed now; then call `ended`."""
        self._thread.submit(
            self._run, lambda: self._save(copy.pairs), lambda error: ended(copy, error), self._computed()
        )

    def save_layer(
        self, layer: int, copies: Sequence[LayerToCopy], ended: Callable[[int, Exception | None], None]
    ) -> None:
        """Copy one layer of vLLM's blocks to slots, after what is computed now; then call `ended` with the layer."""
        pairs = [pair for copy in copies for pair in copy.pairs]
        self._thread.submit(
            self._run, lambda: self._save_layers([layer], pairs), lambda error: ended(layer, error), self._computed()
        )

    def _computed(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _run(
        self, work: Callable[[], None], ended: Callable[[Exception | None], None], after: torch.cuda.Event | None
    ) -> None:
        error: Exception | None = None
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
                if self._stream is not None and after is not None:
                    self._stream.wait_event(after)
                work()
                if self._stream is not None:
                    self._stream.synchronize()
        except Exception as problem:
            log.exception("KV was not copied between vLLM's blocks and the worker's slots")
            error = problem
        try:
            ended(error)
        except Exception:
            log.exception("the end of a copy could not be reported")

    def _load(self, pairs: Pairs) -> None:
        if pairs:
            blocks, slots = _columns(pairs)
            for index, layer in enumerate(self._layers):
                layer.write(blocks, self._slots[slots, index])

    def _save(self, pairs: Pairs) -> None:
        self._save_layers(range(len(self._layers)), pairs)

    def _save_layers(self, layers: Sequence[int], pairs: Pairs) -> None:
        if pairs:
            blocks, slots = _columns(pairs)
            for index in layers:
                self._slots[slots, index] = self._layers[index].read(blocks)


def _columns(pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.tensor(pairs, dtype=torch.long)
    return both[:, 0], both[:, 1]


def _require_shape(layer: torch.Tensor, block: torch.Size) -> None:
    heads, _, tokens, head_dim = block
    if layer.dim() != 4 or tuple(layer.shape[1:]) != (heads, tokens, 2 * head_dim):
        raise LayoutMismatch(
            f"a layer of vLLM's KV has shape {tuple(layer.shape)}, expected (blocks, {heads}, {tokens}, {2 * head_dim})"
        )

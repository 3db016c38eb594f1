"""Copies of KV between a worker's slots and the blocks of vLLM on a GPU, over the streams of `messenger.staging`.

A save gathers blocks in the order of slots into a buffer on the device, from where the slots are written; a load is the
reverse. Each direction has a stream, a part of the buffer, and a thread (▶ = waits on the device, ┊ = a thread waits):

  compute   … layer l written ●────────────────────────────── … ●───────▶ overwrites blocks of a preempted request …
                              │ save_layer                    │    ▲ order_compute (waits for `in`, too)
  out                         └▶ gather, copy ● ┊ reported ─────────┘
                                                              │ load
  in                                                          └▶ copy, scatter ● ┊ reported, then computed

- Everything is queued by the engine's thread, which waits for nothing if the slots can be page-locked.
- A load, too, waits for the computation before it: steps that were queued earlier may still write, or clear, blocks
  that vLLM has given to another request since.
- A stream executes its work in order, so the rounds of a large copy reuse the buffer without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from messenger.staging import DeviceRuntime, DeviceStream, EventTicket, FailedTicket, PinnedMirror, Ranges, merged
from vllm_worker.block_layout import LayoutMismatch, SlotLayout, in_slot_order, require_layers
from vllm_worker.copy_thread import CopyThread, Ended
from vllm_worker.kv_jobs import BlocksToCopy, LayerToCopy, Pairs


@dataclass(slots=True, eq=False)
class _Blocks:
    """Blocks to copy and their slots, both [n] and in the order of slots."""

    blocks: torch.Tensor  # in host memory, page-locked where there is a GPU
    slots: NDArray[np.int64]
    on_device: torch.Tensor | None = None  # `blocks`, once work on the one stream that uses it has copied them


@dataclass(frozen=True, slots=True)
class _Direction:
    stream: DeviceStream
    offset: int  # of its part of the buffer, in bytes
    thread: CopyThread = field(default_factory=lambda: CopyThread("kv-copies"))


Piece = tuple[int, int, int]  # (layer, start, end): the blocks [start, end) of a copy


def rounds(layers: Sequence[int], count: int, capacity: int) -> Iterator[list[Piece]]:
    """Divide `count` blocks of every layer into rounds of at most `capacity` blocks of one layer."""
    pieces: list[Piece] = []
    room = capacity
    for layer in layers:
        start = 0
        while start < count:
            end = min(count, start + room)
            pieces.append((layer, start, end))
            start, room = end, room - (end - start)
            if not room:
                yield pieces
                pieces, room = [], capacity
    if pieces:
        yield pieces


class DeviceBlockCopies:
    """`BlockCopies` of a rank on a GPU."""

    def __init__(
        self,
        slots: NDArray[np.uint8],
        layout: SlotLayout,
        layers: Sequence[torch.Tensor],
        heads: range,
        runtime: DeviceRuntime,
        buffer: torch.Tensor,
    ) -> None:
        """`slots` is the shared memory, `layers` vLLM's KV tensors by layer; this rank holds `heads` of each layer.
        `buffer` (uint8) is the memory of `runtime`; half of it must hold a layer of a block.

        Raises LayoutMismatch.
        """
        require_layers(layout, len(slots), layers)
        self._layout = layout
        self._views = [in_slot_order(layer, layout, len(heads)) for layer in layers]
        self._device = layers[0].device
        self._buffer = buffer
        self._unit = len(heads) * layout.head_nbytes  # bytes of a layer of a block of this rank
        self._heads_offset = heads.start * layout.head_nbytes
        self._capacity = len(buffer) // 2 // self._unit
        if not self._capacity:
            raise LayoutMismatch(f"half of the buffer of {len(buffer)} bytes must hold {self._unit} bytes")
        self._runtime = runtime
        self._out = _Direction(runtime.new_stream(), 0)
        self._in = _Direction(runtime.new_stream(), self._capacity * self._unit)
        self._mirror = PinnedMirror(runtime, slots)
        self._step: tuple[Sequence[LayerToCopy], _Blocks] | None = None  # of the last layer saved

    def close(self) -> None:
        for direction in (self._out, self._in):
            direction.thread.close()
        self._mirror.close()

    def order_compute(self) -> None:
        compute = self._runtime.compute
        for direction in (self._out, self._in):
            compute.wait(direction.stream.record())

    def load(self, copy: BlocksToCopy, ended: Callable[[BlocksToCopy, Exception | None], None]) -> None:
        self._queue(self._in, lambda: self._load(self._blocks(copy.pairs)), partial(ended, copy))

    def save(self, copy: BlocksToCopy, ended: Callable[[BlocksToCopy, Exception | None], None]) -> None:
        every = range(len(self._views))
        direction = self._out if copy.keeps_blocks else self._in
        self._queue(direction, lambda: self._save(every, self._blocks(copy.pairs), direction), partial(ended, copy))

    def save_layer(
        self, layer: int, copies: Sequence[LayerToCopy], ended: Callable[[int, Exception | None], None]
    ) -> None:
        self._queue(self._out, lambda: self._save([layer], self._of_step(copies), self._out), partial(ended, layer))

    def _queue(self, direction: _Direction, copy: Callable[[], None], ended: Ended) -> None:
        """Queue a copy after the computation queued so far; `ended` is called once nothing of it is in progress."""
        ticket: EventTicket | FailedTicket
        compute = self._runtime.compute
        try:
            direction.stream.wait(compute.record())
            copy()
            ticket = EventTicket(direction.stream.record(), compute)
        except Exception as error:
            ticket = FailedTicket.after(direction.stream, error)
        direction.thread.submit(ticket.wait, ended)

    def _of_step(self, copies: Sequence[LayerToCopy]) -> _Blocks:
        if self._step is None or self._step[0] is not copies:
            self._step = copies, self._blocks([pair for copy in copies for pair in copy.pairs])
        return self._step[1]

    def _blocks(self, pairs: Pairs) -> _Blocks:
        """Raises IndexError for a block or a slot that does not exist: a GPU's kernels end their process over it."""
        both = np.array(sorted(pairs, key=lambda pair: pair[1]), np.int64).reshape(-1, 2)
        limits = np.array([min(map(len, self._views)), self._layout.num_slots])
        if ((both < 0) | (both >= limits)).any():
            raise IndexError(f"vLLM has {limits[0]} blocks and the worker {limits[1]} slots: cannot copy {pairs}")
        blocks = torch.from_numpy(both[:, 0].copy())
        return _Blocks(blocks.pin_memory() if self._device.type == "cuda" else blocks, both[:, 1])

    def _save(self, layers: Sequence[int], blocks: _Blocks, direction: _Direction) -> None:
        for pieces in rounds(layers, len(blocks.slots), self._capacity):
            parts = []
            for (layer, start, end), ranges in self._placed(pieces, blocks, direction):
                direction.stream.launch(partial(self._gather, layer, blocks, start, end, int(ranges.device[0])))
                parts.append(ranges)
            self._runtime.copy(direction.stream, merged(parts, self._runtime.max_pitch), to_host=True)

    def _load(self, blocks: _Blocks) -> None:
        stream = self._in.stream
        for pieces in rounds(range(len(self._views)), len(blocks.slots), self._capacity):
            placed = list(self._placed(pieces, blocks, self._in))
            copies = merged([ranges for _, ranges in placed], self._runtime.max_pitch)
            self._runtime.copy(stream, copies, to_host=False)
            for (layer, start, end), ranges in placed:
                stream.launch(partial(self._scatter, layer, blocks, start, end, int(ranges.device[0])))

    def _placed(
        self, pieces: Sequence[Piece], blocks: _Blocks, direction: _Direction
    ) -> Iterator[tuple[Piece, Ranges]]:
        """Yield the pieces of a round with their ranges in the slots and in the buffer, where they are adjacent."""
        at = direction.offset
        for layer, start, end in pieces:
            first = layer * self._layout.layer_nbytes + self._heads_offset
            in_slots = blocks.slots[start:end] * self._layout.slot_nbytes + first
            in_buffer = at + np.arange(end - start, dtype=np.int64) * self._unit
            yield (layer, start, end), Ranges(in_slots, in_buffer, self._unit)
            at += (end - start) * self._unit

    # Work of the device, launched on a stream.

    @torch.inference_mode()
    def _gather(self, layer: int, blocks: _Blocks, start: int, end: int, at: int) -> None:
        view = self._views[layer]
        torch.index_select(view, 0, self._index(blocks)[start:end], out=self._in_buffer(view, at, end - start))

    @torch.inference_mode()
    def _scatter(self, layer: int, blocks: _Blocks, start: int, end: int, at: int) -> None:
        view = self._views[layer]
        view.index_copy_(0, self._index(blocks)[start:end], self._in_buffer(view, at, end - start))

    def _index(self, blocks: _Blocks) -> torch.Tensor:
        if blocks.on_device is None:
            blocks.on_device = blocks.blocks.to(self._device, non_blocking=True)
        return blocks.on_device

    def _in_buffer(self, view: torch.Tensor, at: int, count: int) -> torch.Tensor:
        """Return the buffer from byte `at` on as `count` blocks of the shape of the view's."""
        return self._buffer[at : at + count * self._unit].view(view.dtype).view(count, *view.shape[1:])

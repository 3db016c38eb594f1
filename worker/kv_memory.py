"""The engine's KV cache in memory that the messenger can reach.

On a CPU the cache lives in the registered memory itself: what a peer pushes lands in place. On a GPU the registered
host memory is a mirror of the cache with the same offsets: `to_host` before a slot is read by a peer, `to_device` after
one has landed. Both are no-ops on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine import Model, PagedCache
from kvpool import KvGroup, KvSpec, layer_digests_at
from messenger import Messenger
from worker.slot_memory import SlotMemory


def spec_of(model: Model, block_tokens: int) -> KvSpec:
    """The pool's view of a model's KV: the same groups, in the same order."""
    groups = tuple(
        KvGroup(kind=g.kind, window=g.window, layers=g.layers, kv_heads=g.kv_heads, head_dim=g.head_dim, dtype=g.dtype)
        for g in model.kv_groups
    )
    return KvSpec(groups=groups, block_tokens=block_tokens)


class KvMemory(SlotMemory):
    """The engine's slots, addressed by (group, slot, layer)."""

    def __init__(self, model: Model, messenger: Messenger, *, num_slots: int, block_tokens: int) -> None:
        super().__init__(spec_of(model, block_tokens), num_slots, messenger, name="moonpool-kv")
        host = torch.from_numpy(self._memory.array)
        self._on_gpu = model.device.type != "cpu"
        device = torch.empty(self.nbytes, dtype=torch.uint8, device=model.device) if self._on_gpu else host
        self._host, self._device = host, device
        counts = (num_slots,) * len(model.kv_groups)
        self.cache = PagedCache(model.kv_groups, counts, block_tokens=block_tokens, memory=device)
        # model layer -> (group, layer within the group)
        self.place_of_layer = {
            layer: (g, i) for g, group in enumerate(self.spec.groups) for i, layer in enumerate(group.layers)
        }

    def close(self) -> None:
        super().close()
        del self._host, self._device, self.cache

    def slot_values(self, group: int) -> torch.Tensor:
        """The slots of a group as the messenger sees them: [num_slots, layers, kv_heads, 2, block_tokens, head_dim]."""
        g, start = self.spec.groups[group], self._base[group]
        end = start + self.cache.num_slots[group] * self._slot_nbytes[group]
        shape = (-1, len(g.layers), g.kv_heads, 2, self.block_tokens, g.head_dim)
        return self._host[start:end].view(getattr(torch, g.dtype)).view(shape)

    def layer_slices(self, layer: int, slots: Sequence[int], remote: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Messenger slices [n, 3] of one model layer of each slot; `remote` holds whole-slot offsets per group."""
        group, index = self.place_of_layer[layer]
        size = self._layer_nbytes[group]
        shift = index * size
        return np.stack(
            [
                self.offsets(group, slots) + shift,
                remote[group] + shift,
                np.full(len(slots), size, dtype=np.int64),
            ],
            axis=1,
        )

    def one_layer_digests(self, layer: int, slots: Sequence[int], valid: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Digests [n] of one model layer of each slot."""
        group, index = self.place_of_layer[layer]
        one = slice(index, index + 1)
        return layer_digests_at(self._memory.array, self.offsets(group, slots), self.spec, group, valid, one)[:, 0]

    def to_host(self, slots: Sequence[int], layer: int | None = None) -> None:
        """Make slots (one layer of them, or all) readable by the messenger. Returns when the bytes are there."""
        if self._on_gpu:
            self._mirror(slots, layer, self._host, self._device)
            torch.cuda.current_stream(self._device.device).synchronize()

    def to_device(self, slots: Sequence[int]) -> None:
        """Make landed slots readable by the engine."""
        if self._on_gpu:
            self._mirror(slots, None, self._device, self._host)
            torch.cuda.current_stream(self._device.device).synchronize()

    def _mirror(self, slots: Sequence[int], layer: int | None, target: torch.Tensor, source: torch.Tensor) -> None:
        for group in range(self.num_groups):
            start, stop = 0, self._slot_nbytes[group]
            if layer is not None:
                place, index = self.place_of_layer[layer]
                if place != group:
                    continue
                start = index * self._layer_nbytes[group]
                stop = start + self._layer_nbytes[group]
            for offset in self.offsets(group, slots).tolist():
                target[offset + start : offset + stop].copy_(source[offset + start : offset + stop], non_blocking=True)

"""The engine's KV cache in memory that the messenger can reach.

On a CPU the cache lives in the registered memory itself: what a peer pushes lands in place. On a GPU the registered
host memory is a mirror of the cache with the same offsets: `to_host` before a slot is read by a peer, `to_device` after
one has landed. Both are no-ops on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine import Model, PagedCache
from messenger import Messenger
from worker.engine_memory import EngineMemory, spec_of

# Of the largest value of a block's layer, K and V apart. Chunks and decode steps take sums in another order: with the
# bundled model they differ by up to 7e-6, 3e-3 and 2e-2 of it, and errors grow with a model's depth.
TOLERANCE: Final = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


class KvMemory(EngineMemory):
    """A transformer's paged cache."""

    def __init__(self, model: Model, messenger: Messenger, *, num_slots: int, block_tokens: int) -> None:
        super().__init__(spec_of(model.kv_groups, block_tokens), num_slots, messenger)
        host = torch.from_numpy(self._memory.array)
        self._on_gpu = model.device.type != "cpu"
        device = torch.empty(self.nbytes, dtype=torch.uint8, device=model.device) if self._on_gpu else host
        self._host, self._device = host, device
        counts = (num_slots,) * len(model.kv_groups)
        self.cache = PagedCache(model.kv_groups, counts, block_tokens=block_tokens, memory=device)

    def close(self) -> None:
        super().close()
        del self._host, self._device, self.cache

    def slot_values(self, group: int) -> torch.Tensor:
        """The slots of a group as the messenger sees them: [num_slots, layers, kv_heads, 2, block_tokens, head_dim]."""
        g, start = self.spec.groups[group], self._base[group]
        end = start + self.cache.num_slots[group] * self._slot_nbytes[group]
        shape = (-1, len(g.layers), g.kv_heads, 2, self.block_tokens, g.head_dim)
        return self._host[start:end].view(getattr(torch, g.dtype)).view(shape)

    def to_host(self, slots: Sequence[int], layer: int | None = None) -> None:
        if self._on_gpu:
            self._mirror(slots, layer, self._host, self._device)
            torch.cuda.current_stream(self._device.device).synchronize()

    def to_device(self, slots: Sequence[int], layer: int | None = None) -> None:
        if self._on_gpu:
            self._mirror(slots, layer, self._device, self._host)
            torch.cuda.current_stream(self._device.device).synchronize()

    def differ(
        self, group: int, given: NDArray[np.uint8], computed: NDArray[np.uint8], valid: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        g = self.spec.groups[group]
        shape = (len(given), len(g.layers), g.kv_heads, 2, self.block_tokens, g.head_dim)
        dtype: torch.dtype = getattr(torch, g.dtype)
        a, b = (torch.from_numpy(each).view(dtype).reshape(shape).float() for each in (given, computed))
        counts = torch.arange(self.block_tokens) < torch.from_numpy(valid)[:, None]
        mask = counts[:, None, None, None, :, None]
        zero = torch.zeros(())
        scale = torch.where(mask, b.abs(), zero).amax(dim=(2, 4, 5), keepdim=True)
        close = (a - b).abs() <= TOLERANCE[g.dtype] * scale  # false for what is not a number
        found: NDArray[np.bool_] = (~(close | ~mask)).flatten(1).any(dim=1).numpy()
        return found

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

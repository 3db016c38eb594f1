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
from messenger import Messenger, Region, SharedMemory


def spec_of(model: Model, block_tokens: int) -> KvSpec:
    """The pool's view of a model's KV: the same groups, in the same order."""
    groups = tuple(
        KvGroup(kind=g.kind, window=g.window, layers=g.layers, kv_heads=g.kv_heads, head_dim=g.head_dim, dtype=g.dtype)
        for g in model.kv_groups
    )
    return KvSpec(groups=groups, block_tokens=block_tokens)


class KvMemory:
    """`num_slots` slots in every group, addressed by (group, slot, layer)."""

    def __init__(self, model: Model, messenger: Messenger, *, num_slots: int, block_tokens: int) -> None:
        self.spec = spec_of(model, block_tokens)
        self.block_tokens = block_tokens
        counts = (num_slots,) * len(model.kv_groups)
        nbytes = PagedCache.required_nbytes(model.kv_groups, counts, block_tokens)
        self._messenger = messenger
        self._memory = SharedMemory.create(nbytes, "moonpool-kv")
        self.region: Region = messenger.register(self._memory)
        host = torch.from_numpy(self._memory.array)
        self._on_gpu = model.device.type != "cpu"
        device = torch.empty(nbytes, dtype=torch.uint8, device=model.device) if self._on_gpu else host
        self._host, self._device = host, device
        self.cache = PagedCache(model.kv_groups, counts, block_tokens=block_tokens, memory=device)
        self.num_groups = len(counts)
        self._base = [self.cache.slot_offset(g, 0) for g in range(self.num_groups)]
        self._slot_nbytes = [self.cache.slot_nbytes(g) for g in range(self.num_groups)]
        self._layer_nbytes = [self.cache.layer_nbytes(g) for g in range(self.num_groups)]
        # model layer -> (group, layer within the group)
        self.place_of_layer = {
            layer: (g, i) for g, group in enumerate(self.spec.groups) for i, layer in enumerate(group.layers)
        }

    def close(self) -> None:
        self._messenger.deregister(self.region)
        del self._host, self._device, self.cache
        self._memory.close()

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def offsets(self, group: int, slots: Sequence[int]) -> NDArray[np.int64]:
        """Byte offsets of whole slots in the region."""
        return self._base[group] + np.asarray(slots, dtype=np.int64) * self._slot_nbytes[group]

    def all_offsets(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """Byte offsets of whole slots in the region, [groups, n]."""
        return np.stack([self.offsets(g, slots) for g in range(self.num_groups)])

    def slot_slices(self, slots: Sequence[int], remote: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Messenger slices [groups * n, 3] pairing whole slots with remote offsets (one array [n] per group)."""
        parts = [
            np.stack(
                [self.offsets(g, slots), remote[g], np.full(len(slots), self._slot_nbytes[g], dtype=np.int64)], axis=1
            )
            for g in range(self.num_groups)
        ]
        return np.concatenate(parts)

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

    def slot_digests(self, group: int, slots: Sequence[int], valid: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Layer digests [n, layers of the group] of the valid tokens of each slot."""
        return layer_digests_at(self._memory.array, self.offsets(group, slots), self.spec, group, valid)

    def one_layer_digests(self, layer: int, slots: Sequence[int], valid: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Digests [n] of one model layer of each slot."""
        group, index = self.place_of_layer[layer]
        one = slice(index, index + 1)
        return layer_digests_at(self._memory.array, self.offsets(group, slots), self.spec, group, valid, one)[:, 0]

    def slot_bytes(self, group: int, slots: Sequence[int]) -> NDArray[np.uint8]:
        """A copy of whole slots as the messenger sees them, [n, slot_nbytes]."""
        size = self._slot_nbytes[group]
        return np.stack([self._memory.array[at : at + size] for at in self.offsets(group, slots).tolist()])

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

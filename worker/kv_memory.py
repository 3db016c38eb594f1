"""The engine's KV cache in memory registered with the messenger, exact and in int8.

On a CPU the cache is the registered memory itself: pushed data arrives in place. On a GPU the registered host memory is
a mirror of the cache with the same offsets: call `to_host` before a peer reads a slot and `to_device` after a slot was
received. Both are no-ops on a CPU.

In int8 (`kv_storage`), each row (one token's K or V in one head of one layer) is cut into groups of `scale_group`
values. A group is stored as round(x / s) in int8 with s = max|x| / 127 as float16, after the row's values (PPL.LLM's
group-wise int8 KV). The error of a value is at most s / 2, and a row takes head_dim + 2 head_dim / scale_group bytes.
Such KV is an approximation, and so is everything computed from it, so it has its own namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine import Model, PagedCache
from kvpool import KvGroup, KvPoolError, KvSpec
from messenger import Messenger
from worker.slot_memory import EngineMemory, SlotMemory, spec_of

# Relative to the largest value of a block's layer, K and V separately. Chunks and decode steps sum in different orders:
# with the bundled model they differ by up to 7e-6, 3e-3 and 2e-2, and errors grow with a model's depth.
TOLERANCE: Final = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


class KvMemory(EngineMemory):
    """Slots of a transformer's paged cache."""

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
        """Return a group's slots as the messenger sees them.

        Shape [num_slots, layers, kv_heads, 2, block_tokens, head_dim].
        """
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
        close = (a - b).abs() <= TOLERANCE[g.dtype] * scale  # false for NaN
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


_LARGEST = 127
_LONGEST_GROUP = 64


def quantised_spec(spec: KvSpec) -> KvSpec:
    """Return the int8 form of `spec`.

    Rows remain multiples of 4 bytes if head_dim is a multiple of 4, which makes digests fast.
    """
    groups = [replace(group, dtype="int8", scale_group=_scale_group(group)) for group in spec.groups]
    return KvSpec(tuple(groups), spec.block_tokens)


class QuantisedMemory(SlotMemory):
    """int8 counterparts of the engine's slots, which the messenger and the pool use in their place."""

    def __init__(self, exact: KvMemory, messenger: Messenger, *, num_slots: int) -> None:
        super().__init__(quantised_spec(exact.spec), num_slots, messenger, name="moonpool-kv-int8")
        self._exact = exact
        self._bytes = torch.from_numpy(self._memory.array)

    def close(self) -> None:
        super().close()
        del self._bytes

    def to_host(self, slots: Sequence[int]) -> None:
        """Quantise the engine's content of these slots. Raises KvPoolError for values that int8 cannot represent."""
        self._exact.to_host(slots)
        index = torch.tensor(list(slots), dtype=torch.long)
        for g, group in enumerate(self.spec.groups):
            values = _grouped(self._exact.slot_values(g)[index].float(), group.scale_group)
            scales = (values.abs().amax(dim=-1, keepdim=True) / _LARGEST).half()
            if not torch.isfinite(scales).all():
                raise KvPoolError("KV must be finite and small enough for float16 scales to be stored as int8")
            # A scale of 0 represents values that underflow to 0 in float16.
            steps = (values / torch.where(scales > 0, scales.float(), 1.0)).round().clamp_(-_LARGEST, _LARGEST)
            rows = self._rows(g)
            rows[index, ..., : group.head_dim] = steps.to(torch.int8).flatten(-2).view(torch.uint8)
            rows[index, ..., group.head_dim :] = scales.squeeze(-1).contiguous().view(torch.uint8)

    def to_device(self, slots: Sequence[int]) -> None:
        """Dequantise these slots into the same slots of the engine."""
        index = torch.tensor(list(slots), dtype=torch.long)
        for g, group in enumerate(self.spec.groups):
            rows = self._rows(g)[index]
            steps = _grouped(rows[..., : group.head_dim].view(torch.int8).float(), group.scale_group)
            scales = rows[..., group.head_dim :].contiguous().view(torch.float16).float().unsqueeze(-1)
            exact = self._exact.slot_values(g)
            exact[index] = (steps * scales).flatten(-2).to(exact.dtype)
        self._exact.to_device(slots)

    def _rows(self, group: int) -> torch.Tensor:
        """Return uint8 [num_slots, layers, kv_heads, 2, block_tokens, bytes of a row]."""
        g, start = self.spec.groups[group], self._base[group]
        end = self._base[group + 1] if group + 1 < self.num_groups else self.nbytes
        shape = (-1, len(g.layers), g.kv_heads, 2, self.block_tokens, g.token_row_nbytes)
        return self._bytes[start:end].view(shape)


def _grouped(values: torch.Tensor, size: int) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


def _scale_group(group: KvGroup) -> int:
    """Return the number of values per scale: at most 64, with an even number of scales if head_dim allows it."""
    for num_scales in range(1, group.head_dim + 1):
        size, rest = divmod(group.head_dim, num_scales)
        if not rest and size <= _LONGEST_GROUP and (num_scales % 2 == 0 or group.head_dim % 2):
            return size
    return 1

"""The engine's KV cache in memory registered with the messenger, exact and in int8.

On a CPU the cache is the registered memory itself: pushed data arrives in place. On a GPU the registered memory is a
page-locked mirror of the cache in host memory, with the same offsets, or the cache itself if all peers are reached by
adapters that access it (`kv_staging`): `to_host` comes before a peer reads a slot and `to_device` after a slot was
received. On a CPU both do nothing.

With `kv_storage` int8, the pool stores rows in int8 (`engine.int8_rows`). Such KV is an approximation, and so is
everything computed from it, so it has its own namespace. A model whose own cache is in int8 needs no conversion.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from engine import Model, PagedCache
from engine.int8_rows import decode_rows, encode_rows
from kvpool import KvGroup, KvPoolError, KvSpec
from messenger import GpuMemory, GpuMemoryUnsupported, Messenger
from messenger.staging import READY, DeviceRuntime, DirectStaging, MirrorStaging, StagingError, Ticket
from settings.worker import KvSettings
from worker.device_digests import DeviceDigests
from worker.errors import StartupError
from worker.policy import BatchLimits, WindowSlots
from worker.slot_memory import EngineMemory, SlotMemory, spec_of, windows_of

log = logging.getLogger(__name__)

# Relative to the largest value of a block's layer, K and V separately. Chunks and decode steps sum in different orders:
# with the bundled model they differ by up to 7e-6, 3e-3 and 2e-2, and errors grow with a model's depth.
TOLERANCE: Final = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "int8": 5e-2}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCache:
    """Device memory for an engine's cache, and the runtime that copies it."""

    memory: torch.Tensor  # uint8 [nbytes]
    runtime: DeviceRuntime
    is_registered: bool = False  # adapters access the memory itself: there is no mirror


class KvMemory(EngineMemory):
    """Slots of a transformer's paged cache."""

    def __init__(
        self,
        model: Model,
        messenger: Messenger,
        *,
        num_slots: int,
        block_tokens: int,
        windows: WindowSlots | None = None,
        device: DeviceCache | None = None,
    ) -> None:
        """Without `device` the cache is the registered host memory. Raises OSError and GpuMemoryUnsupported."""
        spec = spec_of(model.kv_groups, block_tokens)
        windows = windows or windows_of(spec, num_slots)
        if device is not None and device.is_registered:
            gpu = GpuMemory(device.memory.data_ptr(), device.memory.nbytes)
            super().__init__(spec, num_slots, messenger, gpu=gpu, windows=windows)
            self._digests: DeviceDigests | None = DeviceDigests(device.memory, spec)
            self.staging = DirectStaging(device.runtime)
        else:
            super().__init__(spec, num_slots, messenger, windows=windows)
            self._digests = None
            self._host = torch.from_numpy(self._array)
            if device is not None:
                self._commit_all()  # page-locking would commit small pages
                self.staging = MirrorStaging(device.runtime, self._array[: device.memory.nbytes])
        memory = self._host if device is None else device.memory
        self.cache = PagedCache(model.kv_groups, self.slots_per_group, block_tokens=block_tokens, memory=memory)

    @classmethod
    def of(
        cls,
        model: Model,
        messenger: Messenger,
        *,
        num_slots: int,
        block_tokens: int,
        kv: KvSettings,
        limits: BatchLimits | None = None,
    ) -> KvMemory:
        """Create the memory for the model's device, staged as `kv.kv_staging` selects.

        `limits` of the engine's steps bound the slots of windowed groups. Raises StartupError if it selects `direct`
        and that is impossible, if the model's KV cannot be cut into blocks or `limits` has too few window slots, and
        OSError.
        """
        try:
            windows = windows_of(spec_of(model.kv_groups, block_tokens), num_slots, limits)
        except ValueError as error:
            raise StartupError(str(error)) from error
        new = partial(cls, model, messenger, num_slots=num_slots, block_tokens=block_tokens, windows=windows)
        if model.device.type == "cpu":
            if kv.kv_staging == "direct":
                raise StartupError("kv_staging direct registers a GPU's memory, but the device is cpu: set mirror")
            return new()
        counts = [windows.num_slots if group.window and windows is not None else num_slots for group in model.kv_groups]
        nbytes = PagedCache.required_nbytes(model.kv_groups, counts, block_tokens)
        cache = cuda_cache(model.device, nbytes)
        if kv.kv_staging != "mirror":
            try:
                _require_direct(messenger, kv)
                return new(device=replace(cache, is_registered=True))
            except GpuMemoryUnsupported as error:
                if kv.kv_staging == "direct":
                    raise StartupError(f"kv_staging direct is impossible: {error}") from error
                log.warning("kv_staging auto: KV goes through a mirror in host memory, because %s", error)
        return new(device=cache)

    def close(self) -> None:
        super().close()
        self.__dict__.pop("_host", None)
        del self.cache

    def slot_digests(self, group: int, slots: Sequence[int], valid: NDArray[np.int32]) -> NDArray[np.uint64]:
        if self._digests is None:
            return super().slot_digests(group, slots, valid)
        return self._digests.of(group, self.offsets(group, slots), valid)

    def one_layer_digests(self, layer: int, slots: Sequence[int], valid: NDArray[np.int32]) -> NDArray[np.uint64]:
        if self._digests is None:
            return super().one_layer_digests(layer, slots, valid)
        group, index = self.place_of_layer[layer]
        return self._digests.of(group, self.offsets(group, slots), valid, slice(index, index + 1))[:, 0]

    def slot_bytes(self, group: int, slots: Sequence[int]) -> NDArray[np.uint8]:
        if self._digests is None:
            return super().slot_bytes(group, slots)
        size = self._slot_nbytes[group]
        rows = [self.cache.memory[at : at + size] for at in self.offsets(group, slots).tolist()]
        found: NDArray[np.uint8] = torch.stack(rows).cpu().numpy()
        return found

    def slot_values(self, group: int) -> torch.Tensor:
        """Return a group's slots as the messenger sees them.

        Shape [num_slots, layers, kv_heads, 2, block_tokens, head_dim].
        """
        g, start = self.spec.groups[group], self._base[group]
        end = start + self.cache.num_slots[group] * self._slot_nbytes[group]
        shape = (-1, len(g.layers), g.kv_heads, 2, self.block_tokens, g.head_dim)
        return self._host[start:end].view(getattr(torch, g.dtype)).view(shape)

    def differ(
        self, group: int, given: NDArray[np.uint8], computed: NDArray[np.uint8], valid: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        return values_differ(self.spec, group, given, computed, valid)


def values_differ(
    spec: KvSpec, group: int, given: NDArray[np.uint8], computed: NDArray[np.uint8], valid: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """As `EngineMemory.differ`, for slots of floating-point values: compares with the tolerance of their dtype."""
    g = spec.groups[group]
    shape = (len(given), len(g.layers), g.kv_heads, 2, spec.block_tokens, -1)
    if g.scale_group:
        rows = (torch.from_numpy(each).reshape(shape) for each in (given, computed))
        a, b = (decode_rows(each, g.head_dim, g.scale_group) for each in rows)
    else:
        dtype: torch.dtype = getattr(torch, g.dtype)
        a, b = (torch.from_numpy(each).view(dtype).reshape(shape).float() for each in (given, computed))
    counts = torch.arange(spec.block_tokens) < torch.from_numpy(valid)[:, None]
    mask = counts[:, None, None, None, :, None]
    zero = torch.zeros(())
    scale = torch.where(mask, b.abs(), zero).amax(dim=(2, 4, 5), keepdim=True)
    close = (a - b).abs() <= TOLERANCE[g.dtype] * scale  # false for NaN
    found: NDArray[np.bool_] = (~(close | ~mask)).flatten(1).any(dim=1).numpy()
    return found


def cuda_cache(device: torch.device, nbytes: int) -> DeviceCache:
    """Allocate memory for a cache on a CUDA device. Raises StartupError."""
    from messenger.staging.cuda import CudaRuntime

    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        return DeviceCache(memory, CudaRuntime(memory))
    except StagingError as error:
        raise StartupError(f"KV of {device} cannot be copied to host memory: {error}") from error


def _require_direct(messenger: Messenger, kv: KvSettings) -> None:
    """Raise GpuMemoryUnsupported if some reader or writer of the slots can only use host memory."""
    others = [name for name in messenger.transports if name != "rdma"]
    if others:
        raise GpuMemoryUnsupported(
            f"peers may connect by {' or '.join(others)}, which move host memory only: set transport to rdma"
        )
    if kv.kv_storage != "exact":
        raise GpuMemoryUnsupported(f"kv_storage {kv.kv_storage} converts KV in host memory: set kv_storage to exact")


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
        spec = quantised_spec(exact.spec)
        super().__init__(spec, num_slots, messenger, name="moonpool-kv-int8", windows=exact.windows)
        self._exact = exact
        self._bytes = torch.from_numpy(self._array)

    def close(self) -> None:
        super().close()
        del self._bytes

    def groups_to_host(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        """Quantise the engine's content of these slots, which blocks.

        Raises KvPoolError for values that int8 cannot represent, and StagingError.
        """
        self._exact.to_host_now(slots, groups)
        for g in groups:
            group = self.spec.groups[g]
            index = self._index(g, slots)
            rows = encode_rows(self._exact.slot_values(g)[index], group.scale_group)
            if not torch.isfinite(rows[..., group.head_dim :].contiguous().view(torch.float16)).all():
                raise KvPoolError("KV must be finite and small enough for float16 scales to be stored as int8")
            self._rows(g)[index] = rows
        return READY

    def groups_to_device(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        """Dequantise these slots into the same slots of the engine, which blocks until they are in host memory."""
        for g in groups:
            group = self.spec.groups[g]
            index = self._index(g, slots)
            exact = self._exact.slot_values(g)
            exact[index] = decode_rows(self._rows(g)[index], group.head_dim, group.scale_group).to(exact.dtype)
        return self._exact.groups_to_device(slots, groups)

    def _index(self, group: int, slots: Sequence[int]) -> torch.Tensor:
        """Return the numbers of the blocks' slots in the group, of those that have one there."""
        return torch.from_numpy(self.numbers(group, self.with_slots(group, slots)))

    def _rows(self, group: int) -> torch.Tensor:
        """Return uint8 [num_slots, layers, kv_heads, 2, block_tokens, bytes of a row]."""
        g, start = self.spec.groups[group], self._base[group]
        end = self._base[group + 1] if group + 1 < self.num_groups else self.nbytes
        shape = (-1, len(g.layers), g.kv_heads, 2, self.block_tokens, g.token_row_nbytes)
        return self._bytes[start:end].view(shape)


def _scale_group(group: KvGroup) -> int:
    """Return the number of values per scale: at most 64, with an even number of scales if head_dim allows it."""
    for num_scales in range(1, group.head_dim + 1):
        size, rest = divmod(group.head_dim, num_scales)
        if not rest and size <= _LONGEST_GROUP and (num_scales % 2 == 0 or group.head_dim % 2):
            return size
    return 1
